"""AdamW with the spectral step for matrices that multiply inputs which are not recorded.

``nn.MultiheadAttention`` and recurrent modules use their matrices inside one operation of PyTorch, so
their inputs are not known and they have no local problem. AdamW at the rate that suits biases and gains
is too fast for them. The spectral step needs their gradients alone if it is taken without C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torch_locoprop.layers.base import is_distributed
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.transfers import Linear
from torch_locoprop.paper.variants import VARIANTS
from torch_locoprop.solvers import Numbers, Spectral

_MODULES = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices of attention and recurrent modules whose inputs are not recorded.

    Matrices that several processes divide are not among them: their polar factors need all rows.
    """
    found = set()
    for module in model.modules():
        if isinstance(module, _MODULES):
            found |= {p for p in module.parameters() if p.dim() == 2 and not is_distributed(p)}
    return found


class SpectralAdamW(torch.optim.AdamW):
    """AdamW whose groups with ``spectral=True`` take the spectral step without C.

    Args:
        groups: parameter groups; those with ``spectral=True`` have matrices, and the numbers of
            :func:`matrix_group`.
        lr: the learning rate of other groups.
        eps: ε of AdamW.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, eps: float) -> None:
        super().__init__(groups, lr=lr, eps=eps)

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
                for matrix in group["params"]:
                    self._move(matrix, group)

    def _move(self, matrix: nn.Parameter, group: Mapping[str, Any]) -> None:
        if matrix.grad is None:
            return
        lr, locoprop_s = group["lr"], VARIANTS["locoprop-s"]
        matrix.mul_(1 - lr * group["weight_decay"])
        problem = LocalProblem(
            linear_map=Dense(),
            x=None,
            start={"weight": matrix.detach()},
            fixed={},
            backprop={"weight": matrix.grad},
            target=locoprop_s.target,
            loss=locoprop_s.loss,
            transfer=Linear(),
            gamma=1.0,
            eta=lr,
            regularizer=REGULARIZERS["none"],
            products=group["products"],
        )
        solver = Spectral(agreement=group["agreement"]).without_rows()
        numbers = {"weight": Numbers(lr, group["momentum"], group["decay"])}
        states = {"weight": dict(self.state[matrix])}
        with torch.autocast(matrix.device.type, enabled=False):
            new, states = solver.solve(problem, states, numbers, 1, "constant")
        matrix.copy_(new["weight"])
        self.state[matrix].update(states["weight"])


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
