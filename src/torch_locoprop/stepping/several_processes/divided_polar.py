"""Spectral steps with their polar factors, which are most of the work, divided among the processes.

One process computes the polar factor of a matrix. If the layer is sharded, every process has some rows
of the matrix and sends them to that process; the rest of the step is computed by rows. Under DDP every
process has the whole matrix, and computes the rest of the step for all rows. Layers take such steps in
rounds: first the directions of all layers, then the polar factors, their exchange, and all new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from torch_locoprop.distributed.ddp import Exchange
from torch_locoprop.distributed.divided_matrices import MATRICES, applied, computed
from torch_locoprop.distributed.fully_shard import Shards
from torch_locoprop.fast import dispatch
from torch_locoprop.paper.spectral import polar_operations
from torch_locoprop.paper.tensors import Tensors, join
from torch_locoprop.solvers import Spectral
from torch_locoprop.solvers.base import States
from torch_locoprop.solvers.spectral import Direction
from torch_locoprop.stepping.build_problem import Posed

# The smaller side of a matrix from which on it takes longer to compute the polar factor than to send
# it, under DDP. benchmarks/ddp_steps.py measures it.
PAYS_FROM = 64


def is_divided(posed: Posed) -> bool:
    """Return True if another process may compute the polar factor of a layer's step."""
    if not isinstance(posed.method.solver, Spectral):
        return False
    if posed.problem.outputs is not None:
        return True
    return _exchange(posed) is not None and min(join(posed.problem.start).shape) >= PAYS_FROM


def round_size(posed: Posed) -> int:
    """Return how many layers take their steps together."""
    exchange = _exchange(posed)
    processes = _shards(posed).processes if exchange is None else exchange.facts.processes
    return MATRICES * processes


def solved(layers: Sequence[Posed]) -> list[tuple[Tensors, States]]:
    """Return the new tensors and states of each layer.

    Args:
        layers: the problems of the same layers in all processes.
    """
    found = [
        _solver(each).direction(
            each.problem,
            each.states,
            each.numbers,
            dispatch.product_for(each.problem.products),
            dispatch.inverse,
        )
        for each in layers
    ]
    moving = [i for i, direction in enumerate(found) if direction is not None]
    # One exchange is for the same processes and numbers of one dtype.
    alike: dict[object, list[int]] = {}
    for i in moving:
        key = (*_processes(layers[i]), cast(Direction, found[i]).matrix.dtype)
        alike.setdefault(key, []).append(i)
    results = [(each.problem.start, each.states) for each in layers]
    for together in alike.values():
        directions = [cast(Direction, found[i]) for i in together]
        factors = _polar_factors(directions, [layers[i] for i in together])
        for i, direction, factor in zip(together, directions, factors, strict=True):
            problem, states, numbers = layers[i].problem, layers[i].states, layers[i].numbers
            results[i] = _solver(layers[i]).displaced(problem, states, numbers, direction, factor)
    return results


def _polar_factors(directions: Sequence[Direction], layers: Sequence[Posed]) -> list[Tensor]:
    """Return the polar factors of matrices; for sharded layers, the rows that this process has."""
    given = [each.matrix for each in directions]

    def factor(i: int, matrix: Tensor) -> Tensor:
        return dispatch.polar(matrix, directions[i].products)

    exchange = _exchange(layers[0])
    if exchange is not None:
        work = [polar_operations(*matrix.shape[-2:]) for matrix in given]
        return computed(factor, given, exchange.facts.group, work)
    shards = [_shards(each) for each in layers]
    work = [polar_operations(own.d, m.shape[-1]) for own, m in zip(shards, given, strict=True)]
    return applied(factor, given, shards, work)


def _processes(posed: Posed) -> tuple[object, ...]:
    """Return a key of the processes among which a layer's polar factor may be computed."""
    exchange = _exchange(posed)
    if exchange is not None:
        return (exchange.facts.group,)
    shards = _shards(posed)
    return shards.mesh, shards.divided


def _exchange(posed: Posed) -> Exchange | None:
    """Return the object that exchanges with the other processes of DDP; None for sharded layers."""
    return posed.problem.others if isinstance(posed.problem.others, Exchange) else None


def _solver(posed: Posed) -> Spectral:
    return cast(Spectral, posed.method.solver)


def _shards(posed: Posed) -> Shards:
    return cast(Shards, posed.problem.outputs)
