"""The interface of a transfer function, :class:`Transfer`.

The transfers themselves are in ``piecewise_transfers.py`` and ``smooth_transfers.py``, and their
table by name is in ``transfers.py``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Transfer(ABC):
    """A non-decreasing transfer function ``y = f(a)`` with its integral F, dual F* and inverse.

    A transfer is an immutable value: it compares, hashes and prints by its parameters and holds no
    tensor. Its methods are pure functions of tensors of any float dtype, on any device. Shapes:

    - elementwise transfers: ``[...] -> [...]`` for every method;
    - softmax (``elementwise = False``): ``f``, ``inverse``, ``vjp`` and ``pull_back`` map
      ``[..., d] -> [..., d]``, ``integral`` and ``dual`` map ``[..., d] -> [...]``, and ``derivative``
      returns the Jacobian ``[..., d, d]``.

    To add an elementwise transfer, define ``name``, ``f``, ``derivative``, ``integral``, ``_dual`` and
    ``_inverse``, and ``domain``, ``strictly_increasing`` and ``max_slope`` where they differ from the
    defaults. Its parameters are fields of a frozen dataclass.
    """

    name: ClassVar[str]
    elementwise: ClassVar[bool] = True

    @property
    def strictly_increasing(self) -> bool:
        """True if ``D_F(â, a) = 0`` implies ``â = a`` (for softmax, up to a constant shift)."""
        return True

    @property
    def domain(self) -> tuple[float, float]:
        """The closure of the range of f. The dual and the inverse are finite in its interior."""
        return -math.inf, math.inf

    @property
    def max_slope(self) -> float:
        """An upper bound of ``f'``; for softmax, of the largest eigenvalue of its Jacobian.

        Infinite where f' has no bound, or none is known.
        """
        return math.inf

    @abstractmethod
    def f(self, a: Tensor) -> Tensor:
        """Return the post-activation ``y = f(a)``."""

    @abstractmethod
    def derivative(self, a: Tensor) -> Tensor:
        """Return ``f'(a)``, the Hessian of F. At a kink, return the one-sided value torch uses."""

    @abstractmethod
    def integral(self, a: Tensor) -> Tensor:
        """Return the convex integral ``F(a)`` with ``∇F = f``, up to a fixed constant."""

    def dual(self, y: Tensor) -> Tensor:
        """Return the Fenchel dual ``F*(y) = sup_z ⟨y, z⟩ − F(z)``.

        At the ends of the domain this is the limit of F*. Outside the domain it is infinite.
        """
        lower, upper = self.domain
        return self._dual(y.clamp(lower, upper)).masked_fill((y < lower) | (y > upper), math.inf)

    def inverse(self, y: Tensor) -> Tensor:
        """Return an ``a`` with ``f(a) = y``, which may be infinite at the ends of the domain.

        Where f is flat, this is one of many solutions. For ``y`` outside the domain, return the
        inverse of the nearest point of the domain.
        """
        return self._inverse(y.clamp(*self.domain))

    def vjp(self, a: Tensor, v: Tensor) -> Tensor:
        """Return ``J(a)ᵀ v``, where ``J`` is the Jacobian of f: ∂L/∂a from ``v = ∂L/∂y``.

        Args:
            a: pre-activations, ``[..., d]``.
            v: ∂L/∂y, of the same shape.
        """
        return self.derivative(a) * v

    def pull_back(self, a: Tensor, g: Tensor) -> Tensor:
        """Return a finite ``v`` with ``vjp(a, v) = g``, and zero where f is flat.

        This recovers ``∂L/∂y`` from ``g = ∂L/∂a`` when the transfer is part of the loss function.

        Args:
            a: pre-activations, ``[..., d]``.
            g: ∂L/∂a, of the same shape.
        """
        return divide(g, self.derivative(a))

    def _dual(self, y: Tensor) -> Tensor:
        """Return ``F*(y)`` for ``y`` within the domain."""
        raise NotImplementedError

    def _inverse(self, y: Tensor) -> Tensor:
        """Return ``f⁻¹(y)`` for ``y`` within the domain."""
        raise NotImplementedError


def divide(g: Tensor, slope: Tensor) -> Tensor:
    """Return ``g / slope`` for ``slope ≥ 0``, clamped to finite values; zero where slope is zero."""
    limits = torch.finfo(slope.dtype)
    quotient = (g / slope.clamp(min=limits.tiny)).clamp(limits.min, limits.max)
    return quotient.masked_fill(slope == 0, 0)


def xlogx_1p(t: Tensor) -> Tensor:
    """Return ``(1 + t) log(1 + t)`` for ``t ≥ −1``: zero at −1, and precise for small ``t``."""
    return (1 + t) * t.clamp(min=-1 + torch.finfo(t.dtype).eps / 2).log1p()


def check_parameter(name: str, value: float, *, strict: bool = False) -> None:
    """Raise ValueError unless a transfer's parameter is finite and >= 0 (``strict``: > 0)."""
    if not math.isfinite(value):
        raise ValueError(f"Invalid {name}={value}. Must be finite.")
    if value < 0 or (strict and value == 0):
        raise ValueError(f"Invalid {name}={value}. Must be {'> 0' if strict else '>= 0'}.")
