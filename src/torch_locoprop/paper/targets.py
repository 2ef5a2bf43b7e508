"""Targets: the values that a layer's local problem moves its activations towards.

Layout: every tensor is ``[..., rows, d]``. ``a`` is the pre-activation at the current weights and
``y = f(a)``; ``g = ∂L/∂a`` and ``v = ∂L/∂y`` come from the ordinary backward pass; ``γ`` is the
activation step size.

A target enters the local problem through the residual ``δ`` of the local loss (``losses.py``). At the
start of the local iterations, the targets of Algorithms 1 to 4 give the weight gradient
``δ₀ᵀX = γ G``, where ``G`` is the ordinary gradient ``p.grad``. The local problem therefore takes its
first gradient from :meth:`Target.first_gradient` and, where possible, needs no ``g`` for each row: the
target is then called with ``g=None``. Changes that the user makes to ``p.grad`` before the step
(clipping, averaging over processes, a penalty on the weights) thus become part of the local problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torch_locoprop.paper.fisher import damped_solve
from torch_locoprop.paper.tensors import Number, Tensors, join, split, spread
from torch_locoprop.paper.transfers import Transfer


class Target:
    """Base class of targets. Subclass it and define ``__call__``.

    Attributes:
        needs: what the backward pass must record: ``"g"`` for ∂L/∂a, ``"v"`` for ∂L/∂y, ``"fisher"``
            for a sampled Fisher matrix of the pre-activations. What is not recorded is None.
        starts_at_zero: True if the target called with ``g=None`` is the layer's present activation, so
            that the first residual is zero and the first gradient comes from ``first_gradient``.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"g"})
    starts_at_zero: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Number
    ) -> Tensor:
        """Return the target.

        Args:
            a: pre-activations at the current weights, ``[..., rows, d]``.
            transfer: the layer's transfer f.
            g: ``∂L/∂a``, ``[..., rows, d]``, or None.
            v: ``∂L/∂y``, ``[..., rows, d]``, or None.
            gamma: the activation step size γ.

        Returns:
            The target, ``[..., rows, d]``.
        """
        raise NotImplementedError

    def first_gradient(
        self, gradient: Tensors, gamma: Number, fisher: Tensor | None
    ) -> Tensors | None:
        """Return the gradient of the local loss at the current weights, without any row.

        Args:
            gradient: the ordinary gradient G, ``{"weight": [..., d, n], "bias": [..., d]}``.
            gamma: the activation step size γ.
            fisher: Fisher matrix of the pre-activations, ``[..., d, d]``, or None.

        Returns:
            The local gradient with the keys of ``gradient``, or None to compute it as ``δ₀ᵀX``.
        """
        return None

    @property
    def knows_first_gradient(self) -> bool:
        """True if :meth:`first_gradient` is known never to return None."""
        ours = (BackPropTarget.first_gradient, NaturalGradient.first_gradient)
        return type(self).first_gradient in ours


class BackPropTarget(Target):
    """Base class of targets whose first residual is ``γ g``: one local iteration is a BackProp step."""

    def first_gradient(
        self, gradient: Tensors, gamma: Number, fisher: Tensor | None
    ) -> Tensors | None:
        """Return ``γ G``."""
        if not isinstance(gamma, Tensor):
            return {name: gamma * value for name, value in gradient.items()}
        return {name: spread(gamma, value) * value for name, value in gradient.items()}


class GradientDescent(BackPropTarget):
    """The gradient-descent target ``a* = a − γ ∂L/∂a`` of LocoProp-S (Algorithm 1)."""

    needs = frozenset()
    starts_at_zero = True

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Number
    ) -> Tensor:
        return step_from(a, g, gamma)


class MirrorDescent(BackPropTarget):
    """The mirror-descent target ``y* = f(a) − γ ∂L/∂a`` of LocoProp-M (Algorithm 2).

    At an output layer whose loss is the matching loss of f, ``∂L/∂a = f(a) − y``. With γ = 1 the target
    is then the label y, and the local problem minimizes the loss itself (Proposition 4).
    """

    needs = frozenset()
    starts_at_zero = True

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Number
    ) -> Tensor:
        return step_from(transfer.f(a), g, gamma)


class PostGradientDescent(BackPropTarget):
    """The post-activation target ``y* = f(a) − γ ∂L/∂y`` of PocoProp-S (Algorithm 3)."""

    needs = frozenset({"v"})

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Number
    ) -> Tensor:
        return step_from(transfer.f(a), v, gamma)


class DualMirrorDescent(BackPropTarget):
    """The dual mirror-descent target ``a* = a − γ ∂L/∂y`` of PocoProp-M (Algorithm 4)."""

    needs = frozenset({"v"})

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Number
    ) -> Tensor:
        return step_from(a, v, gamma)


@dataclass(frozen=True)
class NaturalGradient(Target):
    """The natural-gradient target ``a* = a − γ D⁻¹ ∂L/∂a`` (Proposition 1).

    ``D [d, d]`` is the Fisher matrix of the pre-activations, estimated from labels that are drawn from
    the model's predictive distribution (Eq. 12). With the squared loss and ``solver="exact"``, the
    update is that of Eq. 15, a damped form of K-FAC.

    Args:
        damping: this multiple of D's mean diagonal is added to its diagonal before D is inverted.
        decay: weight of the past in the running average of D over steps.
        every: number of steps between two samples of D.
    """

    damping: float = 1e-2
    decay: float = 0.95
    every: int = 1
    needs = frozenset({"fisher"})
    starts_at_zero = True

    def __post_init__(self) -> None:
        if not self.damping >= 0:
            raise ValueError(f"Invalid damping={self.damping}. Must be >= 0.")
        if not 0 <= self.decay < 1:
            raise ValueError(f"Invalid decay={self.decay}. Must be in [0, 1).")
        if self.every < 1:
            raise ValueError(f"Invalid every={self.every}. Must be >= 1.")

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Number
    ) -> Tensor:
        return a

    def first_gradient(
        self, gradient: Tensors, gamma: Number, fisher: Tensor | None
    ) -> Tensors | None:
        """Return ``γ D⁻¹ G``."""
        assert fisher is not None
        natural = split(damped_solve(fisher, join(gradient), self.damping), gradient)
        return {name: spread(gamma, value) * value for name, value in natural.items()}


def step_from(start: Tensor, direction: Tensor | None, gamma: Number) -> Tensor:
    """Return ``start − γ · direction``, or ``start`` if ``direction`` is None.

    Args:
        start: the present activations, ``[..., rows, d]``.
        direction: a gradient of the same shape, or None.
        gamma: the activation step size γ.
    """
    return start if direction is None else start - spread(gamma, start) * direction
