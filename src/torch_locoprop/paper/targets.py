"""Targets: where a layer should go, as seen from one backward pass.

Layout of every tensor here: ``[..., rows, features]``. ``a`` is the pre-activation at the current
weights, ``y = f(a)``, ``g = ∂L/∂a`` and ``v = ∂L/∂y`` come from the ordinary backward pass.

A target enters the local problem through its residual. For the targets of the paper the weight
gradient at the start, ``δ₀ᵀX``, is ``γ`` times the ordinary gradient ``G``, so they never need ``g``
row by row: :meth:`Target.first_gradient` hands the problem ``γ G``, and ``g=None`` stands for a target
measured from that gradient. What the user did to ``p.grad`` before the step (clipping, averaging
over machines, a penalty on the weights) is thereby part of the local problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torch_locoprop.paper.fisher import damped_solve
from torch_locoprop.paper.tensors import Number, Tensors, join, split, spread
from torch_locoprop.paper.transfers import Transfer


class Target:
    """Base of all targets; subclass it for your own.

    ``needs`` lists what must be recorded during the backward pass: ``"g"`` for ∂L/∂a, ``"v"`` for
    ∂L/∂y, ``"fisher"`` for a sampled Fisher matrix of the pre-activations. The rest is None.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"g"})
    starts_at_zero: ClassVar[bool] = False  # without g, the target is where the layer already is

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Number
    ) -> Tensor:
        """Return the target rows ``[..., rows, features]``."""
        raise NotImplementedError

    def first_gradient(
        self, gradient: Tensors, gamma: Number, fisher: Tensor | None
    ) -> Tensors | None:
        """The local weight gradient at the start, from the ordinary one; None: take ``δ₀ᵀX``."""
        return None

    @property
    def knows_first_gradient(self) -> bool:
        """Whether :meth:`first_gradient` never is None."""
        ours = (BackPropTarget.first_gradient, NaturalGradient.first_gradient)
        return type(self).first_gradient in ours


class BackPropTarget(Target):
    """A target whose first residual is ``γ g``: one local iteration is a BackProp step."""

    def first_gradient(
        self, gradient: Tensors, gamma: Number, fisher: Tensor | None
    ) -> Tensors | None:
        return {name: spread(gamma, value) * value for name, value in gradient.items()}


class GradientDescent(BackPropTarget):
    """``a* = a − γ ∂L/∂a`` (Algorithm 1, LocoProp-S)."""

    needs = frozenset()
    starts_at_zero = True

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Number
    ) -> Tensor:
        return step_from(a, g, gamma)


class MirrorDescent(BackPropTarget):
    """``y* = f(a) − γ ∂L/∂a`` (Algorithm 2, LocoProp-M)."""

    needs = frozenset()
    starts_at_zero = True

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Number
    ) -> Tensor:
        return step_from(transfer.f(a), g, gamma)


class PostGradientDescent(BackPropTarget):
    """``y* = f(a) − γ ∂L/∂y`` (Algorithm 3, PocoProp-S)."""

    needs = frozenset({"v"})

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Number
    ) -> Tensor:
        return step_from(transfer.f(a), v, gamma)


class DualMirrorDescent(BackPropTarget):
    """``a* = a − γ ∂L/∂y`` (Algorithm 4, PocoProp-M)."""

    needs = frozenset({"v"})

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Number
    ) -> Tensor:
        return step_from(a, v, gamma)


@dataclass(frozen=True)
class NaturalGradient(Target):
    """``a* = a − γ D⁻¹ ∂L/∂a``, D the Fisher matrix of the pre-activations (Proposition 1).

    D is estimated from labels drawn from the model's own predictive distribution, averaged over
    steps with weight ``decay``, sampled anew every ``every`` steps, and inverted with ``damping``
    times its mean diagonal added.
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
        assert fisher is not None
        natural = split(damped_solve(fisher, join(gradient), self.damping), gradient)
        return {name: spread(gamma, value) * value for name, value in natural.items()}


def step_from(start: Tensor, direction: Tensor | None, gamma: Number) -> Tensor:
    """``start − γ direction``; no direction: the start itself."""
    return start if direction is None else start - spread(gamma, start) * direction
