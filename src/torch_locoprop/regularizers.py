"""Regularizers: how far the weights may move from where the step began.

``gradient`` and ``displacement`` are dictionaries ``{"weight": [..., d, n], "bias": [..., d]}``;
``eta`` is the learning rate of the group, ``rate`` the one of the current local iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torch_locoprop.fisher import damped_solve
from torch_locoprop.spread import Number, spread

Tensors = dict[str, Tensor]


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


@dataclass(frozen=True)
class Metric:
    """The Kronecker-factored Fisher ``D ⊗ A`` of a layer: D ``[d, d]``, A ``[n(+1), n(+1)]``."""

    pre_activation: Tensor
    inputs: Tensor


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

    An entry moves only if ``γ |∂L/∂w|`` exceeds the strength.
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
        left = damped_solve(metric.pre_activation, join(gradient), self.damping)
        natural = damped_solve(metric.inputs, left.mT, self.damping).mT
        return pulled_back_to_start(split(natural, gradient), displacement, eta)

    def value(self, displacement: Tensors, eta: Number, metric: Metric | None) -> Tensor:
        assert metric is not None
        joint = join(displacement)
        total: Tensor = (joint * (metric.pre_activation @ joint @ metric.inputs)).sum() / (2 * eta)
        return total


REGULARIZERS: dict[str, Regularizer] = {
    regularizer.name: regularizer
    for regularizer in (Regularizer(), L2(), L1(), FisherMahalanobis())
}


def pulled_back_to_start(gradient: Tensors, displacement: Tensors, eta: Number) -> Tensors:
    """``gradient + displacement / η``; at η = 0 nothing has moved."""
    if isinstance(eta, float) and eta == 0:
        return gradient
    return {k: value + displacement[k] / spread(eta, value) for k, value in gradient.items()}


def join(tensors: Tensors) -> Tensor:
    """Weight and bias as one matrix ``[..., d, n(+1)]``; the bias is the last column."""
    columns = [tensors["weight"]] if "weight" in tensors else []
    columns += [tensors["bias"].unsqueeze(-1)] if "bias" in tensors else []
    return torch.cat(columns, dim=-1)


def split(joint: Tensor, like: Tensors) -> Tensors:
    """The inverse of :func:`join`, with the entries of ``like``."""
    parts: Tensors = {}
    if "weight" in like:
        parts["weight"] = joint[..., : like["weight"].shape[-1]]
    if "bias" in like:
        parts["bias"] = joint[..., -1]
    return parts
