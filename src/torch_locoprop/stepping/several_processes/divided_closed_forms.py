"""Closed forms of layers under DDP, each computed by one of the processes.

Every process has the gradient and, after an all-reduce, C of all rows. The factorization of C, which is
most of the work, cannot be divided by outputs, so whole layers are assigned to the processes by their
work. Layers are solved in rounds: the sums over the rows of all processes for each layer, then the
solutions of each process's own layers, and one all-gather of all displacements and factorizations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torch_locoprop.distributed.ddp import Exchange
from torch_locoprop.distributed.divided_matrices import MATRICES, computed
from torch_locoprop.paper.closed_form import operations
from torch_locoprop.paper.gram import FULL
from torch_locoprop.paper.tensors import Tensors, join
from torch_locoprop.solvers import Exact
from torch_locoprop.solvers.base import States
from torch_locoprop.solvers.exact import Sums
from torch_locoprop.stepping.build_problem import Posed

# Operations for each number of the result from which on computing takes longer than sending: those of
# the smallest polar factors that are divided (divided_polar.py).
PAYS_FROM = 30 * 64


def is_divided(posed: Posed) -> bool:
    """Return True if another process may solve a layer's problem in closed form."""
    solver, problem = posed.method.solver, posed.problem
    if type(solver) is not Exact or not isinstance(problem.others, Exchange):
        return False
    if not problem.others.facts.all_have_rows:
        return False
    grouped = join(problem.start).dim() > 2
    if grouped or not solver.factorizes(problem, posed.states):
        return False
    return _work(posed) >= PAYS_FROM * _size(posed)


def round_size(posed: Posed) -> int:
    """Return how many layers are solved together."""
    return MATRICES * cast(Exchange, posed.problem.others).facts.processes


def solved(layers: Sequence[Posed]) -> list[tuple[Tensors, States]]:
    """Return the new tensors and states of each layer.

    Args:
        layers: the problems of the same layers in all processes.
    """
    sums = [_solver(each).sums(each.problem, each.states) for each in layers]
    alike: dict[tuple[Any, torch.dtype], list[int]] = {}
    for i, each in enumerate(layers):
        group = cast(Exchange, each.problem.others).facts.group
        alike.setdefault((group, sums[i].gradient.dtype), []).append(i)
    results: dict[int, tuple[Tensors, States]] = {}
    for (group, _), together in alike.items():

        def solution(k: int, _: Tensor, together: Sequence[int] = together) -> Tensor:
            return _packed(layers[together[k]], sums[together[k]])

        # Only their sizes are read, so they take no memory.
        sizes = [sums[i].gradient.new_empty(1).expand(_size(layers[i])) for i in together]
        work = [_work(layers[i]) for i in together]
        for i, packed in zip(together, computed(solution, sizes, group, work), strict=True):
            results[i] = _unpacked(layers[i], sums[i], packed)
    return [results[i] for i in range(len(layers))]


def _packed(posed: Posed, sums: Sums) -> Tensor:
    """Solve a layer's problem; return the new tensors and factorization as one tensor."""
    new, states = _solver(posed).solved(posed.problem, posed.states, posed.numbers, sums)
    state = states[_owner(posed)]
    entries = [*new.values(), *(state[key] for key in _factorization(posed))]
    return torch.cat([entry.flatten() for entry in entries])


def _unpacked(posed: Posed, sums: Sums, packed: Tensor) -> tuple[Tensors, States]:
    """Return the new tensors and states from what :func:`_packed` has returned in some process."""
    factors, start = _factorization(posed), posed.problem.start
    shapes = [*(t.shape for t in start.values()), *(t.shape for t in factors.values())]
    parts = torch.split(packed, [shape.numel() for shape in shapes])
    found = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    new = dict(zip(start, found, strict=False))
    state = dict(zip(factors, found[len(start) :], strict=True))
    if sums.gram is not None and _solver(posed).decay > 0:
        state = {"gram": sums.gram, **state}
    kept = state if _solver(posed).averages else posed.states[_owner(posed)]
    return new, {**posed.states, _owner(posed): kept}


def _factorization(posed: Posed) -> Tensors:
    """Return empty tensors like those of the factorization that the state keeps, by name."""
    bent = posed.problem.loss.uses_transfer
    like = {name: tensor.to("meta") for name, tensor in posed.problem.start.items()}
    structure = posed.problem.structure or FULL
    state = _solver(posed).empty_states(like, bent, structure=structure)[_owner(posed)]
    return {key: entry for key, entry in state.items() if key != "gram"}


def _size(posed: Posed) -> int:
    """Return how many numbers the solution of a layer has, with its factorization."""
    factors = _factorization(posed).values()
    return sum(t.numel() for t in (*posed.problem.start.values(), *factors))


def _work(posed: Posed) -> int:
    """Return about how many operations the solution of a layer takes."""
    d, n = join(posed.problem.start).shape
    bent, structure = posed.problem.loss.uses_transfer, posed.problem.structure or FULL
    return operations(d, n, bent, structure)


def _owner(posed: Posed) -> str:
    return "weight" if "weight" in posed.problem.start else "bias"


def _solver(posed: Posed) -> Exact:
    return cast(Exact, posed.method.solver)
