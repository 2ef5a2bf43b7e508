"""Chooses between the plain code and the fast paths; the only module of ``fast/`` to import.

Every fast path computes what its plain version computes, to rounding, and is tested against it.

- :func:`solve`, :func:`advance_`, :func:`gram`: a local problem, a first-order step, XᵀX of rows;
- :func:`finite`, :func:`write`: the check and the write of a solution, in one kernel each;
- ``streams``: side streams for independent layers while a CUDA graph is recorded;
- ``graphs``: recording and replaying work as a CUDA graph;
- ``overlap``: weight gradients computed beside the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_locoprop.fast import cpu_gram, cpu_onednn, rmsprop_in_place
from torch_locoprop.fast import cuda_graph as graphs
from torch_locoprop.fast import cuda_streams as streams
from torch_locoprop.fast import overlapped_weight_grads as overlap
from torch_locoprop.fast.eligibility import transfer_in
from torch_locoprop.fast.triton import availability, guarded_writes, local_iterations
from torch_locoprop.fast.triton import matrix_products as products
from torch_locoprop.paper.gram import Gram, full_products
from torch_locoprop.paper.linear_map import LinearMap
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.regularizers import Regularizer
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.paper.variants import Variant
from torch_locoprop.solvers import FirstOrder, Numbers, Solver
from torch_locoprop.solvers.base import States
from torch_locoprop.solvers.first_order import Iterate

__all__ = [
    "advance_",
    "finite",
    "gram",
    "graphs",
    "is_launched_alone",
    "may_have_kernels",
    "overlap",
    "solve",
    "streams",
    "write",
]

# Number of multiplications in XᵀX up to which, outside of a CUDA graph, launching our kernel takes the
# host longer than cuBLAS needs for the whole product.
SMALL = 2**31


def solve(
    solver: Solver,
    problem: LocalProblem,
    states: States,
    numbers: dict[str, Numbers],
    local_steps: int,
    local_decay: str,
) -> tuple[Tensors, States]:
    """Solve a local problem as ``solver.solve`` does, by the fastest path that supports it.

    Args:
        solver: the solver.
        problem: the local problem.
        states: the solver's state of each tensor; empty before the first step.
        numbers: the solver's numbers for each tensor.
        local_steps: number of local iterations.
        local_decay: how the learning rate decays over the local iterations.

    Returns:
        The new tensors and the new states, as :meth:`torch_locoprop.solvers.Solver.solve` does.
    """
    if not isinstance(solver, FirstOrder) or type(solver).solve is not FirstOrder.solve:
        return solver.solve(problem, states, numbers, local_steps, local_decay)
    is_rmsprop = rmsprop_in_place.fits(solver)
    if is_rmsprop and local_iterations.fits(problem, states, numbers):
        states = {
            name: states[name] or solver.init(tensor, numbers[name].at(1.0, tensor))
            for name, tensor in problem.start.items()
        }
        return local_iterations.solve(problem, states, numbers, local_steps, local_decay)
    gram = problem.through_gram(local_steps)
    own_rule = type(solver).advance_ is not FirstOrder.advance_
    joined = local_steps > 1 and not own_rule and cpu_onednn.fits(problem)
    iterate = cpu_onednn.Joined(problem, gram) if joined else Iterate(problem, gram)
    advance = rmsprop_in_place.advance_ if is_rmsprop else solver.advance_
    return solver.iterate(iterate, states, numbers, local_steps, local_decay, advance)


def advance_(
    solver: FirstOrder,
    tensor: Tensor,
    gradient: Tensor,
    state: Tensors,
    numbers: Numbers,
    rate: float,
) -> None:
    """Update a tensor and its state in place by one step, as ``solver.advance_`` does."""
    advance = rmsprop_in_place.advance_ if rmsprop_in_place.fits(solver) else solver.advance_
    advance(tensor, gradient, state, numbers, rate)


def gram(x: Tensor, weight: Tensor | None = None, *, apart: bool = False) -> Gram:
    """Return XᵀX of rows, as :meth:`torch_locoprop.paper.gram.Gram.of` does.

    Args:
        x: rows ``[..., rows, n]``.
        weight: how often each row counts ``[rows, 1]``; None counts each once.
        apart: True if the product is computed during the backward pass and not in the step, so that in
            an ordinary loop it is not part of a CUDA graph.
    """
    if weight is not None:
        return Gram.of(x, weight)
    small = apart and is_launched_alone(x) and x.numel() * x.shape[-1] <= SMALL
    if not small and products.square_fits(x):
        both = products.square(x)
        return Gram(both[..., :-1, :], both[..., -1, :], x.shape[-2])
    if cpu_gram.fits(x):
        with full_products(x):
            return Gram(cpu_gram.square(x), x.sum(-2), x.shape[-2])
    return Gram.of(x)


def is_launched_alone(x: Tensor) -> bool:
    """Return True if work during a backward pass is launched by the host, not by a CUDA graph.

    All steps of :class:`~torch_locoprop.TrainingStep` count as parts of a CUDA graph, even the first
    ones, which run eagerly: a resumed run must do the same work as the run that it continues.

    Args:
        x: a tensor on the device of the work.
    """
    return x.is_cuda and not streams.is_overlapping()


def may_have_kernels(
    linear_map: LinearMap,
    variant: Variant,
    regularizer: Regularizer,
    solver: Solver,
    transfer: Transfer,
    weight: Tensor,
) -> bool:
    """Return True if the kernels in ``triton/`` may solve problems with these components.

    The final decision, which also depends on the problem's tensors, is
    :func:`~torch_locoprop.fast.triton.local_iterations.fits`.
    """
    f = transfer_in(linear_map, variant.loss, variant.target, regularizer, transfer)
    fits = f in local_iterations.TRANSFERS and availability.supports([weight])
    return fits and solver.name == "rmsprop"


def finite(tensors: Sequence[Tensor], members: int = 1) -> Tensor | None:
    """Return booleans ``[members]``: True for each member whose entries are all finite.

    Args:
        tensors: tensors ``[members, ...]``, or of any shape for one member.
        members: number of members of a population.

    Returns:
        The booleans; None if there is no fast path for these tensors.
    """
    return guarded_writes.finite(tensors, members) if availability.supports(tensors) else None


def write(ok: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Write new tensors over old ones, for the members whose flag is true.

    Args:
        ok: one flag for each member, or a single one.
        pairs: new and old tensors.

    Returns:
        False if there is no fast path for these tensors. Nothing was written then.
    """
    tensors = [tensor for pair in pairs for tensor in pair]
    if not availability.supports(tensors) or any(t.device != ok.device for t in tensors):
        return False
    guarded_writes.write(ok.reshape(-1), pairs)
    return True
