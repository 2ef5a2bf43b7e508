"""The Fisher matrix of a layer's pre-activations, estimated from sampled labels (Eqs. 12–15)."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from torch_locoprop.transfers import Transfer

PREDICTIVE = ("sigmoid", "softmax", "linear")  # transfers that tell a predictive distribution


def sampled_output_gradient(transfer: Transfer, a: Tensor, generator: Generator) -> Tensor:
    """``∂L(y, f(a))/∂a = f(a) − y`` with y drawn from the model's predictive distribution.

    ``a``: outputs ``[..., features]``. Sigmoid predicts Bernoulli variables, softmax a categorical
    one over the last dimension, linear a Gaussian of unit variance.
    """
    y_hat = transfer.f(a)
    if transfer.name == "sigmoid":
        return y_hat - torch.bernoulli(y_hat, generator=generator)
    if transfer.name == "softmax":
        flat = y_hat.reshape(-1, y_hat.shape[-1])
        label = torch.multinomial(flat, 1, generator=generator)
        return y_hat - torch.zeros_like(flat).scatter_(1, label, 1.0).view_as(y_hat)
    if transfer.name == "linear":
        return torch.randn(a.shape, dtype=a.dtype, device=a.device, generator=generator)
    raise ValueError(
        f"No predictive distribution is known for the output transfer {transfer.name!r}. "
        f"Known: {', '.join(PREDICTIVE)}."
    )


def second_moment(rows: Tensor) -> Tensor:
    """``E[r rᵀ]`` over the rows: ``[..., rows, d] -> [..., d, d]``."""
    return rows.mT @ rows / rows.shape[-2]


def running_average(old: Tensor | None, new: Tensor, decay: float) -> Tensor:
    """``decay · old + (1 − decay) · new``, started at the first value."""
    return new if old is None else decay * old + (1 - decay) * new


def damped_solve(matrix: Tensor, right: Tensor, damping: float) -> Tensor:
    """``(M + damping · mean(diag M) · I)⁻¹ R`` for symmetric M ``[..., d, d]``.

    ``right`` is a matrix ``[..., d, n]`` or, with one dimension less than M, a vector ``[..., d]``.
    """
    factor = cholesky(damped(matrix, damping))
    if right.dim() < matrix.dim():
        return torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)
    return torch.cholesky_solve(right, factor)


def damped(matrix: Tensor, damping: float) -> Tensor:
    """``M + damping · mean(diag M) · I``."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return matrix + damping * diagonal.mean(-1)[..., None, None] * eye


def cholesky(matrix: Tensor) -> Tensor:
    """The lower Cholesky factor in the working dtype, through float64 where that fails.

    A matrix that is not positive definite in float64 either (or not finite) gives NaN, which the
    caller's check for non-finite solutions turns into a skipped update.
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(matrix)
    if bool((info != 0).any()) or not bool(factor.isfinite().all()):
        precise, info = torch.linalg.cholesky_ex(matrix.double())
        factor = torch.where((info != 0)[..., None, None], torch.nan, precise).to(matrix.dtype)
    return factor
