"""Chooses between the plain code and the fast paths; the only module of ``fast/`` to import.

Every fast path computes what its plain version computes, to rounding, and is tested against it.

- :func:`solve`, :func:`advance_`: a local problem, a first-order step;
- :func:`gram`, :func:`gram_in`: XᵀX of rows;
- :func:`product`, :func:`product_for`, :func:`inverse`, :func:`polar`: the products of a spectral step;
- :func:`finite`, :func:`write`: the check and the write of a solution;
- ``streams``: side streams for independent layers while a CUDA graph is recorded;
- ``graphs``: recording and replaying work as a CUDA graph;
- ``overlap``: weight gradients computed beside the backward pass.

The modules of GPUs are entered for tensors on a GPU only: a step on a CPU does not pass through them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_locoprop.fast import cpu_gram, cpu_onednn, cpu_spectral, cuda_spectral
from torch_locoprop.fast import cuda_graph as graphs
from torch_locoprop.fast import cuda_streams as streams
from torch_locoprop.fast import overlapped_weight_grads as overlap
from torch_locoprop.fast.eligibility import transfer_in
from torch_locoprop.fast.triton import availability, guarded_writes, local_iterations, rmsprop
from torch_locoprop.fast.triton import matrix_products as products
from torch_locoprop.paper import spectral
from torch_locoprop.paper.gram import Gram, full_products
from torch_locoprop.paper.linear_map import LinearMap
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.regularizers import Regularizer
from torch_locoprop.paper.tensors import Product, Tensors
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.paper.variants import Variant
from torch_locoprop.solvers import (
    AveragedPreconditioned,
    FirstOrder,
    Numbers,
    Preconditioned,
    RmsProp,
    Solver,
    Spectral,
)
from torch_locoprop.solvers.base import States
from torch_locoprop.solvers.first_order import Iterate

__all__ = [
    "advance_",
    "finite",
    "gram",
    "gram_in",
    "graphs",
    "inverse",
    "is_launched_alone",
    "may_have_kernels",
    "overlap",
    "polar",
    "product",
    "product_for",
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
    if isinstance(solver, Spectral) and type(solver).solve is Spectral.solve:
        multiply = product_for(problem.products)
        found = solver.direction(problem, states, numbers, multiply, inverse)
        if found is None:
            return problem.start, states
        factor = polar(found.matrix, found.products)
        return solver.displaced(problem, states, numbers, found, factor)
    if isinstance(solver, Preconditioned) and type(solver).solve is Preconditioned.solve:
        return solver.solved(problem, numbers, local_steps, product, inverse), states
    own = AveragedPreconditioned.solve
    if isinstance(solver, AveragedPreconditioned) and type(solver).solve is own:
        return solver.solved(problem, states, numbers, product_for(problem.products), inverse)
    if not isinstance(solver, FirstOrder) or type(solver).solve is not FirstOrder.solve:
        return solver.solve(problem, states, numbers, local_steps, local_decay)
    own_rule = type(solver).advance_ is not FirstOrder.advance_
    is_rmsprop = _is_rmsprop(solver)
    weight = problem.start.get("weight")
    by_kernels = is_rmsprop and weight is not None and _is_on_gpu(weight)
    if by_kernels and local_iterations.fits(problem, states, numbers):
        states = {
            name: states[name] or solver.init(tensor, numbers[name].at(1.0, tensor))
            for name, tensor in problem.start.items()
        }
        return local_iterations.solve(problem, states, numbers, local_steps, local_decay)
    gram = problem.through_gram(local_steps)
    joined = local_steps > 1 and not own_rule and _is_large(problem) and cpu_onednn.fits(problem)
    iterate = cpu_onednn.Joined(problem, gram) if joined else Iterate(problem, gram)
    advance = _rmsprop_in_place if is_rmsprop else solver.advance_
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
    advance = _rmsprop_in_place if _is_rmsprop(solver) else solver.advance_
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
    if not small and _is_on_gpu(x) and products.square_fits(x):
        both = products.square(x)
        return Gram(both[..., :-1, :], both[..., -1, :], x.shape[-2])
    if x.shape[-1] > cpu_gram.STRIP and cpu_gram.fits(x):
        with full_products(x):
            return Gram(cpu_gram.square(x), x.sum(-2), x.shape[-2])
    return Gram.of(x)


def gram_in(x: Tensor, dtype: torch.dtype, *, coarse: bool = False) -> Gram:
    """Return XᵀX of rows in a dtype, computed during the backward pass.

    Args:
        x: rows ``[..., rows, n]``.
        dtype: dtype of XᵀX.
        coarse: 16 of the 24 digits of float32 suffice.
    """
    if coarse and x.is_cuda and cuda_spectral.gram_fits(x, dtype):
        return cuda_spectral.gram(x)
    return gram(x.to(dtype), apart=True)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` as ``torch.matmul`` does."""
    large = left.numel() * right.shape[-1] >= cpu_spectral.LARGE
    if large and cpu_spectral.fits(left) and right.dtype == left.dtype:
        return cpu_spectral.product(left, right)
    return left @ right


def product_for(products: str) -> Product:
    """Return the function that multiplies by the inverse in a spectral step.

    Args:
        products: the setting ``local_products``. With ``"bf16"`` the polar factor behind the product is
            in bfloat16 on a GPU, so that three products in bfloat16 are precise enough.
    """
    return _product_before_bf16 if products == "bf16" else product


def _product_before_bf16(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cuda and cuda_spectral.product_fits(left, right):
        return cuda_spectral.product(left, right)
    return product(left, right)


def inverse(factor: Tensor) -> Tensor:
    """Return ``(L Lᵀ)⁻¹`` of a Cholesky factor L as ``torch.cholesky_inverse`` does."""
    return cuda_spectral.inverse(factor) if factor.is_cuda else torch.cholesky_inverse(factor)


def polar(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a polar factor as :func:`torch_locoprop.paper.spectral.polar` does.

    Args:
        matrix: a matrix, ``[..., d, n]``.
        dtype: dtype of the matrix products; None is that of ``matrix``.
    """
    if matrix.is_cuda:
        return cuda_spectral.polar(matrix, dtype)
    own = dtype is None or dtype == matrix.dtype
    columns = min(matrix.shape[-2:]) // 2  # half of the products are smaller
    if own and matrix.numel() * columns >= cpu_spectral.LARGE and cpu_spectral.fits(matrix):
        return cpu_spectral.polar(matrix)
    return spectral.polar(matrix, dtype)


def is_launched_alone(x: Tensor) -> bool:
    """Return True if work during a backward pass is launched by the host, not by a CUDA graph.

    All steps of :class:`~torch_locoprop.TrainingStep` count as parts of a CUDA graph, even the first
    ones, which run eagerly: a resumed run must do the same work as the run that it continues.

    Args:
        x: a tensor on the device of the work.
    """
    return x.is_cuda and not streams.overlapping


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


def finite(tensors: Sequence[Tensor], members: int | None = None) -> Tensor:
    """Return a boolean scalar: True if all entries are finite; or ``[members]``, one for each member.

    On a CPU only the extreme entries are checked: ``isfinite`` of all entries takes far longer.

    Args:
        tensors: tensors on one device: of any shape, or ``[members, ...]`` for a population.
        members: number of members of a population; None without one.
    """
    if tensors and _is_on_gpu(tensors[0]) and availability.supports(tensors):
        found = guarded_writes.finite(tensors, members or 1)
        return found[0] if members is None else found
    if members is not None:
        return torch.stack([t.isfinite().flatten(1).all(1) for t in tensors]).all(0)
    filled = [t for t in tensors if t.numel() > 0] or [tensors[0].new_zeros(1)]
    if filled[0].is_cpu:
        numbers = [end for t in filled for end in t.aminmax()]
    else:
        numbers = list(torch._foreach_norm(filled, torch.inf))
    dtype = numbers[0].dtype
    stacked = torch.stack([n if n.dtype == dtype else n.to(dtype) for n in numbers])
    return stacked.isfinite().all()


def write(ok: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the first tensor of each pair over the second, in place, where ``ok`` is true.

    Tensors keep their addresses, so that CUDA graphs can read them again.

    Args:
        ok: one flag, or one for each member ``[K]`` of tensors ``[K, ...]``.
        pairs: new and old tensors of equal shapes.
    """
    if pairs and _is_on_gpu(pairs[0][0]):
        tensors = [tensor for pair in pairs for tensor in pair]
        if availability.supports(tensors) and all(t.device == ok.device for t in tensors):
            guarded_writes.write(ok.reshape(-1), pairs)
            torch.autograd.graph.increment_version([old for _, old in pairs])
            return
    if ok.dim() == 0 and ok.is_cpu and "cpu" not in graphs.DEVICE_TYPES and type(ok) is Tensor:
        if ok:  # the host need not wait for a device
            for new, old in pairs:
                old.copy_(new)
        return
    for new, old in pairs:
        flag = ok if ok.device == new.device else ok.to(new.device)
        if flag.dim() > 0:
            flag = flag.reshape(-1, *([1] * (new.dim() - 1)))
        torch.where(flag, new, old, out=old)


def _is_on_gpu(tensor: Tensor) -> bool:
    """Return True if the kernels in ``triton/`` may support a tensor."""
    return tensor.is_cuda or availability.INTERPRETED


def _is_rmsprop(solver: FirstOrder) -> bool:
    """Return True if the solver is RMSProp, and not a subclass that overrides its step."""
    cls = type(solver)
    is_rmsprop = isinstance(solver, RmsProp) and cls.step is RmsProp.step
    return is_rmsprop and cls.advance_ is FirstOrder.advance_


def _rmsprop_in_place(
    tensor: Tensor, gradient: Tensor, state: Tensors, numbers: Numbers, rate: float
) -> None:
    """Update a tensor and its state in place by one step of RMSProp.

    One kernel on a GPU, three passes over the tensors on a CPU. The plain version is
    :meth:`torch_locoprop.solvers.first_order.RmsProp.step`, which makes new tensors.
    """
    v, m = state["square"], state["momentum"]
    own = (numbers.lr, numbers.momentum, numbers.decay, numbers.eps)
    if _is_on_gpu(tensor) and rmsprop.fits([tensor, gradient, v, m], own):
        in_place = rmsprop.TensorAndState(tensor, v, m)
        rmsprop.step(in_place, in_place, gradient, numbers, rate)
    elif True in [isinstance(number, Tensor) for number in own]:
        RmsProp().advance_(tensor, gradient, state, numbers, rate)
    else:
        eta, mu, rho, eps = map(float, own)
        v.mul_(rho).addcmul_(gradient, gradient, value=1 - rho)
        m.mul_(mu).addcmul_(gradient, (v + eps).rsqrt_(), value=eta * rate)
        tensor.sub_(m)


def _is_large(problem: LocalProblem) -> bool:
    """Return True if a matrix product of the problem is large enough for ``cpu_onednn``."""
    weight, x = problem.start.get("weight"), problem.x
    if weight is None or not weight.is_cpu:
        return False
    rows = x.rows if isinstance(x, Gram) else len(x)
    return isinstance(rows, int) and rows * weight.numel() >= cpu_onednn.LARGE
