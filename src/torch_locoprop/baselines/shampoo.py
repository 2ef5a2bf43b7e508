"""Shampoo with grafting (Gupta et al. 2018; Anil et al., *Scalable second order optimization*).

For a gradient G ``[m, n]``, Shampoo keeps the statistics

    L = avg G Gᵀ  [m, m]      and      R = avg Gᵀ G  [n, n] ,

where avg is a running average or, as in Adagrad, a sum over steps. The direction of the step is
``L^(−1/4) G R^(−1/4)``. Grafting scales it to the length of a simpler method's step. A tensor of more
than two dimensions is treated as a matrix of its first dimension by all others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from torch_locoprop.baselines.base import PerTensor
from torch_locoprop.config.groups import Group
from torch_locoprop.paper.closed_form import eigh
from torch_locoprop.paper.fisher import running_average
from torch_locoprop.paper.names import unknown
from torch_locoprop.paper.tensors import Tensors, at_least_float32, without_autocast

GRAFTING = ("rmsprop", "adagrad", "sgd")


class Shampoo(PerTensor):
    """Shampoo with grafting and momentum: ``m ← μ m + step``, ``w ← w − η m``.

    The step of a matrix has the direction ``L^(−1/4) G R^(−1/4)`` and the length of the step that
    ``grafting`` names. A vector has no L and R and takes the step of ``grafting`` itself; without
    grafting, the step of ``rmsprop``, or of ``adagrad`` if the statistics are sums.

    Args:
        params: parameters or parameter groups, as in ``torch.optim``.
        lr: learning rate η.
        momentum: factor μ of heavy-ball momentum.
        decay: factor β of the running averages, with Adam's bias correction. None or 1: sums.
        eps: added to the eigenvalues of L and R, relative to the largest one; also the constant ε in
            the denominator of the grafted step. L and R themselves have the dtype of the gradient, at
            least float32, in which an eps below 1e-7 is lost in rounding.
        every: compute the inverse roots in the first step and then in every k-th. L and R are updated
            in every step.
        early: compute the inverse roots in each of so many first steps too, while L and R change fast.
            Without them, roots from a single gradient serve k steps: an autoencoder ended 13 % higher,
            with 3 or 20 such steps level with 10 (``python -m benchmarks.early_roots``).
        weight_decay: decoupled weight decay of tensors of two or more dimensions.
        grafting: method that gives the length of the step: ``rmsprop``, ``adagrad``, ``sgd`` (the
            length of G), or None for the length of Shampoo's own direction.
        max_size: largest side of a matrix that has a preconditioner. If only one side has one, its
            exponent is −1/2. If neither has, the matrix is treated like a vector.

    Example::

        optimizer = baselines.Shampoo(model.parameters(), lr=1e-3, every=10)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
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
        early: int = 10,
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
            early=early,
            weight_decay=weight_decay,
            grafting=grafting,
            max_size=max_size,
        )

    def check(self, group: Group) -> None:
        super().check({**group, "decay": 0.0} if group["decay"] in (None, 1) else group)
        early = group["early"]
        if isinstance(early, bool) or not isinstance(early, int) or early < 0:
            raise ValueError(f"Invalid early={early!r}. Must be an integer >= 0.")
        if group["grafting"] is not None and group["grafting"] not in GRAFTING:
            raise ValueError(unknown("grafting", group["grafting"], GRAFTING))

    def move(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        with without_autocast(gradient):
            super().move(parameter, gradient, group)

    def change(self, gradient: Tensor, state: Tensors, group: Group) -> tuple[Tensor, Tensors]:
        gradient = at_least_float32(gradient)  # products of half precision may underflow
        # The counter is on the CPU: no synchronisation with a GPU.
        none = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        kept: Tensors = {"step": state.get("step", none) + 1}
        steps = int(kept["step"].item())
        direction = None
        if gradient.dim() >= 2 and gradient.numel() > 0:
            direction = self._preconditioned(gradient, state, kept, group, steps)
        if direction is None or group["grafting"] is not None:
            step = self._simpler_step(gradient, state, kept, group, steps)
            direction = step if direction is None else with_length_of(step, direction)
        old = state.get("momentum", torch.zeros_like(gradient))
        kept["momentum"] = group["momentum"] * old + direction
        return group["lr"] * kept["momentum"], kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Unlike in ``torch.optim``, states of half-precision parameters stay float32."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                state = self.state.get(parameter, {})
                for name, value in state_dict["state"].get(number, {}).items():
                    if name in state and at_least_float32(parameter).dtype != parameter.dtype:
                        state[name] = value.to(state[name].device)

    def _preconditioned(
        self, gradient: Tensor, state: Tensors, kept: Tensors, group: Group, steps: int
    ) -> Tensor | None:
        """Return ``L^(−1/4) G R^(−1/4)``, or None if both sides are larger than ``max_size``."""
        matrix = gradient.reshape(len(gradient), -1)
        factors = {"left": matrix, "right": matrix.mT}
        sides = [side for side, factor in factors.items() if len(factor) <= group["max_size"]]
        due = (steps - 1) % group["every"] == 0 or steps <= group.get("early", 0)
        # The roots of another number of sides, before max_size was changed, have other exponents.
        due |= any((f"{side}_root" in state) != (side in sides) for side in factors)
        for side in sides:
            outer = factors[side] @ factors[side].mT
            kept[side] = average(state.get(side), outer, group["decay"], steps)
            root = f"{side}_root"
            if due:
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
        """Return the step of the grafting method, before the learning rate.

        For ``sgd`` that is the gradient. Otherwise it is the gradient divided by the square root of the
        average, or the sum, of its squares.
        """
        if group["grafting"] == "sgd":
            return gradient
        decay = None if group["grafting"] == "adagrad" else group["decay"]
        kept["square"] = average(state.get("square"), gradient.square(), decay, steps)
        step: Tensor = gradient / (kept["square"].sqrt() + group["eps"])
        return step


def average(old: Tensor | None, new: Tensor, decay: float | None, steps: int) -> Tensor:
    """Return the running average of all values so far, or their sum if ``decay`` is None or 1.

    The average is ``Σₛ βᵗ⁻ˢ xₛ / Σₛ βᵗ⁻ˢ``: a running average from zero with Adam's bias correction.

    Args:
        old: the average or sum before this step; None in the first step.
        new: the value of this step.
        decay: factor β.
        steps: number t of values, ``new`` included.
    """
    if decay is None or decay == 1:
        return new if old is None else old + new
    return running_average(old, new, decay * (1 - decay ** (steps - 1)) / (1 - decay**steps))


def inverse_root(matrix: Tensor, root: int, eps: float) -> Tensor:
    """Return ``(M + eps λ_max I)^(−1/root)`` of a positive semi-definite matrix M ``[..., n, n]``.

    λ_max is the largest eigenvalue of M. The result is the identity where M is zero. The decomposition
    is that of float64 in every dtype: float32 has errors of 1e-7 λ_max in the small eigenvalues, which
    ``eps λ_max`` would not cover, and takes more than half of the time.
    """
    values, vectors = eigh(matrix.double())
    largest = values.amax(-1, keepdim=True)
    powers = torch.where(largest == 0, 1.0, values + eps * largest).pow(-1 / root)
    inverse: Tensor = vectors * powers.unsqueeze(-2) @ vectors.mT
    return inverse.to(matrix.dtype)


def with_length_of(step: Tensor, direction: Tensor) -> Tensor:
    """Return the direction, scaled to the Euclidean norm of the step."""
    length = torch.linalg.vector_norm(direction).clamp_min(torch.finfo(direction.dtype).tiny)
    scale: Tensor = torch.linalg.vector_norm(step) / length
    return scale * direction
