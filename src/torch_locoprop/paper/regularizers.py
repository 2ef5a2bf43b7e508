"""Regularizers R(W̃, W): the penalty on the distance between a layer's new and current weights.

Layout: ``gradient`` and ``displacement = W̃ − W`` are ``{"weight": [..., d, n], "bias": [..., d]}``,
with one entry for each trained tensor. ``eta`` is the learning rate η of the parameter group, ``rate``
the learning rate of the current local iteration. The solvers that apply a regularizer are in
``solvers/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_locoprop.paper.fisher import cholesky, cholesky_solve, damped
from torch_locoprop.paper.tensors import Number, Tensors, join, split, spread


class Regularizer:
    """Base class of regularizers: without any penalty, as Algorithms 1 to 4 run.

    Subclass it and define ``direction`` (a smooth penalty) or ``prox`` (a penalty with a proximal map),
    and ``value`` for diagnostics.

    Attributes:
        name: the name for ``LocoProp(regularizer=...)``.
        needs: ``{"fisher"}`` if a Fisher matrix must be sampled in the backward pass.
        has_direction: True if a subclass defines ``direction``; set automatically.
        has_prox: True if a subclass defines ``prox``; set automatically.
    """

    name: ClassVar[str] = "none"
    needs: ClassVar[frozenset[str]] = frozenset()
    has_direction: ClassVar[bool] = False
    has_prox: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.has_direction = cls.direction is not Regularizer.direction
        cls.has_prox = cls.prox is not Regularizer.prox

    def direction(
        self, gradient: Tensors, displacement: Tensors, eta: Number, metric: Metric | None
    ) -> Tensors:
        """Return the direction that the solver follows.

        Args:
            gradient: gradient of the local loss at the current iterate.
            displacement: ``W̃ − W`` at the current iterate.
            eta: the learning rate η.
            metric: the Fisher metric of the layer, if ``needs`` asks for it.
        """
        return gradient

    def prox(self, displacement: Tensor, rate: Number) -> Tensor:
        """Return the proximal map of ``rate · R``, which is applied after each local iteration.

        Args:
            displacement: ``W̃ − W`` of one tensor.
            rate: the learning rate of the local iteration.
        """
        return displacement

    def value(self, displacement: Tensors, eta: Number, metric: Metric | None) -> Tensor:
        """Return ``R(W̃, W)`` as a scalar tensor.

        Args:
            displacement: ``W̃ − W`` of each trained tensor.
            eta: the learning rate η.
            metric: the Fisher metric of the layer, if ``needs`` asks for it.
        """
        return torch.zeros((), device="cpu")


@dataclass(eq=False)
class Metric:
    """The Kronecker-factored Fisher matrix ``D ⊗ A`` of a layer (Eq. 12, factored as for Eq. 14).

    Attributes:
        pre_activation: ``D = E[g gᵀ]``, ``[..., d, d]``, for labels drawn from the model.
        inputs: ``A = E[x xᵀ]``, ``[..., n(+1), n(+1)]``, the paper's X. With a bias, x ends with a
            constant one.
    """

    pre_activation: Tensor
    inputs: Tensor
    _factors: tuple[Tensor, Tensor] | None = None

    def solve(self, joint: Tensor, damping: float) -> Tensor:
        """Return the natural gradient ``D⁻¹ G A⁻¹`` (Eqs. 13 and 14) with both factors damped.

        The Cholesky factors are computed in the first call and kept.

        Args:
            joint: the gradient of weight and bias as one matrix G, ``[..., d, n(+1)]``.
            damping: multiple of each factor's mean diagonal that is added to its diagonal.
        """
        if self._factors is None:
            self._factors = (
                cholesky(damped(self.pre_activation, damping)),
                cholesky(damped(self.inputs, damping)),
            )
        left = cholesky_solve(self._factors[0], joint)
        return cholesky_solve(self._factors[1], left.mT).mT


class L2(Regularizer):
    """The squared distance ``‖W̃ − W‖²/2η``, as in the objectives of Eqs. 3, 7, 16 and 18."""

    name = "l2"

    def direction(
        self, gradient: Tensors, displacement: Tensors, eta: Number, metric: Metric | None
    ) -> Tensors:
        """Return ``∇D + (W̃ − W)/η``, which is zero at the fixed points of Eqs. 4, 8, 17 and 19."""
        return pulled_back_to_start(gradient, displacement, eta)

    def value(self, displacement: Tensors, eta: Number, metric: Metric | None) -> Tensor:
        squares = [value.square().sum() for value in displacement.values()]
        total: Tensor = torch.stack(squares).sum() / (2 * eta)
        return total


@dataclass(frozen=True)
class L1(Regularizer):
    """The penalty ``strength · ‖W̃ − W‖₁``, for sparse updates.

    Each local iteration ends with its proximal map, a soft threshold. With ``solver="sgd"``, a weight
    moves in the first iteration only if ``γ |∂L/∂w|`` exceeds ``strength``.

    Args:
        strength: the factor of the penalty, >= 0.
    """

    strength: float = 1.0
    name = "l1"

    def __post_init__(self) -> None:
        if not self.strength >= 0:
            raise ValueError(f"Invalid strength={self.strength}. Must be >= 0.")

    def prox(self, displacement: Tensor, rate: Number) -> Tensor:
        """Return the displacement with each entry moved towards zero by ``rate · strength``."""
        threshold = rate * self.strength
        return displacement.sign() * (displacement.abs() - threshold).clamp_min(0)

    def value(self, displacement: Tensors, eta: Number, metric: Metric | None) -> Tensor:
        return self.strength * torch.stack([v.abs().sum() for v in displacement.values()]).sum()


@dataclass(frozen=True)
class FisherMahalanobis(Regularizer):
    """The Mahalanobis distance ``(w̃ − w)ᵀ F (w̃ − w)/2η`` in the layer's Fisher matrix F (Eq. 12).

    F is Kronecker-factored (:class:`Metric`). The solver follows ``F⁻¹ ∇D + (W̃ − W)/η``: the first
    local iteration is a natural-gradient step (Eq. 13), and the fixed point minimizes the local loss
    plus the penalty.

    Args:
        damping: multiple of each factor's mean diagonal that is added to its diagonal.
        decay: weight of the past in the running average of the Fisher matrix over steps.
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
        """Return ``F⁻¹ ∇D + (W̃ − W)/η``."""
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
    """Return ``gradient + displacement/η``: the gradient with that of the squared distance added.

    Where η = 0 nothing has moved, and the result is ``gradient``.

    Args:
        gradient: the gradient of the local loss, for each trained tensor.
        displacement: ``W̃ − W``, with the keys of ``gradient``.
        eta: the learning rate η.
    """
    if not isinstance(eta, Tensor):
        weight: Number = 1 / eta if eta else 0.0
    else:
        weight = torch.where(eta == 0, 0.0, 1 / eta)
    return {k: value + displacement[k] * spread(weight, value) for k, value in gradient.items()}
