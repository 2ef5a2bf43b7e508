"""Regularizers: how far the weights may move from where the step began.

``gradient`` and ``displacement`` are dictionaries ``{"weight": [..., d, n], "bias": [..., d]}``;
``eta`` is the learning rate of the group, ``rate`` the one of the current local iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torch_locoprop.paper.fisher import cholesky, cholesky_solve, damped
from torch_locoprop.paper.tensors import Number, Tensors, join, split, spread


class Regularizer:
    """No regularizer, as the paper's algorithms run; subclass it for your own."""

    name: ClassVar[str] = "none"
    needs: ClassVar[frozenset[str]] = frozenset()  # {"fisher"}: a sampled Fisher is recorded

    def direction(
        self, gradient: Tensors, displacement: Tensors, eta: Number, metric: Metric | None
    ) -> Tensors:
        """The direction the solver follows, from the local loss's gradient."""
        return gradient

    def prox(self, displacement: Tensor, rate: Number) -> Tensor:
        """The proximal map applied to the displacement after each solver step of size ``rate``."""
        return displacement

    @property
    def has_direction(self) -> bool:
        return type(self).direction is not Regularizer.direction

    @property
    def has_prox(self) -> bool:
        return type(self).prox is not Regularizer.prox

    def value(self, displacement: Tensors, eta: Number, metric: Metric | None) -> Tensor:
        """``R(W̃, W)``."""
        return torch.zeros(())


@dataclass(eq=False)
class Metric:
    """The Kronecker-factored Fisher ``D ⊗ A`` of a layer: D ``[d, d]``, A ``[n(+1), n(+1)]``."""

    pre_activation: Tensor
    inputs: Tensor
    _factors: tuple[Tensor, Tensor] | None = None

    def solve(self, joint: Tensor, damping: float) -> Tensor:
        """``D⁻¹ G A⁻¹`` with both factors damped; they are factored once."""
        if self._factors is None:
            self._factors = (
                cholesky(damped(self.pre_activation, damping)),
                cholesky(damped(self.inputs, damping)),
            )
        left = cholesky_solve(self._factors[0], joint)
        return cholesky_solve(self._factors[1], left.mT).mT


class L2(Regularizer):
    """``‖W̃ − W‖² / 2η`` (Eqs. 3 and 7)."""

    name = "l2"

    def direction(
        self, gradient: Tensors, displacement: Tensors, eta: Number, metric: Metric | None
    ) -> Tensors:
        return pulled_back_to_start(gradient, displacement, eta)

    def value(self, displacement: Tensors, eta: Number, metric: Metric | None) -> Tensor:
        squares = [value.square().sum() for value in displacement.values()]
        total: Tensor = torch.stack(squares).sum() / (2 * eta)
        return total


@dataclass(frozen=True)
class L1(Regularizer):
    """``strength · ‖W̃ − W‖₁`` by its proximal step: entries that gain too little do not move.

    With sgd, an entry moves in the first iteration only if ``γ |∂L/∂w|`` exceeds the strength.
    """

    strength: float = 1.0
    name = "l1"

    def __post_init__(self) -> None:
        if not self.strength >= 0:
            raise ValueError(f"Invalid strength={self.strength}. Must be >= 0.")

    def prox(self, displacement: Tensor, rate: Number) -> Tensor:
        threshold = rate * self.strength
        return displacement.sign() * (displacement.abs() - threshold).clamp_min(0)

    def value(self, displacement: Tensors, eta: Number, metric: Metric | None) -> Tensor:
        return self.strength * torch.stack([v.abs().sum() for v in displacement.values()]).sum()


@dataclass(frozen=True)
class FisherMahalanobis(Regularizer):
    """``(w̃ − w)ᵀ F (w̃ − w) / 2η`` with the Kronecker-factored Fisher of the layer.

    The solver follows ``F⁻¹ ∇D + (W̃ − W)/η``: the first iteration is a natural-gradient step, and
    the fixed point is the minimiser. ``damping`` is relative to each factor's mean diagonal.
    """

    damping: float = 1e-2
    decay: float = 0.95
    name = "fisher"
    needs = frozenset({"fisher"})

    def __post_init__(self) -> None:
        if not self.damping >= 0:
            raise ValueError(f"Invalid damping={self.damping}. Must be >= 0.")
        if not 0 <= self.decay < 1:
            raise ValueError(f"Invalid decay={self.decay}. Must be in [0, 1).")

    def direction(
        self, gradient: Tensors, displacement: Tensors, eta: Number, metric: Metric | None
    ) -> Tensors:
        assert metric is not None
        natural = metric.solve(join(gradient), self.damping)
        return pulled_back_to_start(split(natural, gradient), displacement, eta)

    def value(self, displacement: Tensors, eta: Number, metric: Metric | None) -> Tensor:
        assert metric is not None
        joint = join(displacement)
        left = damped(metric.pre_activation, self.damping)
        right = damped(metric.inputs, self.damping)
        total: Tensor = (joint * (left @ joint @ right)).sum() / (2 * eta)
        return total


REGULARIZERS: dict[str, Regularizer] = {
    regularizer.name: regularizer
    for regularizer in (Regularizer(), L2(), L1(), FisherMahalanobis())
}


def pulled_back_to_start(gradient: Tensors, displacement: Tensors, eta: Number) -> Tensors:
    """``gradient + displacement / η``; at η = 0 nothing has moved."""
    if not isinstance(eta, Tensor):
        weight: Number = 1 / eta if eta else 0.0
    else:
        weight = torch.where(eta == 0, 0.0, 1 / eta)
    return {k: value + displacement[k] * spread(weight, value) for k, value in gradient.items()}
