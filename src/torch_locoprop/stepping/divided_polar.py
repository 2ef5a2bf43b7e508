"""Spectral steps of sharded layers, with their polar factors divided among the processes.

A polar factor needs the whole matrix, and every process has some rows of it. So each matrix goes to one
process, which computes the polar factor; everything else in the step is done by rows. Layers take such
steps in rounds: the directions of all layers, the exchange, the polar factors, and all new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from torch_locoprop.distributed.divided_matrices import MATRICES, applied
from torch_locoprop.distributed.fully_shard import Shards
from torch_locoprop.paper.spectral import polar, polar_operations
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.solvers import Spectral
from torch_locoprop.solvers.base import States
from torch_locoprop.solvers.spectral import Direction
from torch_locoprop.stepping.build_problem import Posed


def is_divided(posed: Posed) -> bool:
    """Return True if a step needs the whole of a matrix of which this process has some rows."""
    return isinstance(posed.method.solver, Spectral) and posed.problem.outputs is not None


def round_size(posed: Posed) -> int:
    """Return how many layers take their steps together."""
    return MATRICES * _shards(posed).processes


def solved(layers: Sequence[Posed]) -> list[tuple[Tensors, States]]:
    """Return the new tensors and states of each layer.

    Args:
        layers: the problems of the same layers in all processes.
    """
    found = [_solver(each).direction(each.problem, each.states, each.numbers) for each in layers]
    moving = [i for i, direction in enumerate(found) if direction is not None]
    # One exchange is for the same processes and numbers of one dtype.
    alike: dict[object, list[int]] = {}
    for i in moving:
        shards = _shards(layers[i])
        key = shards.mesh, shards.dimension, cast(Direction, found[i]).matrix.dtype
        alike.setdefault(key, []).append(i)
    results = [(each.problem.start, each.states) for each in layers]
    for together in alike.values():
        directions = [cast(Direction, found[i]) for i in together]
        factors = _polar_factors(directions, [_shards(layers[i]) for i in together])
        for i, direction, factor in zip(together, directions, factors, strict=True):
            problem, states, numbers = layers[i].problem, layers[i].states, layers[i].numbers
            results[i] = _solver(layers[i]).displaced(problem, states, numbers, direction, factor)
    return results


def _polar_factors(directions: Sequence[Direction], shards: Sequence[Shards]) -> list[Tensor]:
    """Return this process's rows of the polar factors of matrices."""
    rows = [each.matrix for each in directions]
    work = [polar_operations(own.d, each.shape[-1]) for own, each in zip(shards, rows, strict=True)]
    return applied(lambda i, matrix: polar(matrix, directions[i].products), rows, shards, work)


def _solver(posed: Posed) -> Spectral:
    return cast(Spectral, posed.method.solver)


def _shards(posed: Posed) -> Shards:
    return cast(Shards, posed.problem.outputs)
