"""Transfers that are defined piece by piece: step, linear, ReLU, hard tanh and ELU with relatives.

Each class gives f, f', the convex integral F, its dual F* and f⁻¹. The transfers without kinks are in
``smooth_transfers.py``, and the table by name is in ``transfers.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from torch_locoprop.paper.transfer_base import Transfer, check_parameter, xlogx_1p


class Step(Transfer):
    """``f(a) = (1 + sign a)/2`` with ``F(a) = max(a, 0)`` (Table 2)."""

    name = "step"
    strictly_increasing = False
    domain = (0.0, 1.0)

    def f(self, a: Tensor) -> Tensor:
        return 0.5 * (1 + a.sign())

    def derivative(self, a: Tensor) -> Tensor:
        return torch.zeros_like(a)

    def integral(self, a: Tensor) -> Tensor:
        # Unlike relu, this form of max(a, 0) has the derivative f(0) = 1/2 at zero.
        return 0.5 * (a + a.abs())

    def _dual(self, y: Tensor) -> Tensor:
        return 0.0 * y

    def _inverse(self, y: Tensor) -> Tensor:
        # f is flat on both sides of zero: −1 and 1 represent y = 0 and y = 1.
        return y.floor() + y.ceil() - 1


class Linear(Transfer):
    """``f(a) = a`` with ``F(a) = a²/2`` (Table 2): its matching loss is the squared loss."""

    name = "linear"
    max_slope = 1.0

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
    """``f(a) = max(a, 0) − slope · max(−a, 0)`` with ``F(a) = a f(a)/2`` (Table 2).

    Args:
        slope: the slope below zero, >= 0 (the paper's β).
    """

    name = "leaky_relu"
    slope: float = 0.01

    def __post_init__(self) -> None:
        check_parameter("slope", self.slope)

    @property
    def strictly_increasing(self) -> bool:
        return self.slope > 0

    @property
    def domain(self) -> tuple[float, float]:
        return (-math.inf if self.slope > 0 else 0.0), math.inf

    @property
    def max_slope(self) -> float:
        return max(1.0, self.slope)

    def f(self, a: Tensor) -> Tensor:
        return functional.leaky_relu(a, self.slope)

    def derivative(self, a: Tensor) -> Tensor:
        return torch.where(a > 0, torch.ones_like(a), self.slope)

    def integral(self, a: Tensor) -> Tensor:
        return 0.5 * a * self.f(a)

    def _dual(self, y: Tensor) -> Tensor:
        return 0.5 * y * self._inverse(y)

    def _inverse(self, y: Tensor) -> Tensor:
        # With slope zero the domain has no negative y; dividing by 1 avoids 0/0 in the other branch.
        return torch.where(y < 0, y / (self.slope or 1.0), y)


@dataclass(frozen=True)
class ReLU(LeakyReLU):
    """``f(a) = max(a, 0)`` with ``F(a) = max(a, 0)²/2`` (Table 2): leaky ReLU with slope zero."""

    name = "relu"
    slope: float = field(default=0.0, init=False, repr=False)


class SquaredReLU(Transfer):
    """``f(a) = max(a, 0)²`` with ``F(a) = max(a, 0)³/3``."""

    name = "squared_relu"
    strictly_increasing = False
    domain = (0.0, math.inf)

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
    """``f(a)`` is ``a`` clamped to ``[min_val, max_val]``, with ``F(a) = f(a) (a − f(a)/2)``.

    Args:
        min_val: the smallest value of f.
        max_val: the largest value of f, >= ``min_val``.
    """

    name = "hardtanh"
    strictly_increasing = False
    max_slope = 1.0
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
    """``f(a) = min(max(a, 0), 6)``."""

    name = "relu6"
    min_val: float = field(default=0.0, init=False, repr=False)
    max_val: float = field(default=6.0, init=False, repr=False)


@dataclass(frozen=True)
class ELU(Transfer):
    """``f(a) = a`` for ``a ≥ 0`` and ``alpha (eᵃ − 1)`` below (Table 2), with two more scales.

    F is ``a²/2`` for ``a ≥ 0`` and ``alpha (eᵃ − a − 1)`` below. As in torch's own operator,
    ``f(a) = scale · a`` above zero and ``scale · alpha · (exp(input_scale · a) − 1)`` below.

    Args:
        alpha: the depth below zero, >= 0 (the paper's β).
        scale: factor of the output, > 0.
        input_scale: factor of the input below zero, > 0.
    """

    name = "elu"
    alpha: float = 1.0
    scale: float = 1.0
    input_scale: float = 1.0

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha)
        check_parameter("scale", self.scale, strict=True)
        check_parameter("input_scale", self.input_scale, strict=True)

    @property
    def strictly_increasing(self) -> bool:
        return self.alpha > 0

    @property
    def domain(self) -> tuple[float, float]:
        return -self._depth, math.inf

    @property
    def max_slope(self) -> float:
        return max(self.scale, self._depth * self.input_scale)

    @property
    def _depth(self) -> float:
        """``−inf f``: computed once, so that f saturates exactly at the end of the domain."""
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
        below = (xlogx_1p(fraction) - fraction) / self.input_scale
        return 0.5 * y.relu().square() / self.scale + self._depth * below

    def _inverse(self, y: Tensor) -> Tensor:
        return y.relu() / self.scale + torch.log1p(self._fraction(y)) / self.input_scale

    def _fraction(self, y: Tensor) -> Tensor:
        """Return ``min(y, 0)`` divided by the depth, clamped to ``[−1, 0]`` against rounding."""
        return (y.clamp(max=0) / (self._depth or 1.0)).clamp(min=-1)


@dataclass(frozen=True)
class SELU(ELU):
    """ELU with the fixed scales of ``torch.nn.SELU``."""

    name = "selu"
    alpha: float = field(default=1.6732632423543772, init=False, repr=False)
    scale: float = field(default=1.0507009873554805, init=False, repr=False)
    input_scale: float = field(default=1.0, init=False, repr=False)


@dataclass(frozen=True)
class CELU(ELU):
    """``f(a) = a`` for ``a ≥ 0`` and ``alpha (exp(a / alpha) − 1)`` below.

    Args:
        alpha: the depth below zero, > 0.
    """

    name = "celu"
    alpha: float = 1.0
    scale: float = field(default=1.0, init=False, repr=False)
    input_scale: float = field(default=1.0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_parameter("alpha", self.alpha, strict=True)
        object.__setattr__(self, "input_scale", 1 / self.alpha)
