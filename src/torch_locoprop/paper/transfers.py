"""Transfer functions f and what a matching loss needs of them: f', the integral F, F* and f⁻¹.

This is the paper's table of transfer functions (appendix, "Matching losses of common transfer
functions"), and a few more that networks use. A transfer is a small immutable value: it compares,
hashes and prints by its parameters and holds no tensor. Its methods are pure and take any float
dtype, device and leading dimensions:

    elementwise    [..., d] -> [..., d], every entry an independent problem
    softmax        f, inverse, vjp, pull_back: [..., d] -> [..., d]
                   integral, dual: [..., d] -> [...], one value for each distribution
                   derivative: the Jacobian [..., d, d]

All are differentiable by autograd, F at least twice. F is fixed up to a constant; F* goes with the
F given here. The targets and losses of the LocoProp variants are not here, only the two divergences
that depend on f alone: :func:`bregman` and :func:`matching_loss`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from torch_locoprop.paper.dilogarithm import softplus_dual, softplus_integral

_INF = math.inf


@dataclass(frozen=True)
class Transfer(ABC):
    """A non-decreasing transfer function ``y = f(a)``.

    A new elementwise transfer defines ``name``, ``f``, ``derivative``, ``integral``, and ``_dual``
    and ``_inverse`` on its domain; parameters are fields of a frozen dataclass.
    """

    name: ClassVar[str]
    elementwise: ClassVar[bool] = True

    @property
    def strictly_increasing(self) -> bool:
        """Whether ``D_F(â, a) = 0`` implies ``â = a`` (softmax: up to a constant shift)."""
        return True

    @property
    def domain(self) -> tuple[float, float]:
        """The closed hull of the range of f; inside it F* and the inverse are finite."""
        return -_INF, _INF

    @abstractmethod
    def f(self, a: Tensor) -> Tensor:
        """The transfer function itself."""

    @abstractmethod
    def derivative(self, a: Tensor) -> Tensor:
        """``f'(a)``; at a kink, the side that torch takes."""

    @abstractmethod
    def integral(self, a: Tensor) -> Tensor:
        """The convex ``F`` with ``∇F = f``."""

    def dual(self, y: Tensor) -> Tensor:
        """``F*(y) = sup_z ⟨y, z⟩ − F(z)``: its limit at the domain's ends, infinite outside."""
        lower, upper = self.domain
        return self._dual(y.clamp(lower, upper)).masked_fill((y < lower) | (y > upper), _INF)

    def inverse(self, y: Tensor) -> Tensor:
        """An ``a`` with ``f(a) = y``, perhaps infinite at the domain's ends.

        Where f is flat it is one of many. Outside the domain, the inverse of its nearest point.
        """
        return self._inverse(y.clamp(*self.domain))

    def vjp(self, a: Tensor, v: Tensor) -> Tensor:
        """``J(a)ᵀ v`` with ``J`` the Jacobian of f."""
        return self.derivative(a) * v

    def pull_back(self, a: Tensor, g: Tensor) -> Tensor:
        """A finite ``v`` with ``vjp(a, v) = g``; zero where f is flat, which no ``v`` can move."""
        return _divide(g, self.derivative(a))

    def _dual(self, y: Tensor) -> Tensor:
        """``F*`` for ``y`` within the domain."""
        raise NotImplementedError

    def _inverse(self, y: Tensor) -> Tensor:
        """``f⁻¹`` for ``y`` within the domain."""
        raise NotImplementedError


class Step(Transfer):
    name = "step"
    strictly_increasing = False
    domain = (0.0, 1.0)

    def f(self, a: Tensor) -> Tensor:
        return 0.5 * (1 + a.sign())

    def derivative(self, a: Tensor) -> Tensor:
        return torch.zeros_like(a)

    def integral(self, a: Tensor) -> Tensor:
        # max(a, 0), with the derivative f(0) = 1/2 at zero.
        return 0.5 * (a + a.abs())

    def _dual(self, y: Tensor) -> Tensor:
        return 0.0 * y

    def _inverse(self, y: Tensor) -> Tensor:
        # −1 and 1 at the ends, 0 in between.
        return y.floor() + y.ceil() - 1


class Linear(Transfer):
    name = "linear"

    def f(self, a: Tensor) -> Tensor:
        return a

    def derivative(self, a: Tensor) -> Tensor:
        return torch.ones_like(a)

    def integral(self, a: Tensor) -> Tensor:
        return 0.5 * a.square()

    def _dual(self, y: Tensor) -> Tensor:
        return 0.5 * y.square()

    def _inverse(self, y: Tensor) -> Tensor:
        return y


@dataclass(frozen=True)
class LeakyReLU(Transfer):
    """``a`` above zero, ``slope · a`` below."""

    name = "leaky_relu"
    slope: float = 0.01

    def __post_init__(self) -> None:
        _check("slope", self.slope)

    @property
    def strictly_increasing(self) -> bool:
        return self.slope > 0

    @property
    def domain(self) -> tuple[float, float]:
        return (-_INF if self.slope > 0 else 0.0), _INF

    def f(self, a: Tensor) -> Tensor:
        return functional.leaky_relu(a, self.slope)

    def derivative(self, a: Tensor) -> Tensor:
        return torch.where(a > 0, torch.ones_like(a), self.slope)

    def integral(self, a: Tensor) -> Tensor:
        return 0.5 * a * self.f(a)

    def _dual(self, y: Tensor) -> Tensor:
        return 0.5 * y * self._inverse(y)

    def _inverse(self, y: Tensor) -> Tensor:
        # With slope zero the domain holds no negative y, and any divisor but zero will do.
        return torch.where(y < 0, y / (self.slope or 1.0), y)


@dataclass(frozen=True)
class ReLU(LeakyReLU):
    name = "relu"
    slope: float = field(default=0.0, init=False, repr=False)


class SquaredReLU(Transfer):
    """``max(a, 0)²``."""

    name = "squared_relu"
    strictly_increasing = False
    domain = (0.0, _INF)

    def f(self, a: Tensor) -> Tensor:
        return a.relu().square()

    def derivative(self, a: Tensor) -> Tensor:
        return 2 * a.relu()

    def integral(self, a: Tensor) -> Tensor:
        return a.relu().pow(3) / 3

    def _dual(self, y: Tensor) -> Tensor:
        return y.pow(1.5) * (2 / 3)

    def _inverse(self, y: Tensor) -> Tensor:
        return y.sqrt()


@dataclass(frozen=True)
class Hardtanh(Transfer):
    """``a`` clamped to ``[min_val, max_val]``."""

    name = "hardtanh"
    strictly_increasing = False
    min_val: float = -1.0
    max_val: float = 1.0

    def __post_init__(self) -> None:
        if not self.min_val <= self.max_val:  # NaN included
            raise ValueError(f"Invalid min_val={self.min_val}. Must be <= max_val={self.max_val}.")

    @property
    def domain(self) -> tuple[float, float]:
        return self.min_val, self.max_val

    def f(self, a: Tensor) -> Tensor:
        return functional.hardtanh(a, self.min_val, self.max_val)

    def derivative(self, a: Tensor) -> Tensor:
        return ((a > self.min_val) & (a < self.max_val)).to(a)

    def integral(self, a: Tensor) -> Tensor:
        y = self.f(a)
        return y * (a - 0.5 * y)

    def _dual(self, y: Tensor) -> Tensor:
        return 0.5 * y.square()

    def _inverse(self, y: Tensor) -> Tensor:
        return y


@dataclass(frozen=True)
class ReLU6(Hardtanh):
    name = "relu6"
    min_val: float = field(default=0.0, init=False, repr=False)
    max_val: float = field(default=6.0, init=False, repr=False)


class Sigmoid(Transfer):
    name = "sigmoid"
    domain = (0.0, 1.0)

    def f(self, a: Tensor) -> Tensor:
        return a.sigmoid()

    def derivative(self, a: Tensor) -> Tensor:
        # Not y(1 − y), which is zero long before the true value is.
        return a.sigmoid() * (-a).sigmoid()

    def integral(self, a: Tensor) -> Tensor:
        return _softplus(a)

    def _dual(self, y: Tensor) -> Tensor:
        return -_entropy(y) - _entropy(1 - y)

    def _inverse(self, y: Tensor) -> Tensor:
        return y.logit()


class Tanh(Transfer):
    name = "tanh"
    domain = (-1.0, 1.0)

    def f(self, a: Tensor) -> Tensor:
        return a.tanh()

    def derivative(self, a: Tensor) -> Tensor:
        return 4 * (2 * a).sigmoid() * (-2 * a).sigmoid()

    def integral(self, a: Tensor) -> Tensor:
        # log cosh a: one form keeps the digits of a small value, the other does not overflow.
        near = torch.log1p(2 * (0.5 * a.clamp(-1, 1)).sinh().square())
        far = a.abs() + _softplus(-2 * a.abs()) - math.log(2)
        return torch.where(a.abs() < 1, near, far)

    def _dual(self, y: Tensor) -> Tensor:
        return 0.5 * (_xlogx_1p(y) + _xlogx_1p(-y))

    def _inverse(self, y: Tensor) -> Tensor:
        return y.atanh()


class Arctan(Transfer):
    name = "arctan"
    domain = (-math.pi / 2, math.pi / 2)

    def f(self, a: Tensor) -> Tensor:
        return a.atan()

    def derivative(self, a: Tensor) -> Tensor:
        return 1 / (1 + a.square())

    def integral(self, a: Tensor) -> Tensor:
        return a * a.atan() - 0.5 * torch.log1p(a.square())

    def _dual(self, y: Tensor) -> Tensor:
        return 0.5 * torch.log1p(self._inverse(y).square())

    def _inverse(self, y: Tensor) -> Tensor:
        # π/2 rounds to either side of the pole, so the ends are set by hand.
        lower, upper = self.domain
        return y.tan().masked_fill(y <= lower, -_INF).masked_fill(y >= upper, _INF)


class Softsign(Transfer):
    """``a / (1 + |a|)``."""

    name = "softsign"
    domain = (-1.0, 1.0)

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
    """``log(1 + exp(beta · a)) / beta``, exactly: torch's turns linear above a threshold."""

    name = "softplus"
    domain = (0.0, _INF)
    beta: float = 1.0

    def __post_init__(self) -> None:
        _check("beta", self.beta, strict=True)

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
    """``log(sigmoid(a))``: softplus, mirrored in both axes."""

    name = "logsigmoid"
    domain = (-_INF, 0.0)

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


@dataclass(frozen=True)
class ELU(Transfer):
    """``scale · a`` above zero, ``scale · alpha · (exp(input_scale · a) − 1)`` below."""

    name = "elu"
    alpha: float = 1.0
    scale: float = 1.0
    input_scale: float = 1.0

    def __post_init__(self) -> None:
        _check("alpha", self.alpha)
        _check("scale", self.scale, strict=True)
        _check("input_scale", self.input_scale, strict=True)

    @property
    def strictly_increasing(self) -> bool:
        return self.alpha > 0

    @property
    def domain(self) -> tuple[float, float]:
        return -self._depth, _INF

    @property
    def _depth(self) -> float:
        """How far f reaches below zero; one product, so that f saturates at the domain's end."""
        return self.scale * self.alpha

    def f(self, a: Tensor) -> Tensor:
        return self.scale * a.relu() + self._depth * torch.expm1(self.input_scale * a.clamp(max=0))

    def derivative(self, a: Tensor) -> Tensor:
        below = self._depth * self.input_scale * torch.exp(self.input_scale * a.clamp(max=0))
        return torch.where(a > 0, self.scale, below)

    def integral(self, a: Tensor) -> Tensor:
        low = a.clamp(max=0)
        below = torch.expm1(self.input_scale * low) / self.input_scale - low
        return 0.5 * self.scale * a.relu().square() + self._depth * below

    def _dual(self, y: Tensor) -> Tensor:
        fraction = self._fraction(y)
        below = (_xlogx_1p(fraction) - fraction) / self.input_scale
        return 0.5 * y.relu().square() / self.scale + self._depth * below

    def _inverse(self, y: Tensor) -> Tensor:
        return y.relu() / self.scale + torch.log1p(self._fraction(y)) / self.input_scale

    def _fraction(self, y: Tensor) -> Tensor:
        """The negative part of ``y`` over the depth, in ``[−1, 0]`` whatever the rounding."""
        return (y.clamp(max=0) / (self._depth or 1.0)).clamp(min=-1)


@dataclass(frozen=True)
class SELU(ELU):
    name = "selu"
    alpha: float = field(default=1.6732632423543772, init=False, repr=False)
    scale: float = field(default=1.0507009873554805, init=False, repr=False)
    input_scale: float = field(default=1.0, init=False, repr=False)


@dataclass(frozen=True)
class CELU(ELU):
    """``alpha · (exp(a / alpha) − 1)`` below zero."""

    name = "celu"
    alpha: float = 1.0
    scale: float = field(default=1.0, init=False, repr=False)
    input_scale: float = field(default=1.0, init=False, repr=False)

    def __post_init__(self) -> None:
        _check("alpha", self.alpha, strict=True)
        object.__setattr__(self, "input_scale", 1 / self.alpha)


class Softmax(Transfer):
    """Softmax over the last dimension, whose domain is the unit simplex."""

    name = "softmax"
    elementwise = False
    domain = (0.0, 1.0)

    def f(self, a: Tensor) -> Tensor:
        return a.softmax(-1)

    def derivative(self, a: Tensor) -> Tensor:
        y = self.f(a)
        return torch.diag_embed(y) - y.unsqueeze(-1) * y.unsqueeze(-2)

    def integral(self, a: Tensor) -> Tensor:
        return a.logsumexp(-1)

    def dual(self, y: Tensor) -> Tensor:
        """``Σ y log y`` on the simplex, to within rounding (the paper's is less by ``Σ y = 1``)."""
        tolerance = max(1e-6, math.sqrt(torch.finfo(y.dtype).eps))
        outside = ((y.sum(-1) - 1).abs() > tolerance) | (y < -tolerance).any(-1)
        return -_entropy(y.clamp(min=0)).sum(-1).masked_fill(outside, -_INF)

    def inverse(self, y: Tensor) -> Tensor:
        """``log y`` less its mean over the positive entries; minus infinity at the others."""
        positive = y > 0
        log_y = y.where(positive, 1).log()
        mean = log_y.sum(-1, keepdim=True) / positive.sum(-1, keepdim=True)
        return (log_y - mean).masked_fill(~positive, -_INF)

    def vjp(self, a: Tensor, v: Tensor) -> Tensor:
        y = self.f(a)
        return y * (v - (y * v).sum(-1, keepdim=True))

    def pull_back(self, a: Tensor, g: Tensor) -> Tensor:
        """``g / y``: right if ``g`` sums to zero, as every gradient through a softmax does."""
        return _divide(g, self.f(a))


NON_MONOTONE = frozenset({"gelu", "silu", "swish", "mish", "hardswish"})


def get(transfer: str | Transfer) -> Transfer:
    """The transfer of that name with torch's default parameters, or the one given."""
    if isinstance(transfer, Transfer):
        return transfer
    name = str(transfer).lower().replace("-", "_")
    if name in NON_MONOTONE:
        raise ValueError(
            f"Invalid transfer={transfer!r}. It is not non-decreasing, so it has no matching loss."
        )
    if name not in TRANSFERS:
        raise ValueError(
            f"Invalid transfer={transfer!r}. Must be a Transfer or one of {', '.join(NAMES)}."
        )
    return TRANSFERS[name]


def bregman(transfer: str | Transfer, a_hat: Tensor, a: Tensor) -> Tensor:
    """``D_F(â, a) = F(â) − F(a) − ⟨f(a), â − a⟩`` (Eq. 5), a value for each independent problem."""
    transfer = get(transfer)
    linear = _pair(transfer, transfer.f(a), a_hat - a)
    return _non_negative(transfer.integral(a_hat) - transfer.integral(a) - linear)


def matching_loss(transfer: str | Transfer, y: Tensor, a_hat: Tensor) -> Tensor:
    """``F(â) + F*(y) − ⟨y, â⟩``: ``D_F(â, f⁻¹(y))`` (Eq. 1), even where the inverse is infinite.

    Its gradient in ``â`` is ``f(â) − y`` (Eq. 2). It is infinite where ``y`` is outside the domain,
    and the cross-entropy for softmax and a one-hot ``y``.
    """
    transfer = get(transfer)
    linear = _pair(transfer, y, a_hat)
    return _non_negative(transfer.integral(a_hat) + transfer.dual(y) - linear)


def _pair(transfer: Transfer, y: Tensor, a: Tensor) -> Tensor:
    """``⟨y, a⟩`` over one independent problem."""
    return y * a if transfer.elementwise else (y * a).sum(-1)


def _non_negative(divergence: Tensor) -> Tensor:
    """Rounding noise below zero becomes zero, but keeps its gradient, unlike under clamp."""
    return divergence + (-divergence).detach().relu()


def _softplus(a: Tensor) -> Tensor:
    """``log(1 + exp(a))``. Unlike logaddexp, finite in its second derivative everywhere."""
    return -functional.logsigmoid(-a)


def _magnitude(a: Tensor) -> Tensor:
    """``|a|`` with derivative one at zero, so that even functions keep their curvature there."""
    return torch.where(a < 0, -a, a)


def _entropy(y: Tensor) -> Tensor:
    """``−y log y``, zero at zero, where its derivative is infinite rather than undefined."""
    entropy: Tensor = torch.special.entr(y)
    return entropy


def _xlogx_1p(t: Tensor) -> Tensor:
    """``(1 + t) log(1 + t)`` for ``t ≥ −1``, zero at the end; precise for small ``t``."""
    return (1 + t) * t.clamp(min=-1 + torch.finfo(t.dtype).eps / 2).log1p()


def _divide(g: Tensor, slope: Tensor) -> Tensor:
    """``g / slope`` for ``slope ≥ 0``, kept finite; zero where the slope is zero."""
    limits = torch.finfo(slope.dtype)
    quotient = (g / slope.clamp(min=limits.tiny)).clamp(limits.min, limits.max)
    return quotient.masked_fill(slope == 0, 0)


def _check(name: str, value: float, *, strict: bool = False) -> None:
    if not math.isfinite(value):
        raise ValueError(f"Invalid {name}={value}. Must be finite.")
    if value < 0 or (strict and value == 0):
        raise ValueError(f"Invalid {name}={value}. Must be {'> 0' if strict else '>= 0'}.")


TRANSFERS: dict[str, Transfer] = {
    kind.name: kind()
    for kind in (
        *(Step, Linear, ReLU, LeakyReLU, Sigmoid, Softmax, Tanh, Arctan, Softplus, ELU),
        *(Hardtanh, ReLU6, SELU, CELU, Softsign, LogSigmoid, SquaredReLU),
    )
}
NAMES = tuple(TRANSFERS)
