"""Shampoo with grafting (Gupta et al. 2018; Anil et al., *Scalable second order optimization*).

A matrix gradient G ``[m, n]`` (tensors of more dimensions as ``[d₀, rest]``) has the statistics

    L = avg G Gᵀ  [m, m] ,     R = avg Gᵀ G  [n, n]     and the direction     L^(−1/4) G R^(−1/4) ,

where avg is a running average or, as in Adagrad, a sum. Its length is that of a simpler method's step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torch_locoprop.baselines.base import PerTensor
from torch_locoprop.config.groups import Group
from torch_locoprop.config.settings import unknown
from torch_locoprop.paper.fisher import at_least_float32, running_average
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.solvers.exact import eigh

GRAFTING = ("rmsprop", "adagrad", "sgd")


class Shampoo(PerTensor):
    """``m ← μ m + step``, ``w ← w − η m`` with Shampoo's direction at a simpler method's length.

    Args:
        params: parameters or groups, as in ``torch.optim``.
        lr: the learning rate.
        momentum: heavy-ball momentum of the grafted step.
        decay: of the running averages, whose first steps are corrected as Adam's are. None or 1
            sums instead.
        eps: ridge of the statistics, relative to their largest eigenvalue, and the ε of grafting.
        every: renew the inverse roots in the first and then in every k-th step. The statistics take
            in every gradient.
        weight_decay: decoupled, tensors of two or more dimensions only.
        grafting: whose length the step has: ``rmsprop``, ``adagrad``, ``sgd`` (the gradient's), or
            None for Shampoo's own. Vectors have no L and R: they take the simpler method's step
            itself, without grafting that of rmsprop, or of adagrad where the statistics sum.
        max_size: a larger side of a matrix has no preconditioner. The other side's exponent is then
            −1/2; with neither side left, the matrix is treated as a vector.
    """

    positive = ("eps",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,  # η
        *,
        momentum: float = 0.9,  # μ
        decay: float | None = 0.99,  # β
        eps: float = 1e-6,  # ε
        every: int = 1,
        weight_decay: float = 0.0,
        grafting: str | None = "rmsprop",
        max_size: int = 8192,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            decay=decay,
            eps=eps,
            every=every,
            weight_decay=weight_decay,
            grafting=grafting,
            max_size=max_size,
        )

    def check(self, group: Group) -> None:
        super().check({**group, "decay": 0.0} if group["decay"] in (None, 1) else group)
        if group["grafting"] is not None and group["grafting"] not in GRAFTING:
            raise ValueError(unknown("grafting", group["grafting"], GRAFTING))

    def change(self, gradient: Tensor, state: Tensors, group: Group) -> tuple[Tensor, Tensors]:
        kept: Tensors = {"step": state.get("step", torch.zeros((), dtype=torch.float32)) + 1}
        steps = int(kept["step"].item())  # on the CPU always: no wait for the device
        direction = None
        if gradient.dim() >= 2:
            direction = self._preconditioned(gradient, state, kept, group, steps)
        if direction is None or group["grafting"] is not None:
            step = self._simpler_step(gradient, state, kept, group, steps)
            direction = step if direction is None else with_length_of(step, direction)
        old = state.get("momentum", torch.zeros_like(gradient))
        kept["momentum"] = group["momentum"] * old + direction
        return group["lr"] * kept["momentum"], kept

    def _preconditioned(
        self, gradient: Tensor, state: Tensors, kept: Tensors, group: Group, steps: int
    ) -> Tensor | None:
        """``L^(−1/4) G R^(−1/4)``; None where both sides are too large."""
        matrix = gradient.reshape(len(gradient), -1)
        factors = {"left": matrix, "right": matrix.mT}
        sides = [side for side, factor in factors.items() if len(factor) <= group["max_size"]]
        for side in sides:
            outer = factors[side] @ factors[side].mT
            kept[side] = average(state.get(side), outer, group["decay"], steps)
            root = f"{side}_root"
            if (steps - 1) % group["every"] == 0:
                kept[root] = inverse_root(kept[side], 2 * len(sides), group["eps"])
            else:
                kept[root] = state[root]
        if "left" in sides:
            matrix = kept["left_root"] @ matrix
        if "right" in sides:
            matrix = matrix @ kept["right_root"]
        return matrix.view_as(gradient) if sides else None

    def _simpler_step(
        self, gradient: Tensor, state: Tensors, kept: Tensors, group: Group, steps: int
    ) -> Tensor:
        """The gradient itself, or divided by the root of its (average or sum of) squares."""
        if group["grafting"] == "sgd":
            return gradient
        decay = None if group["grafting"] == "adagrad" else group["decay"]
        kept["square"] = average(state.get("square"), gradient.square(), decay, steps)
        step: Tensor = gradient / (kept["square"].sqrt() + group["eps"])
        return step


def average(old: Tensor | None, new: Tensor, decay: float | None, steps: int) -> Tensor:
    """The running average of ``steps`` values, or their sum where ``decay`` is None or 1.

    ``Σₛ βᵗ⁻ˢ xₛ / Σₛ βᵗ⁻ˢ``: what Adam's correction makes of an average that starts at zero.
    """
    if decay is None or decay == 1:
        return new if old is None else old + new
    return running_average(old, new, decay * (1 - decay ** (steps - 1)) / (1 - decay**steps))


def inverse_root(matrix: Tensor, root: int, eps: float) -> Tensor:
    """``(M + eps λ_max I)^(−1/root)`` of a positive semi-definite matrix; of zero, the identity."""
    values, vectors = eigh(at_least_float32(matrix))
    largest = values.amax(-1, keepdim=True)
    powers = torch.where(largest == 0, 1.0, values + eps * largest).pow(-1 / root)
    inverse: Tensor = vectors * powers.unsqueeze(-2) @ vectors.mT
    return inverse.to(matrix.dtype)


def with_length_of(step: Tensor, direction: Tensor) -> Tensor:
    """The direction, scaled to the norm of the step."""
    length = torch.linalg.vector_norm(direction).clamp_min(torch.finfo(direction.dtype).tiny)
    scale: Tensor = torch.linalg.vector_norm(step) / length
    return scale * direction
