"""Transfers without kinks: sigmoid, tanh, arctan, softsign, softplus, log-sigmoid and softmax.

Each class gives f, f', the convex integral F, its dual F* and f⁻¹. The piecewise transfers are in
``piecewise_transfers.py``, and the table by name is in ``transfers.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from torch_locoprop.paper.dilogarithm import softplus_dual, softplus_integral
from torch_locoprop.paper.transfer_base import Transfer, check_parameter, divide, xlogx_1p


class Sigmoid(Transfer):
    """``f(a) = 1/(1 + e⁻ᵃ)`` with ``F(a) = log(1 + eᵃ)`` (Table 2)."""

    name = "sigmoid"
    domain = (0.0, 1.0)
    max_slope = 0.25

    def f(self, a: Tensor) -> Tensor:
        return a.sigmoid()

    def derivative(self, a: Tensor) -> Tensor:
        # y(1 − y) would round to zero for large a, where the true value does not.
        return a.sigmoid() * (-a).sigmoid()

    def integral(self, a: Tensor) -> Tensor:
        return _softplus(a)

    def _dual(self, y: Tensor) -> Tensor:
        return -_entropy(y) - _entropy(1 - y)

    def _inverse(self, y: Tensor) -> Tensor:
        return y.logit()


class Tanh(Transfer):
    """``f(a) = tanh a`` with ``F(a) = log cosh a`` (Table 2)."""

    name = "tanh"
    domain = (-1.0, 1.0)
    max_slope = 1.0

    def f(self, a: Tensor) -> Tensor:
        return a.tanh()

    def derivative(self, a: Tensor) -> Tensor:
        return 4 * (2 * a).sigmoid() * (-2 * a).sigmoid()

    def integral(self, a: Tensor) -> Tensor:
        # The first form keeps the digits of small values, the second does not overflow.
        near = torch.log1p(2 * (0.5 * a.clamp(-1, 1)).sinh().square())
        far = a.abs() + _softplus(-2 * a.abs()) - math.log(2)
        return torch.where(a.abs() < 1, near, far)

    def _dual(self, y: Tensor) -> Tensor:
        return 0.5 * (xlogx_1p(y) + xlogx_1p(-y))

    def _inverse(self, y: Tensor) -> Tensor:
        return y.atanh()


class Arctan(Transfer):
    """``f(a) = arctan a`` with ``F(a) = a arctan a − log √(1 + a²)`` (Table 2)."""

    name = "arctan"
    domain = (-math.pi / 2, math.pi / 2)
    max_slope = 1.0

    def f(self, a: Tensor) -> Tensor:
        return a.atan()

    def derivative(self, a: Tensor) -> Tensor:
        return 1 / (1 + a.square())

    def integral(self, a: Tensor) -> Tensor:
        return a * a.atan() - 0.5 * torch.log1p(a.square())

    def _dual(self, y: Tensor) -> Tensor:
        return 0.5 * torch.log1p(self._inverse(y).square())

    def _inverse(self, y: Tensor) -> Tensor:
        # The rounded π/2 is not the pole itself, so tan is finite there; set the ends explicitly.
        lower, upper = self.domain
        return y.tan().masked_fill(y <= lower, -math.inf).masked_fill(y >= upper, math.inf)


class Softsign(Transfer):
    """``f(a) = a/(1 + |a|)`` with ``F(a) = |a| − log(1 + |a|)``."""

    name = "softsign"
    domain = (-1.0, 1.0)
    max_slope = 1.0

    def f(self, a: Tensor) -> Tensor:
        return functional.softsign(a)

    def derivative(self, a: Tensor) -> Tensor:
        return (1 + a.abs()).square().reciprocal()

    def integral(self, a: Tensor) -> Tensor:
        magnitude = _magnitude(a)
        return magnitude - magnitude.log1p()

    def _dual(self, y: Tensor) -> Tensor:
        magnitude = _magnitude(y)
        return -magnitude - torch.log1p(-magnitude)

    def _inverse(self, y: Tensor) -> Tensor:
        return y / (1 - y.abs())


@dataclass(frozen=True)
class Softplus(Transfer):
    """``f(a) = log(1 + exp(beta · a))/beta`` with ``F(a) = −Li₂(−eᵃ)`` for ``beta = 1`` (Table 2).

    Unlike ``torch.nn.functional.softplus``, f does not switch to a linear function for large ``a``.

    Args:
        beta: the sharpness, > 0.
    """

    name = "softplus"
    domain = (0.0, math.inf)
    max_slope = 1.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        check_parameter("beta", self.beta, strict=True)

    def f(self, a: Tensor) -> Tensor:
        return _softplus(self.beta * a) / self.beta

    def derivative(self, a: Tensor) -> Tensor:
        return (self.beta * a).sigmoid()

    def integral(self, a: Tensor) -> Tensor:
        return softplus_integral(self.beta * a) / self.beta**2

    def _dual(self, y: Tensor) -> Tensor:
        return softplus_dual(self.beta * y) / self.beta**2

    def _inverse(self, y: Tensor) -> Tensor:
        return y + torch.log(-torch.expm1(-self.beta * y)) / self.beta


class LogSigmoid(Transfer):
    """``f(a) = log(sigmoid(a)) = −softplus(−a)`` with ``F(a) = −Li₂(−e⁻ᵃ)``."""

    name = "logsigmoid"
    domain = (-math.inf, 0.0)
    max_slope = 1.0

    def f(self, a: Tensor) -> Tensor:
        return functional.logsigmoid(a)

    def derivative(self, a: Tensor) -> Tensor:
        return (-a).sigmoid()

    def integral(self, a: Tensor) -> Tensor:
        return softplus_integral(-a)

    def _dual(self, y: Tensor) -> Tensor:
        return softplus_dual(-y)

    def _inverse(self, y: Tensor) -> Tensor:
        return -Softplus()._inverse(-y)


class Softmax(Transfer):
    """``f(a)ᵢ = exp(aᵢ)/Σⱼ exp(aⱼ)`` over the last dimension, with ``F(a) = log Σⱼ exp(aⱼ)`` (Table 2).

    The domain is the unit simplex. The divergence of F is the relative entropy of Eq. 6.
    """

    name = "softmax"
    elementwise = False
    domain = (0.0, 1.0)
    max_slope = 0.5

    def f(self, a: Tensor) -> Tensor:
        return a.softmax(-1)

    def derivative(self, a: Tensor) -> Tensor:
        """Return the Jacobian ``diag(y) − y yᵀ``: ``[..., d] -> [..., d, d]``."""
        y = self.f(a)
        return torch.diag_embed(y) - y.unsqueeze(-1) * y.unsqueeze(-2)

    def integral(self, a: Tensor) -> Tensor:
        return a.logsumexp(-1)

    def dual(self, y: Tensor) -> Tensor:
        """Return ``F*(y) = Σ y log y`` on the simplex (up to rounding), infinity elsewhere.

        The paper prints ``Σ (y log y − y)``, which is smaller by the constant ``Σ y = 1``.
        """
        tolerance = max(1e-6, math.sqrt(torch.finfo(y.dtype).eps))
        outside = ((y.sum(-1) - 1).abs() > tolerance) | (y < -tolerance).any(-1)
        return -_entropy(y.clamp(min=0)).sum(-1).masked_fill(outside, -math.inf)

    def inverse(self, y: Tensor) -> Tensor:
        """Return ``log y`` minus its mean over the positive entries, and −∞ where ``y`` is zero."""
        positive = y > 0
        log_y = y.where(positive, 1).log()
        mean = log_y.sum(-1, keepdim=True) / positive.sum(-1, keepdim=True)
        return (log_y - mean).masked_fill(~positive, -math.inf)

    def vjp(self, a: Tensor, v: Tensor) -> Tensor:
        """Return ``J(a)ᵀ v = y ⊙ (v − ⟨y, v⟩)`` without forming the Jacobian."""
        y = self.f(a)
        return y * (v - (y * v).sum(-1, keepdim=True))

    def pull_back(self, a: Tensor, g: Tensor) -> Tensor:
        """Return ``g / y``.

        This is exact if ``g`` sums to zero over the last dimension, as every gradient that passes
        through a softmax does.
        """
        return divide(g, self.f(a))


def _softplus(a: Tensor) -> Tensor:
    """Return ``log(1 + exp(a))``. Unlike logaddexp, its second derivative is finite everywhere."""
    return -functional.logsigmoid(-a)


def _magnitude(a: Tensor) -> Tensor:
    """Return ``|a|`` with derivative 1 at zero, so that even functions have their curvature there."""
    return torch.where(a < 0, -a, a)


def _entropy(y: Tensor) -> Tensor:
    """Return ``−y log y``: zero at zero, with an infinite derivative there rather than NaN."""
    entropy: Tensor = torch.special.entr(y)
    return entropy
