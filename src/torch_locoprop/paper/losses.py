"""Local losses D: the distance of a layer's pre-activation from its target.

Layout: ``a`` and ``target`` are ``[..., rows, d]``, values are ``[..., rows]``, and the residual
``δ = ∂D/∂a`` has the shape of ``a``. The gradient of D in the weights is ``δᵀX``.

The targets are in ``targets.py``, the divergences of a transfer in ``divergences.py``, and the pairs
of target and loss that make a variant in ``variants.py``.
"""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from torch_locoprop.paper.divergences import (
    bregman_per_row,
    integral_per_row,
    matching_loss_per_row,
)
from torch_locoprop.paper.transfers import Linear, ReLU, Sigmoid, Tanh, Transfer

__all__ = ["DualMatching", "LocalLoss", "Matching", "PostSquared", "Squared", "integral_per_row"]

# Transfers whose f returns a new tensor, which the residual may overwrite.
_MAKE_NEW_TENSORS = (Tanh, Sigmoid, ReLU)


class LocalLoss:
    """Base class of local losses. Subclass it and define ``residual``, and ``value`` if you can.

    Attributes:
        uses_transfer: False if the loss also works for a layer whose transfer is unknown.
        closed_form: True if ``curvature`` is defined, which ``solver="exact"`` needs.
        convex: True if D is convex in ``a``, and ``curvature`` is defined, which
            ``solver="preconditioned"`` and ``"preconditioned-averaged"`` need.
    """

    uses_transfer: ClassVar[bool] = True
    closed_form: ClassVar[bool] = False
    convex: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        """Return ``δ = ∂D/∂a``.

        Args:
            a: pre-activations at the current local iterate, ``[..., rows, d]``.
            target: what the variant's :class:`~torch_locoprop.targets.Target` returned, same shape.
            transfer: the layer's transfer f.

        Returns:
            The residual, ``[..., rows, d]``.
        """
        raise NotImplementedError

    def is_quadratic(self, transfer: Transfer) -> bool:
        """Return True if ``δ(a) = a − target``; the rows then matter through ``XᵀX`` alone."""
        return False

    def value(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        """Return D for each row, up to a constant that does not depend on ``a``.

        Guards and diagnostics need it; solvers do not.

        Args:
            a: pre-activations, ``[..., rows, d]``.
            target: the target, ``[..., rows, d]``.
            transfer: the layer's transfer f.

        Returns:
            The value of each row, ``[..., rows]``.
        """
        raise NotImplementedError

    def curvature(self, a: Tensor, transfer: Transfer) -> Tensor | None:
        """Return ``∂δ/∂a`` averaged over the rows.

        Args:
            a: pre-activations, ``[..., rows, d]``.
            transfer: the layer's transfer f.

        Returns:
            None for the identity, ``[..., d]`` for a diagonal matrix, or ``[..., d, d]``.
        """
        raise NotImplementedError

    def max_slope(self, transfer: Transfer) -> float:
        """Return a bound of the eigenvalues of ``∂δ/∂a`` for all ``a``; infinite if none is known."""
        return math.inf


class Squared(LocalLoss):
    """The squared loss ``½‖a − a*‖²`` of LocoProp-S (Eq. 3, Algorithm 1)."""

    uses_transfer = False
    closed_form = True
    convex = True

    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        """Return ``δ = a − a*``: with it, ``W − η δᵀX`` is the iteration of Eq. 4."""
        return a - target

    def is_quadratic(self, transfer: Transfer) -> bool:
        """Return True, unless a subclass has a residual of its own."""
        return type(self).residual is Squared.residual

    def value(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        """Return ``½‖a − a*‖²`` for each row."""
        return 0.5 * (a - target).square().sum(-1)

    def curvature(self, a: Tensor, transfer: Transfer) -> Tensor | None:
        """Return None: the curvature is the identity."""
        return None

    def max_slope(self, transfer: Transfer) -> float:
        """Return 1."""
        return 1.0


class Matching(LocalLoss):
    """The matching loss ``D_F(a, f⁻¹(y*))`` of LocoProp-M (Eq. 7, Algorithm 2).

    It is convex in ``a``, hence in the weights (Proposition 2). The constant ``F*(y*)`` is left out of
    the value: a mirror-descent target may lie outside the range of f, where that constant is infinite
    while the gradient is finite.
    """

    closed_form = True
    convex = True

    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        """Return ``δ = f(a) − y*`` (Eq. 2): with it, ``W − η δᵀX`` is the iteration of Eq. 8."""
        y = transfer.f(a)
        fresh = type(transfer) in _MAKE_NEW_TENSORS and not y.requires_grad
        return y.sub_(target) if fresh else y - target

    def is_quadratic(self, transfer: Transfer) -> bool:
        """Return True for a linear transfer, whose matching loss is the squared loss."""
        return isinstance(transfer, Linear) and type(self).residual is Matching.residual

    def value(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        """Return ``F(a) − ⟨y*, a⟩`` for each row."""
        return matching_loss_per_row(transfer, target, a)

    def curvature(self, a: Tensor, transfer: Transfer) -> Tensor | None:
        """Return ``H = ∇²F(a)`` averaged over the rows: ``[..., d]``, for softmax ``[..., d, d]``."""
        return transfer.derivative(a).mean(-2 if transfer.elementwise else -3)

    def max_slope(self, transfer: Transfer) -> float:
        """Return ``sup f'``, and ½ for softmax."""
        return transfer.max_slope


class PostSquared(LocalLoss):
    """The squared loss ``½‖f(a) − y*‖²`` of PocoProp-S (Eq. 16, Algorithm 3)."""

    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        """Return ``δ = J(a)ᵀ(f(a) − y*)``: with it, ``W − η δᵀX`` is the iteration of Eq. 17."""
        return transfer.vjp(a, transfer.f(a) - target)

    def value(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        """Return ``½‖f(a) − y*‖²`` for each row."""
        return 0.5 * (transfer.f(a) - target).square().sum(-1)


class DualMatching(LocalLoss):
    """The dual divergence ``D_F*(f(a), f(a*)) = D_F(a*, a)`` of PocoProp-M (Eq. 18, Algorithm 4)."""

    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        """Return ``δ = J(a)ᵀ(a − a*)``: with it, ``W − η δᵀX`` is the iteration of Eq. 19."""
        return transfer.vjp(a, a - target)

    def value(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        """Return ``D_F(a*, a)`` for each row."""
        return bregman_per_row(transfer, target, a)
