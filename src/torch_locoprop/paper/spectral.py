"""The spectral step: the closed form of LocoProp-S, under a bound on the spectral norm of the step.

For a layer with gradient ``G`` of ``[W b]`` and ``C = [X 1]ᵀ[X 1]``, the squared local loss with a
proximal term has the solution (Eq. 4)

    Δ* ∝ −G (C/c + λI)⁻¹ ,        c the mean diagonal of C .

Among all displacements whose spectral norm is at most ρ, the one with the largest inner product with
``Δ*`` is ρ times its polar factor ``U Vᵀ``, where ``Δ* = U Σ Vᵀ``. This module has the pure functions
of that step; the averages that they take are kept by ``solvers/spectral.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from torch_locoprop.paper.tensors import Inverse, Number

# The quintic a·s + b·s³ + c·s⁵ raises small singular values fast and keeps large ones near one.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5

_SMALLEST_BF16 = 128  # rows or columns from which bfloat16 is faster on a CPU


def polar(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an approximate polar factor ``U Vᵀ`` of ``M = U Σ Vᵀ`` by Newton–Schulz iterations.

    Five quintic iterations bring all singular values above about 1/1000 of the Frobenius norm to
    between 0.7 and 1.2. Matrices of zeros give zeros.

    Args:
        matrix: M, ``[..., d, n]``.
        dtype: dtype of the matrix products; None is that of ``matrix``.

    Returns:
        The polar factor, ``[..., d, n]``, in the dtype of ``matrix``.
    """
    a, b, c = QUINTIC
    wide = matrix.shape[-2] <= matrix.shape[-1]
    found = unit_length(matrix).to(matrix.dtype if dtype is None else dtype)
    found = found if wide else found.mT
    for _ in range(ITERATIONS):
        square = found @ found.mT
        polynomial = _plus_product(b, square, c, square, square)
        found = _plus_product(a, found, 1.0, polynomial, found)
    return (found if wide else found.mT).to(matrix.dtype)


def polar_operations(d: int, n: int) -> int:
    """Return how many multiplications and additions :func:`polar` of a matrix ``[d, n]`` takes."""
    short, long = sorted((d, n))
    return ITERATIONS * (4 * short**2 * long + 2 * short**3)


def has_fast_bf16(matrix: Tensor) -> bool:
    """Return True if products of such matrices ``[..., d, n]`` are faster in bfloat16.

    On a CPU they are for matrices in float32 that are not small, if the processor has instructions for
    bfloat16. Where it has tiles (AMX) too, such products end programs on some virtual machines with an
    illegal instruction, so they are left out.
    """
    if matrix.is_cuda:
        return True
    large = matrix.dtype == torch.float32 and min(matrix.shape[-2:]) >= _SMALLEST_BF16
    return large and matrix.device.type == "cpu" and _cpu_has_bf16()


@cache
def _cpu_has_bf16() -> bool:
    bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    return bool(bf16()) and not tiles()


def unit_length(matrix: Tensor) -> Tensor:
    """Return matrices ``[..., d, n]`` divided by their Frobenius norms; those of zeros stay zeros."""
    # The largest entry comes first, so that no square overflows or underflows.
    # Two passes that read are faster than one that writes absolute values, and than torch's norm.
    most, least = (end((-2, -1), keepdim=True) for end in (matrix.amax, matrix.amin))
    scaled = matrix / _at_least_tiny(torch.maximum(most, -least))
    return scaled.div_(_at_least_tiny(length(scaled)))


def length(matrix: Tensor) -> Tensor:
    """Return the Frobenius norms of matrices: ``[..., d, n] -> [..., 1, 1]``."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return norm


def equal_rows(
    lengths: Tensor, mean_square: Tensor, norm: Callable[[Tensor], Tensor] = length
) -> Tensor:
    """Return the factors that divide each row by the root of its mean square over time.

    The factors keep the Frobenius norm of the whole matrix.

    Args:
        lengths: the norms of the rows of a matrix, ``[..., d, 1]``.
        mean_square: a running average of the mean squares of the rows, ``[..., d, 1]``.
        norm: returns Frobenius norms; those of the whole if the matrix has some of its rows.

    Returns:
        A factor for each row, ``[..., d, 1]``; finite for rows of zeros too.
    """
    root = _at_least_tiny(mean_square.sqrt())
    return norm(lengths) / _at_least_tiny(norm(lengths / root)) / root


def longer(decay: Number, momentum: Number) -> Number:
    """Return the larger of two decays.

    An average of squares that forgets sooner than an average gradient makes steps of any length once
    gradients vanish. With decays ρ ≥ μ, from zero and in the same steps, the average gradient relative
    to the root of the average square is at most ``(1 − μ) / sqrt((1 − ρ) (1 − μ²/ρ))``.
    """
    if isinstance(decay, Tensor):
        return decay.clamp_min(momentum)
    return momentum.clamp_min(decay) if isinstance(momentum, Tensor) else max(decay, momentum)


def mean_size(past: Tensor | None, new: Tensor, decay: Number) -> Tensor:
    """Return the root of the running average of squares; the past before the first step is zero.

    The root is kept, not the square, which half precision could not hold.
    """
    size: Tensor = (1 - decay) ** 0.5 * new.abs()
    return size if past is None else torch.hypot(decay**0.5 * past, size)


def above_rounding(gradient: Tensor) -> Tensor:
    """Return the size of each output's bias gradient, at least 1e-5 of that of its weight gradients.

    Some biases, such as those of the keys of attention, have gradients of rounding errors alone. They
    stay nearly where they are, as with Adam's ε, which has a unit.

    Args:
        gradient: the gradient of ``[W b]``, ``[..., d, n]``.

    Returns:
        The sizes, ``[..., d, 1]``.
    """
    of_rows = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True) / gradient.shape[-1] ** 0.5
    return torch.hypot(gradient[..., -1:], 1e-5 * of_rows)


def relative(average: Tensor, size: Tensor) -> Tensor:
    """Return an average divided by the size of what was averaged; 0 where both are 0."""
    return average / _at_least_tiny(size)


def agreement(signal: Tensor, known: Tensor, least: float) -> Tensor:
    """Return how far gradients agree, from the share of the signal in their squares.

    Let a gradient be a signal that stays and noise that is independent of that in other steps. In the
    mean, its inner product with an average of earlier gradients is ``‖signal‖²``, and its square is
    ``‖signal‖² + ‖noise‖²``. The share is the quotient of the two means. Before the first step it is
    taken to be 1, which counts the less, the more gradients are known.

    Args:
        signal: the share of the signal, ``[..., 1, 1]``; below zero where steps are too long.
        known: the weight of that share, ``[..., 1, 1]``; the remainder up to 1 is that of the start.
        least: the smallest agreement.

    Returns:
        The root of the share, at least ``least`` and at most 1, ``[..., 1, 1]``.
    """
    return (1 - known * (1 - signal)).clamp(least**2, 1.0).sqrt()


def growth(
    past: Tensor,
    left: Tensor,
    before: Tensor,
    known: Tensor,
    rate: float,
    least: float,
    most: float,
) -> Tensor:
    """Return how many times their usual length steps may have, from what the last step has left.

    ``left`` and ``before`` are the inner products of the last displacement with the gradient after it
    and with the average gradient before it. Both are negative along a descent. Their quotient is 1
    where the gradient along the step has not changed, so that a longer step would have been better,
    and 0 or less where the step has reached the minimum along its direction or passed it. Noise that
    is independent of that in other steps is in ``before`` alone, and makes the quotient small.

    Args:
        past: the growth of the last step, ``[..., 1, 1]``; 0 before there was one.
        left: the inner product with the new gradient, ``[..., 1, 1]``.
        before: the inner product with the average of the gradients until the last step,
            ``[..., 1, 1]``.
        known: the weight of what gradients tell, from 0 to 1, which makes the first steps cautious.
        rate: how fast the logarithm of the growth follows the quotient.
        least: the quotient at which the growth stays as it is.
        most: the largest growth.

    Returns:
        The growth, between 1 and ``most``, ``[..., 1, 1]``.
    """
    share = (-left / _at_least_tiny(before.abs())).clamp(-1.0, 1.0) - least
    share = torch.where(share > 0, known * share, share)
    return (past * (rate * share).exp()).clamp(1.0, most)


def damped_inverse(
    gram: Tensor,
    damping: Number,
    otherwise: Tensor | None,
    inverse_of: Inverse = torch.cholesky_inverse,
) -> Tensor:
    """Return ``(C + λI)⁻¹``; the host does not wait for the device.

    Args:
        gram: C, symmetric and positive semidefinite, ``[..., n, n]``.
        damping: λ, a number or ``[..., 1, 1]``.
        otherwise: returned for matrices that have no Cholesky factor by rounding; None is I.
        inverse_of: computes the inverse from the Cholesky factor.
    """
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(gram + damping * eye)
    failed = (info != 0)[..., None, None]
    return torch.where(failed, eye if otherwise is None else otherwise, inverse_of(factor))


def _plus_product(beta: float, start: Tensor, alpha: float, left: Tensor, right: Tensor) -> Tensor:
    """Return ``beta · start + alpha · left @ right``."""
    if start.dim() == 2:
        return torch.addmm(start, left, right, beta=beta, alpha=alpha)
    if start.dim() == 3:
        return torch.baddbmm(start, left, right, beta=beta, alpha=alpha)
    return beta * start + alpha * (left @ right)


def _at_least_tiny(tensor: Tensor) -> Tensor:
    return tensor.clamp_min(torch.finfo(tensor.dtype).tiny)
