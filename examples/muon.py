"""Muon for matrices and for filters of convolutions, with AdamW for all other parameters.

`torch.optim.Muon` accepts matrices only. The class here takes the same steps, as with
`adjust_lr_fn="match_rms_adamw"`, and treats a filter `[out, in, height, width]` as the matrix
`[out, in · height · width]`. Matrices of one shape are orthogonalised in one batch, which is much
faster on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from torch_locoprop.study.methods.combined_optimizer import CombinedOptimizer

A, B, C = 3.4445, -4.7750, 2.0315  # coefficients of the iteration X ← A X + (B XXᵀ + C (XXᵀ)²) X


class Muon(Optimizer):
    """Nesterov's momentum, with the singular values of each step set to about one.

    The root mean square of a step is about `0.2 · lr`, like AdamW's, so a learning rate of AdamW is a
    good first choice.

    Args:
        params: parameters of two or more dimensions.
        lr: learning rate.
        momentum: factor of the running average of gradients.
        weight_decay: weights are multiplied by `1 − lr · weight_decay` before the step.
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
        """Take the step of parameters that are matrices of one shape."""
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
    """Set the singular values of the matrices `[k, m, n]` to about one; keep the singular vectors."""
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
    """Return AdamW with a weight decay of `shrink` for each step at the full learning rate."""
    return AdamW(decayed(params, shrink / lr), lr=lr, betas=betas, fused=True)


def decayed(params: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups in which vectors, such as biases and those of norms, do not decay."""
    params = list(params)
    divided = {
        weight_decay: [p for p in params if p.dim() >= 2],
        0.0: [p for p in params if p.dim() < 2],
    }
    return [{"params": own, "weight_decay": decay} for decay, own in divided.items() if own]


def muon_and_adamw(
    params: Iterable[nn.Parameter],
    matrices: Iterable[nn.Parameter],
    settings: Mapping[str, Any],
    shrink: float,
    betas: tuple[float, float],
    other_lr: float | None = None,
) -> CombinedOptimizer:
    """Return Muon for the parameters that are in `matrices`, and AdamW for the other parameters.

    Args:
        params: all parameters to train.
        matrices: parameters that Muon should train.
        settings: `lr`, and `momentum` of Muon.
        shrink: fraction by which weights decay in a step at the full learning rate.
        betas: of AdamW.
        other_lr: learning rate of AdamW. None: `lr`.
    """
    params, inside = list(params), set(matrices)
    lr, momentum = settings["lr"], settings["momentum"]
    by_muon, rest = [p for p in params if p in inside], [p for p in params if p not in inside]
    parts: list[Optimizer] = []
    if by_muon:
        parts.append(Muon(by_muon, lr, momentum, shrink / lr))
    if rest:
        parts.append(adamw(rest, other_lr or lr, shrink, betas))
    return CombinedOptimizer(*parts)
