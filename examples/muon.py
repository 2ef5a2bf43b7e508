"""Muon for matrices and for the filters of convolutions, and what trains the other parameters.

``torch.optim.Muon`` takes matrices only. This one gives the same steps, as with
``adjust_lr_fn="match_rms_adamw"``, and takes a filter ``[out, in, height, width]`` for the matrix
``[out, in · height · width]``. Matrices of one shape are orthogonalised together, which on a GPU takes
far less time than one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from torch_locoprop.study.methods.combined_optimizer import CombinedOptimizer

A, B, C = 3.4445, -4.7750, 2.0315  # of the iteration X ← a X + (b XXᵀ + c (XXᵀ)²) X


class Muon(Optimizer):
    """Momentum, Nesterov's, with the singular values of each step set to about one.

    Weights shrink by ``1 − lr · weight_decay``, and the root mean square of a step is about 0.2 lr,
    as that of AdamW's, so learning rates of AdamW are a good start.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            together: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    together.setdefault(p.flatten(1).shape, []).append(p)
            for params in together.values():
                self._move(params, group["lr"], group["momentum"], group["weight_decay"])

    def _move(self, params: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        """Step parameters that are matrices of one shape."""
        gradients = [p.grad for p in params if p.grad is not None]
        running = [self._running(p) for p in params]
        torch._foreach_lerp_(running, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, running, momentum)
        steps = orthogonalised(torch.stack([t.flatten(1) for t in ahead]))
        scale = 0.2 * max(steps.shape[1:]) ** 0.5
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        moves = [step.reshape(p.shape).to(p.dtype) for p, step in zip(params, steps, strict=True)]
        torch._foreach_add_(params, moves, alpha=-lr * scale)

    def _running(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def orthogonalised(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Matrices ``[k, m, n]`` with the same singular vectors, and singular values of about one."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        square = x @ x.mT
        factor = torch.baddbmm(square, square, square, beta=B, alpha=C)
        x = torch.baddbmm(x, factor, x, beta=A)
    return x.mT if tall else x


def adamw(
    params: Iterable[nn.Parameter], lr: float, shrink: float, betas: tuple[float, float]
) -> AdamW:
    """AdamW; weights shrink by ``shrink`` in a step, whatever the rate, biases and norms do not."""
    params = list(params)
    divided = {
        shrink / lr: [p for p in params if p.dim() >= 2],
        0.0: [p for p in params if p.dim() < 2],
    }
    groups = [{"params": own, "weight_decay": decay} for decay, own in divided.items() if own]
    return AdamW(groups, lr=lr, betas=betas, fused=True)


def muon_and_adamw(
    params: Iterable[nn.Parameter],
    matrices: Iterable[nn.Parameter],
    settings: Mapping[str, Any],
    shrink: float,
    betas: tuple[float, float],
) -> CombinedOptimizer:
    """Muon for those of the parameters that are among the matrices, and AdamW for the rest."""
    params, inside = list(params), set(matrices)
    lr, momentum = settings["lr"], settings["momentum"]
    by_muon, rest = [p for p in params if p in inside], [p for p in params if p not in inside]
    parts: list[Optimizer] = []
    if by_muon:
        parts.append(Muon(by_muon, lr, momentum, shrink / lr))
    if rest:
        parts.append(adamw(rest, lr, shrink, betas))
    return CombinedOptimizer(*parts)
