"""AdamW with the spectral step for matrices that multiply inputs which are not recorded.

``nn.MultiheadAttention`` and recurrent modules use their matrices inside one operation of PyTorch, so
their inputs are not known and they have no local problem. AdamW at the rate that suits biases and gains
is too fast for them. The spectral step needs their gradients alone if it is taken without C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_locoprop.distributed.divided_matrices import MATRICES, applied
from torch_locoprop.distributed.fully_shard import Shards, local
from torch_locoprop.distributed.placements import row_shards
from torch_locoprop.layers.base import is_distributed
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.spectral import polar, polar_operations
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.paper.transfers import Linear
from torch_locoprop.paper.variants import VARIANTS
from torch_locoprop.solvers import Numbers, Spectral
from torch_locoprop.solvers.spectral import Direction

_MODULES = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices of attention and recurrent modules whose inputs are not recorded.

    Matrices that several processes divide in another way than by rows are not among them.
    """
    found = set()
    for module in model.modules():
        if isinstance(module, _MODULES):
            found |= {p for p in module.parameters() if p.dim() == 2 and _has_rows(p)}
    return found


def _has_rows(matrix: nn.Parameter) -> bool:
    """Return True if a matrix is not divided among processes, or is divided by its rows."""
    return not is_distributed(matrix) or row_shards(matrix) is not None


class Move(NamedTuple):
    """The part of one matrix's step that is known without the rows of other processes."""

    matrix: nn.Parameter
    shards: Shards | None  # the rows that this process has; None if it has all
    problem: LocalProblem
    states: dict[str, Tensors]
    direction: Direction


class SpectralAdamW(torch.optim.AdamW):
    """AdamW whose groups with ``spectral=True`` take the spectral step without C.

    Args:
        groups: parameter groups; those with ``spectral=True`` have matrices, and the numbers of
            :func:`matrix_group`.
        lr: the learning rate of other groups.
        eps: ε of AdamW.
        maximize: maximize the loss.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, eps: float, *, maximize: bool = False
    ) -> None:
        super().__init__(groups, lr=lr, eps=eps, maximize=maximize)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({"spectral": False, **param_group})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step; a closure is not used."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["spectral"]]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["spectral"]:
                matrices = [p for p in group["params"] if p.grad is not None]
                with torch.autocast(group["params"][0].device.type, enabled=False):
                    self._move(matrices, group)

    def _move(self, matrices: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        """Move matrices, those that processes divide in rounds, as in ``divided_polar.py``."""
        solver = Spectral(agreement=group["agreement"]).without_rows()
        assert isinstance(solver, Spectral)
        numbers = {"weight": Numbers(group["lr"], group["momentum"], group["decay"])}
        waiting: dict[object, list[Move]] = {}
        for matrix in matrices:
            shards = row_shards(matrix) if is_distributed(matrix) else None
            local(matrix).mul_(1 - group["lr"] * group["weight_decay"])
            problem = _problem(matrix, shards, group)
            states = {"weight": {key: local(entry) for key, entry in self.state[matrix].items()}}
            direction = solver.direction(problem, states, numbers)
            if direction is None:
                continue
            move = Move(matrix, shards, problem, states, direction)
            if shards is None:
                factor = polar(direction.matrix, direction.products)
                self._take(move, factor, solver, numbers)
                continue
            together = waiting.setdefault((shards.mesh, shards.divided, matrix.dtype), [])
            together.append(move)
            if len(together) == MATRICES * shards.processes:
                self._take_together(together, solver, numbers)
                together.clear()
        for together in waiting.values():
            self._take_together(together, solver, numbers)

    def _take_together(
        self, moves: Sequence[Move], solver: Spectral, numbers: dict[str, Numbers]
    ) -> None:
        """Take the steps of matrices whose polar factors are divided among the same processes."""
        if not moves:
            return

        def factor(i: int, matrix: Tensor) -> Tensor:
            return polar(matrix, moves[i].direction.products)

        rows = [move.direction.matrix for move in moves]
        shards = [move.shards for move in moves if move.shards is not None]
        work = [polar_operations(*move.matrix.shape) for move in moves]
        for move, own in zip(moves, applied(factor, rows, shards, work), strict=True):
            self._take(move, own, solver, numbers)

    def _take(
        self, move: Move, factor: Tensor, solver: Spectral, numbers: dict[str, Numbers]
    ) -> None:
        """Write the new matrix and its new state, of which this process may have some rows."""
        matrix, shards, problem, states, direction = move
        new, states = solver.displaced(problem, states, numbers, direction, factor)
        local(matrix).copy_(new["weight"])
        self.state[matrix].update(
            {
                key: shards.wrapped(entry) if shards and key in solver.row_state else entry
                for key, entry in states["weight"].items()
            }
        )


def _problem(matrix: nn.Parameter, shards: Shards | None, group: Mapping[str, Any]) -> LocalProblem:
    """Return the problem of a matrix without inputs, or of the rows of it that this process has."""
    locoprop_s = VARIANTS["locoprop-s"]
    gradient: Any = matrix.grad
    like: Any = matrix
    if shards is not None and gradient.placements != like.placements:  # a sum that is still partial
        gradient = gradient.redistribute(placements=like.placements)
    return LocalProblem(
        linear_map=Dense(),
        x=None,
        start={"weight": local(matrix.detach())},
        fixed={},
        backprop={"weight": -local(gradient) if group["maximize"] else local(gradient)},
        target=locoprop_s.target,
        loss=locoprop_s.loss,
        transfer=Linear(),
        gamma=1.0,
        eta=group["lr"],
        regularizer=REGULARIZERS["none"],
        products=group["products"],
        outputs=shards,
    )


def matrix_group(solver: Spectral, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group of matrices, without its parameters.

    Args:
        solver: the solver of the layers with local problems.
        settings: the settings of these layers.
    """
    return {
        "spectral": True,
        "lr": settings["lr"],
        "momentum": settings["momentum"],
        "decay": settings["decay"],
        "weight_decay": settings["weight_decay"],
        "agreement": solver.agreement,
        "products": settings["local_products"],
    }
