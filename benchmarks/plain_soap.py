"""SOAP in plain PyTorch, for machines without the package `pytorch_optimizer`.

Takes the same steps as `pytorch_optimizer.SOAP` with its defaults; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class SOAP(Optimizer):
    """Adam in the eigenbases of Shampoo's statistics.

    The first step collects statistics and moves nothing. Vectors have no basis, so they get Adam.

    Args:
        params: parameters.
        lr: learning rate.
        betas: decay of the average gradient, and of its squares and the statistics.
        eps: added to the root of the average square.
        weight_decay: weights are multiplied by `1 − lr · weight_decay`.
        every: the bases are renewed every `every` steps.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        every: int = 10,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "every": every})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)

    def _step(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state = self.state[p]
        if not state:
            state["steps"] = 0
            state["average"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
            sizes = p.shape if p.dim() > 1 else ()
            state["statistics"] = [p.new_zeros(size, size) for size in sizes]
            _collect(state, grad, second)
            state["bases"] = [torch.linalg.eigh(m)[1].flip(1) for m in state["statistics"]]
            return
        state["steps"] += 1
        t, bases = state["steps"], state["bases"]
        average, square = state["average"], state["square"]
        average.lerp_(grad, 1 - first)
        square.lerp_(_turned(grad, bases).square(), 1 - second)
        step = _turned(average, bases) / (square.sqrt() + group["eps"])
        length = group["lr"] * (1 - second**t) ** 0.5 / (1 - first**t)
        p.sub_(length * _turned(step, [basis.mT for basis in bases]))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        _collect(state, grad, second)
        if t % group["every"] == 0:
            _renew(state)


def _collect(state: dict[str, Any], grad: Tensor, decay: float) -> None:
    """Average, for each dimension, the products of the gradient's slices along it."""
    for dim, statistic in enumerate(state["statistics"]):
        rows = grad.movedim(dim, 0).flatten(1)
        statistic.lerp_(rows @ rows.mT, 1 - decay)


def _turned(tensor: Tensor, bases: list[Tensor]) -> Tensor:
    """Return the tensor in the bases: each dimension multiplied by its basis."""
    for basis in bases:  # the first dimension becomes the last, so all have their turn in order
        tensor = torch.tensordot(tensor, basis, dims=([0], [0]))
    return tensor


def _renew(state: dict[str, Any]) -> None:
    """Improve the bases by one power iteration, sorted by their eigenvalues."""
    for dim, (statistic, basis) in enumerate(zip(state["statistics"], state["bases"], strict=True)):
        product = statistic @ basis
        order = (basis * product).sum(0).argsort(descending=True)
        state["square"] = state["square"].index_select(dim, order)
        state["bases"][dim] = torch.linalg.qr(product.index_select(1, order))[0]
