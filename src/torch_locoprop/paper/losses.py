"""Local losses: how far a layer is from its target. Each is a value and its gradient in ``a``.

Layout: ``a`` and ``target`` are ``[..., rows, features]``; values are ``[..., rows]``.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from torch_locoprop.paper.transfers import Linear, ReLU, Sigmoid, Tanh, Transfer

_MAKE_NEW_TENSORS = (Tanh, Sigmoid, ReLU)  # what they return is nobody else's


class LocalLoss:
    """Base of all local losses; subclass it for your own."""

    uses_transfer: ClassVar[bool] = True  # False: works for a layer whose transfer is unknown
    closed_form: ClassVar[bool] = False  # True: `curvature` is there for the exact solver

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        """``δ = ∂D/∂a`` ``[..., rows, features]``."""
        raise NotImplementedError

    def is_quadratic(self, transfer: Transfer) -> bool:
        """Whether ``δ(a) = a − target``: the rows then count through ``XᵀX`` alone."""
        return False

    def value(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        """``D`` per row, up to a constant that does not depend on ``a``."""
        raise NotImplementedError

    def curvature(self, a: Tensor, transfer: Transfer) -> Tensor | None:
        """``∂δ/∂a`` averaged over the rows: None for I, ``[..., d]`` diagonal, ``[..., d, d]``."""
        raise NotImplementedError


class Squared(LocalLoss):
    """``½‖a − a*‖²`` (Eq. 3)."""

    uses_transfer = False
    closed_form = True

    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        return a - target

    def is_quadratic(self, transfer: Transfer) -> bool:
        return type(self).residual is Squared.residual

    def value(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        return 0.5 * (a - target).square().sum(-1)

    def curvature(self, a: Tensor, transfer: Transfer) -> Tensor | None:
        return None


class Matching(LocalLoss):
    """The matching loss ``D_F(a, f⁻¹(y*))`` (Eq. 7), with gradient ``f(a) − y*``.

    The constant ``F*(y*)`` is left out: a mirror-descent target may lie outside the range of f,
    where that constant is infinite and the gradient is not.
    """

    closed_form = True

    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        y = transfer.f(a)
        fresh = type(transfer) in _MAKE_NEW_TENSORS and not y.requires_grad
        return y.sub_(target) if fresh else y - target

    def is_quadratic(self, transfer: Transfer) -> bool:
        return isinstance(transfer, Linear) and type(self).residual is Matching.residual

    def value(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        return integral_per_row(a, transfer) - (target * a).sum(-1)

    def curvature(self, a: Tensor, transfer: Transfer) -> Tensor | None:
        return transfer.derivative(a).mean(-2 if transfer.elementwise else -3)


class PostSquared(LocalLoss):
    """``½‖f(a) − y*‖²`` (Eq. 16), with gradient ``Jᵀ(f(a) − y*)``."""

    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        return transfer.vjp(a, transfer.f(a) - target)

    def value(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        return 0.5 * (transfer.f(a) - target).square().sum(-1)


class DualMatching(LocalLoss):
    """``D_F*(f(a), f(a*)) = D_F(a*, a)`` (Eq. 18), with gradient ``Jᵀ(a − a*)``."""

    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        return transfer.vjp(a, a - target)

    def value(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        linear = (transfer.f(a) * (target - a)).sum(-1)
        return integral_per_row(target, transfer) - integral_per_row(a, transfer) - linear


def integral_per_row(a: Tensor, transfer: Transfer) -> Tensor:
    """``F(a)`` summed over the features ``[..., rows]``."""
    value = transfer.integral(a)
    return value.sum(-1) if transfer.elementwise else value
