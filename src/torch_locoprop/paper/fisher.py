"""The Fisher matrix of a layer's pre-activations, estimated from sampled labels (Eqs. 12–15)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from torch_locoprop.paper.transfers import Transfer

PREDICTIVE = ("sigmoid", "softmax", "linear")  # transfers that tell a predictive distribution


def sampled_output_gradient(transfer: Transfer, a: Tensor, generator: Generator) -> Tensor:
    """``∂L(y, f(a))/∂a = f(a) − y`` with y drawn from the model's predictive distribution.

    ``a``: outputs ``[..., features]``. Sigmoid predicts Bernoulli variables, softmax a categorical
    one over the last dimension, linear a Gaussian of unit variance.
    """
    # In half precision, numbers between 0 and 1 are too coarse to compare probabilities with.
    y_hat = transfer.f(at_least_float32(a))
    like: dict[str, Any] = {"dtype": y_hat.dtype, "device": a.device, "generator": generator}
    # Plain comparisons rather than torch.bernoulli and multinomial, which refuse NaN: a diverged
    # model is reported by its loss, not by a crash in here.
    if transfer.name == "sigmoid":
        found = y_hat - (torch.rand(a.shape, **like) < y_hat).to(y_hat.dtype)
    elif transfer.name == "softmax":
        below = y_hat.cumsum(-1) <= torch.rand((*a.shape[:-1], 1), **like)
        label = below.sum(-1, keepdim=True).clamp_max(a.shape[-1] - 1)
        found = y_hat - torch.zeros_like(y_hat).scatter_(-1, label, 1.0)
    elif transfer.name == "linear":
        found = torch.randn(a.shape, **like)
    else:
        raise ValueError(
            f"No predictive distribution is known for the output transfer {transfer.name!r}. "
            f"Known: {', '.join(PREDICTIVE)}."
        )
    return found.to(a.dtype)


def second_moment(rows: Tensor) -> Tensor:
    """``E[r rᵀ]`` over the rows: ``[..., rows, d] -> [..., d, d]``."""
    return rows.mT @ rows / rows.shape[-2]


def running_average(old: Tensor | None, new: Tensor, decay: float) -> Tensor:
    """``decay · old + (1 − decay) · new``, started at the first value."""
    return new if old is None else decay * old + (1 - decay) * new


def damped_solve(matrix: Tensor, right: Tensor, damping: float) -> Tensor:
    """``(M + damping · mean(diag M) · I)⁻¹ R`` for symmetric M ``[..., d, d]``, R ``[..., d, n]``."""
    return cholesky_solve(cholesky(damped(matrix, damping)), right)


def damped(matrix: Tensor, damping: float) -> Tensor:
    """``M + damping · mean(diag M) · I``, and a tiny multiple of I where M is zero."""
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return matrix + (damping * mean).clamp_min(torch.finfo(matrix.dtype).tiny) * eye


def is_well_posed(size: int, damping: float, dtype: torch.dtype) -> bool:
    """Whether any damped matrix, of such a size and damping, has a Cholesky factor in this dtype.

    None of its eigenvalues is larger than ``size / damping + 1`` times another.
    """
    return size / damping * torch.finfo(dtype).eps < 1e-2


def cholesky(matrix: Tensor, *, well_posed: bool = False) -> Tensor:
    """The lower Cholesky factor in the working dtype, through float64 where that fails.

    A matrix that is not positive definite in float64 either (or not finite) gives NaN, which the
    caller's check for non-finite solutions turns into a skipped update. If it is known to be well
    posed, so does any other failure, and the host need not look.
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(at_least_float32(matrix))
    if well_posed:
        return torch.where((info != 0)[..., None, None], torch.nan, factor).to(matrix.dtype)
    if not bool((info == 0).all() & factor.isfinite().all()):  # one look: it waits for a GPU
        precise, info = torch.linalg.cholesky_ex(matrix.double())
        factor = torch.where((info != 0)[..., None, None], torch.nan, precise)
    return factor.to(matrix.dtype)


def cholesky_solve(factor: Tensor, right: Tensor) -> Tensor:
    """``(L Lᵀ)⁻¹ R``."""
    solution = torch.cholesky_solve(at_least_float32(right), at_least_float32(factor))
    return solution.to(right.dtype)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half-precision tensors in float32: no factorisation takes them as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
