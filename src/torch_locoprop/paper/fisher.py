"""The Fisher matrix estimated from sampled labels (Eq. 12), and damped solves with such matrices.

The Fisher matrix of a layer's weights factors into ``D = E[g gᵀ]`` of the pre-activations and
``A = E[x xᵀ]`` of the inputs. This module samples the gradients ``g`` at the model's output and forms,
averages, damps and inverts the factors. The backward pass that carries sampled gradients to the other
layers is in ``recording/``, the natural-gradient target in ``targets.py``, the Fisher regularizer in
``regularizers.py``, and K-FAC (Eq. 14) in ``baselines/kfac.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from torch_locoprop.paper.gram import full_products, gram_dtype
from torch_locoprop.paper.tensors import at_least_float32, holds
from torch_locoprop.paper.transfers import Transfer

# Output transfers that define a predictive distribution: Bernoulli, categorical, Gaussian.
PREDICTIVE = ("sigmoid", "softmax", "linear")
LARGEST = 512  # rows of stacked triangular matrices up to which PyTorch solves without MAGMA


def sampled_output_gradient(transfer: Transfer, a: Tensor, generator: Generator) -> Tensor:
    """Return ``∂L/∂a = f(a) − y`` for labels y drawn from the model's prediction p(y|x) (Eq. 12).

    L is the negative log-likelihood. The distribution follows from the transfer: independent Bernoulli
    variables for sigmoid, one categorical variable over the last dimension for softmax, and Gaussians
    of unit variance for linear.

    Args:
        transfer: the output transfer f.
        a: the model's outputs before the transfer, ``[..., d]``.
        generator: the source of random numbers, on the device of ``a``.

    Returns:
        The sampled gradient, ``[..., d]``, in the dtype of ``a``.

    Raises:
        ValueError: if the transfer has no predictive distribution.
    """
    # Random numbers of half precision are too coarse to compare with small probabilities.
    y_hat = transfer.f(at_least_float32(a))
    like: dict[str, Any] = {"dtype": y_hat.dtype, "device": a.device, "generator": generator}
    # torch.bernoulli and multinomial raise on NaN. Comparisons do not: a model that has diverged is
    # reported by its loss and not by an error here.
    if transfer.name == "sigmoid":
        gradient = y_hat - (torch.rand(a.shape, **like) < y_hat).to(y_hat.dtype)
    elif transfer.name == "softmax":
        below = y_hat.cumsum(-1) <= torch.rand((*a.shape[:-1], 1), **like)
        label = below.sum(-1, keepdim=True).clamp_max(a.shape[-1] - 1)
        gradient = y_hat - torch.zeros_like(y_hat).scatter_(-1, label, 1.0)
    elif transfer.name == "linear":
        gradient = torch.randn(a.shape, **like)
    else:
        raise ValueError(
            f"No predictive distribution is known for the output transfer {transfer.name!r}. "
            f"Known: {', '.join(PREDICTIVE)}."
        )
    return gradient.to(a.dtype)


def second_moment(rows: Tensor) -> Tensor:
    """Return ``E[r rᵀ]``, the mean over the rows r of the outer products (Eq. 12).

    Shapes: ``[..., rows, d] -> [..., d, d]``.
    """
    wide = rows.to(gram_dtype(rows))
    return (wide.mT @ wide / rows.shape[-2]).to(rows.dtype)


def running_average(old: Tensor | None, new: Tensor, decay: float) -> Tensor:
    """Return ``decay · old + (1 − decay) · new``, or ``new`` if ``old`` is None."""
    return new if old is None else decay * old + (1 - decay) * new


def damped_solve(matrix: Tensor, right: Tensor, damping: float) -> Tensor:
    """Return ``(M + damping · mean(diag M) · I)⁻¹ R``.

    Args:
        matrix: symmetric positive semidefinite M, ``[..., d, d]``.
        right: R, ``[..., d, n]``.
        damping: the damping relative to M's mean diagonal.
    """
    return cholesky_solve(cholesky(damped(matrix, damping)), right)


def damped(matrix: Tensor, damping: float) -> Tensor:
    """Return ``M + damping · mean(diag M) · I``; for M = 0, a tiny multiple of I is added instead."""
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return matrix + relative_damping(mean, damping) * eye


def relative_damping(mean: Tensor, damping: float) -> Tensor:
    """Return ``damping`` times mean diagonals, of any shape, or a tiny number for means of zero."""
    return (damping * mean).clamp_min(torch.finfo(mean.dtype).tiny)


def is_well_posed(size: int, damping: float, dtype: torch.dtype) -> bool:
    """Return True if every damped matrix of this size has a Cholesky factor in this dtype.

    The condition number of a damped matrix is at most ``size / damping + 1``.
    """
    return size / damping * torch.finfo(dtype).eps < 1e-2


def cholesky(matrix: Tensor, *, well_posed: bool = False) -> Tensor:
    """Return the lower Cholesky factor, computed in float64 where the working dtype fails.

    A matrix that is not finite, or not positive definite in float64, gives NaN, and the optimizer skips
    an update that is not finite.

    Args:
        matrix: symmetric matrices, ``[..., d, d]``.
        well_posed: True if failure in the working dtype is excluded for finite matrices
            (:func:`is_well_posed`). The host then does not have to wait for the result.
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(at_least_float32(matrix))
    if well_posed:
        return torch.where((info != 0)[..., None, None], torch.nan, factor).to(matrix.dtype)
    found = (info == 0).all() & factor.isfinite().all()
    if not holds(found, unknown=True):  # one synchronization with a GPU
        precise, info = torch.linalg.cholesky_ex(matrix.double())
        factor = torch.where((info != 0)[..., None, None], torch.nan, precise)
    return factor.to(matrix.dtype)


def cholesky_solve(factor: Tensor, right: Tensor) -> Tensor:
    """Return ``(L Lᵀ)⁻¹ R`` for the lower factor L, ``[..., d, d]``, and R, ``[..., d, n]``."""
    lower, given = at_least_float32(factor), at_least_float32(right)
    if lower.dim() == 2:
        return torch.cholesky_solve(given, lower).to(right.dtype)
    with full_products(lower):
        inner = solve_lower(lower, given)
        return solve_lower(lower.flip(-2, -1).mT, inner.flip(-2)).flip(-2).to(right.dtype)


def solve_lower(lower: Tensor, right: Tensor) -> Tensor:
    """Return ``L⁻¹ R`` for stacked lower triangular L, by operations that a CUDA graph can record.

    On a GPU ``torch.cholesky_solve`` of stacked matrices uses MAGMA, which cannot be recorded, and so
    does ``solve_triangular`` of many large ones. So large ones are solved by their halves.

    Args:
        lower: L, ``[..., d, d]``.
        right: R, ``[..., d, n]``.
    """
    d = lower.shape[-1]
    if d <= LARGEST:
        found: Tensor = torch.linalg.solve_triangular(lower, right, upper=False)
        return found
    half = d // 2
    first = solve_lower(lower[..., :half, :half], right[..., :half, :])
    rest = right[..., half:, :] - lower[..., half:, :half] @ first
    return torch.cat([first, solve_lower(lower[..., half:, half:], rest)], dim=-2)


def cholesky_inverse(factor: Tensor) -> Tensor:
    """Return ``(L Lᵀ)⁻¹`` for the lower factor L, ``[..., d, d]``."""
    lower = at_least_float32(factor)
    if lower.dim() == 2:
        return torch.cholesky_inverse(lower).to(factor.dtype)
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return cholesky_solve(lower, eye.expand_as(lower)).to(factor.dtype)
