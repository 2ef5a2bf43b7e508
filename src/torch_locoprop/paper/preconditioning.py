"""The preconditioner of convex local losses, ``diag(h) ⊗ (C + λI)``, and a check that a loss falls.

Let ``D(W̃) = Σ_rows w D(a(W̃))`` be a convex local loss with residual ``δ = ∂D/∂a``, and let
``C = [X 1]ᵀ W [X 1]`` with the row weights W. The Hessian of D in the weights of output j is

    ∇²D_j = Σ_rows w f'(a_j) x xᵀ ,

which is about ``h_j C`` with ``h_j`` the mean of f' over the rows, and at most ``sup f' · C``. One
factorization of ``C + λI`` therefore serves all outputs. For softmax, whose Hessian in ``a`` is
``diag(y) − y yᵀ``, ½ takes the place of ``sup f'``: no eigenvalue of that matrix is larger. Outputs
of softmax have no mean slope of their own, so all use half of the bound where others use the mean.

**Majorization.** With ``P = h (C + λI)``, h ≥ sup f', every Hessian of D is at most P. The step
``p = −η P⁻¹ ∇D(W̃)`` with ``0 ≤ η ≤ 1`` then never raises the loss:

    D(W̃ + p) ≤ D(W̃) + ⟨∇D, p⟩ + ½⟨p, P p⟩ = D(W̃) − (η − η²/2) ⟨∇D, P⁻¹∇D⟩ ≤ D(W̃) .

The step does not even pass the minimum along p: with the mean Hessian ``H ≤ P`` between the two points,

    ⟨∇D(W̃ + p), p⟩ = ⟨∇D(W̃) + H p, p⟩ = −⟨P p, p⟩/η + ⟨H p, p⟩ ≤ 0 .

**Check.** With the mean of f', which is smaller and makes longer steps, that inequality may fail, and
so it may with momentum. As D is convex, a step d with ``⟨∇D(W̃ + t d), d⟩ ≤ 0`` has not raised the
loss anywhere up to t. Pre-activations change linearly with t, so this slope is a sum of elementwise
work over the rows, and other t can be tried without a product with the inputs. The check needs no
value of F, whose differences would be lost in rounding.

**Learning rate.** Where iterations have lowered the loss from ``D(W)`` to ``D(W + Δ)``, convexity gives
``D(W + ηΔ) ≤ (1 − η) D(W) + η D(W + Δ) ≤ D(W)`` for 0 ≤ η ≤ 1: any part of the way lowers it too.

**Without a check.** A displacement may also be averaged over batches and divided, output by output, by
its size r, the root of a running average of the mean squares

    r_j² ← ρ r_j² + (1 − ρ) 1/n Σ_i Δ_ji² .

Entries of an output then move by about the learning rate, however long Δ was, and constant factors of
h, of C or of the loss cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_locoprop.paper.spectral import damped_inverse
from torch_locoprop.paper.tensors import Inverse, Number, Product

Slope = Callable[[Tensor], tuple[Tensor, Tensor]]

# The secant rule finds the minimum of a quadratic itself, where rounding would decide whether the loss
# still falls. So the fractions to try stay short of it.
_SHORT = 0.95
_LONGER = (1.0, 2.0)  # how many times longer the next step to try may be
_WITHIN = (0.1, 0.9)  # where in the interval between two fractions the next one may be


def preconditioned(
    gradient: Tensor, inverse: Tensor, h: Tensor | float, product: Product = torch.matmul
) -> Tensor:
    """Return ``diag(h)⁻¹ G (C + λI)⁻¹``.

    Args:
        gradient: G, the gradient of ``[W b]``, ``[..., d, n]``.
        inverse: ``(C + λI)⁻¹``, ``[..., n, n]``.
        h: the slope of each output, ``[..., d]``, or one for all.
        product: computes the product with the inverse.
    """
    found = product(gradient, inverse)
    return found / (h.unsqueeze(-1) if isinstance(h, Tensor) else h)


def regularized_inverse(
    gram: Tensor, damping: float, inverse_of: Inverse = torch.cholesky_inverse
) -> Tensor:
    """Return ``(C + λI)⁻¹`` with λ = ``damping`` times the mean diagonal of C.

    The host does not wait for the device. Where rounding makes the factorization fail, the inverse of
    ``tr(C) I``, which is at least C, is returned. For C = 0, the result is zero.

    Args:
        gram: C, symmetric and positive semidefinite, ``[..., n, n]``.
        damping: the damping relative to the mean diagonal, > 0.
        inverse_of: computes the inverse from the Cholesky factor.
    """
    n = gram.shape[-1]
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    eye = torch.eye(n, dtype=gram.dtype, device=gram.device)
    scale = torch.where(trace > 0, n / trace, torch.zeros_like(trace)) + 0 * trace  # NaN stays NaN
    return damped_inverse(gram * scale, damping, eye / n, inverse_of) * scale


def mean_slopes(mean: Tensor, most: float, floor: float) -> Tensor:
    """Return the slopes h of the outputs: their means over the rows, and at least a part of ``most``.

    Args:
        mean: mean of f' over the rows, ``[..., d]``.
        most: ``sup f'``; infinite if there is no bound.
        floor: the smallest h relative to ``sup f'``, or to 1 without a bound: an output whose rows are
            all in a flat part of f would get an arbitrarily long step otherwise.
    """
    return mean.clamp_min(floor * (most if most < torch.inf else 1.0))


class Size(NamedTuple):
    """The size of each output's displacements over time."""

    size: Tensor  # r, [..., d, 1]; 0 for outputs that have never moved
    factor: Tensor  # 1/r, or 0 for outputs whose displacement in this step is zero, [..., d, 1]


def average_size(past: Tensor | None, moved: Tensor, decay: Number) -> Size:
    """Return the root of the running average of the mean squares of each output's displacements.

    The average begins at the first mean square that is not zero. The factor divides by it.

    Args:
        past: r before this step, ``[..., d, 1]``; None at first.
        moved: the displacement Δ of ``[W b]`` in this step, ``[..., d, n]``.
        decay: ρ.
    """
    # The largest entry comes first, so that no square overflows or underflows.
    largest = moved.abs().amax(-1, keepdim=True)
    tiny = torch.finfo(moved.dtype).tiny
    scaled = torch.linalg.vector_norm(moved / largest.clamp_min(tiny), dim=-1, keepdim=True)
    own = scaled * largest / moved.shape[-1] ** 0.5
    before = own if past is None else torch.where(past > 0, past, own)
    size = torch.hypot(decay**0.5 * before, (1 - decay) ** 0.5 * own)
    return Size(size, (own > 0).to(size) / size.clamp_min(tiny))


class Fraction(NamedTuple):
    """The part of a step that was found to lower the loss."""

    t: Tensor  # the fraction for each problem; 0 if the loss fell at none that was tried
    residual: Tensor  # the residuals there
    untried: Tensor  # the fraction that would have been tried next


def descending_fraction(slope: Slope, at_zero: tuple[Tensor, Tensor], checks: int) -> Fraction:
    """Return the longest fraction t of a step, among a few, up to which a convex loss falls.

    The slope of a convex function grows with t. As long as it is not above zero, the loss has fallen.
    The full step t = 1 is tried first, then what the secant of the slopes suggests: a longer step, at
    most twice as long, while the slope is below zero, and a shorter one otherwise. Every problem
    has a fraction of its own, and all go through the same sequence of operations.

    Args:
        slope: takes a fraction for each problem, ``[..., d]``, and returns the slopes of their losses
            there, and the residuals ``[..., rows, d]`` that these were computed from.
        at_zero: slopes and residuals at t = 0.
        checks: how many fractions are tried.
    """
    zero_slope, residual = at_zero
    low, low_slope = torch.zeros_like(zero_slope), zero_slope
    high, high_slope = torch.full_like(low, torch.inf), torch.zeros_like(low)
    t = torch.ones_like(low)
    for _ in range(checks):
        found, there = slope(t)
        falls = found <= 0
        low, low_slope = torch.where(falls, t, low), torch.where(falls, found, low_slope)
        high, high_slope = torch.where(falls, high, t), torch.where(falls, high_slope, found)
        residual = torch.where(falls.unsqueeze(-2), there, residual)
        passed = high < torch.inf
        inside = (high - low) * _ratio(low_slope, low_slope - high_slope, *_WITHIN)
        beyond = low * (_ratio(zero_slope, zero_slope - low_slope, *_LONGER) - 1)
        t = low + _SHORT * torch.where(passed, inside, beyond)
    return Fraction(low, residual, t)


def _ratio(a: Tensor, b: Tensor, least: float, most: float) -> Tensor:
    """Return ``a / b`` of negative numbers, within limits; the upper limit where b is not negative."""
    return torch.where(b < 0, a / b, most).clamp(least, most)
