"""The closed forms of a local problem with the proximal term ``‖W̃ − W‖²/2η``.

Let ``C = XᵀX``, ``Δ = W̃ − W``, and let ``γ G`` be the local gradient at the current weights. For the
squared loss, setting the derivative of Eq. 3 to zero gives the implicit-gradient update

    Δ (I + η C) = −η γ G .

With the natural-gradient target the right-hand side is ``−η γ D⁻¹ G``, and the update is that of
Eq. 15. For the matching loss, Proposition 3 replaces f by its tangent with the Hessian H of F, which
gives the Sylvester equation (Eq. 10 multiplied by H, Eq. 11)

    Δ + η H Δ C = −η γ G .

H belongs to one row. For a batch, the mean of H over the rows is used. This is exact for one row and
for transfers of constant slope, and an approximation otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_locoprop.paper.fisher import cholesky, cholesky_solve
from torch_locoprop.paper.gram import FULL, Structure
from torch_locoprop.paper.tensors import Number, at_least_float32, holds, spread


def implicit_step(gradient: Tensor, x: Tensor, eta: Number) -> Tensor:
    """Return the solution Δ of ``Δ (I + η XᵀX) = −η G``, the closed form of Eq. 4.

    Args:
        gradient: the local gradient G at the current weights, ``[..., d, n]``.
        x: the inputs X, ``[..., rows, n]``.
        eta: the learning rate η.

    Returns:
        The displacement Δ of the weights, ``[..., d, n]``.
    """
    gradient, x, dtype = *precise_enough(gradient, x, eta), x.dtype
    rows, n = x.shape[-2:]
    if rows >= n:
        system = torch.eye(n, dtype=x.dtype, device=x.device) + eta * (x.mT @ x)
        return (-eta * cholesky_solve(cholesky(system), gradient.mT).mT).to(dtype)
    system = torch.eye(rows, dtype=x.dtype, device=x.device) + eta * (x @ x.mT)
    inner = cholesky_solve(cholesky(system), x @ gradient.mT).mT
    return (-eta * (gradient - eta * inner @ x)).to(dtype)


def precise_enough(gradient: Tensor, x: Tensor, eta: Number) -> tuple[Tensor, Tensor]:
    """Return gradient and inputs, in float64 if ``I + η XᵀX`` may be ill-conditioned."""
    condition = spread(eta, x) * x.square().sum((-2, -1), keepdim=True)  # an upper bound
    if holds((condition * torch.finfo(x.dtype).eps > 1e-3).any(), unknown=False):
        return gradient.double(), x.double()
    return gradient, x


def sylvester(gradient: Tensor, x: Tensor, eta: Number, h: Tensor) -> Tensor:
    """Return the solution Δ of ``Δ + η H Δ XᵀX = −η G`` (Proposition 3).

    This is Eq. 10 multiplied by H; its vectorized form is Eq. 11. In the eigenvectors of ``XᵀX`` and H
    the solution is a division, entry by entry: H is not inverted and no Kronecker product is formed.

    Args:
        gradient: the local gradient G at the current weights, ``[..., d, n]``.
        x: the inputs X, ``[..., rows, n]``.
        eta: the learning rate η.
        h: the Hessian H of F, ``[..., d]`` if diagonal, else ``[..., d, d]``.

    Returns:
        The displacement Δ of the weights, ``[..., d, n]``.
    """
    gradient, x, dtype = *precise_enough(gradient, x, eta), x.dtype
    h = h.to(x.dtype)
    rows, n = x.shape[-2:]
    if rows >= n:
        values, basis = eigh(x.mT @ x)
        return (-eta * sylvester_in_basis(gradient, values, basis, 1.0, h, eta)).to(dtype)
    values, left = eigh(x @ x.mT)
    # Right singular vectors of X with singular values above rounding. Outside their span, Δ = −η G.
    negligible = values <= values.amax(-1, keepdim=True) * rows * torch.finfo(x.dtype).eps
    basis = x.mT @ (left / values.masked_fill(negligible, torch.inf).sqrt().unsqueeze(-2))
    outside = gradient - gradient @ basis @ basis.mT
    inside = sylvester_in_basis(gradient, values, basis, 1.0, h, eta)
    return (-eta * (outside + inside)).to(dtype)


def sylvester_in_basis(
    gradient: Tensor, values: Tensor, basis: Tensor, shift: Number, h: Tensor, eta: Number = 1.0
) -> Tensor:
    """Solve ``shift · Σ + η H Σ C = G`` for Σ within the span of the eigenvectors ``basis`` of C."""
    inside = gradient @ basis
    if h.dim() < gradient.dim():
        return inside / (shift + eta * h.unsqueeze(-1) * values.unsqueeze(-2)) @ basis.mT
    slopes, frame = eigh(h)
    solved = (frame.mT @ inside) / (shift + eta * slopes.unsqueeze(-1) * values.unsqueeze(-2))
    return frame @ solved @ basis.mT


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues, clamped to >= 0, and eigenvectors; NaN if a matrix is not finite."""
    finite = matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    dtype = matrix.dtype
    matrix = at_least_float32(torch.where(finite, matrix, 0.0))
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = torch.linalg.eigh(matrix.double())
    nan = torch.where(finite, 0.0, torch.nan).to(dtype)
    return values.clamp_min(0).to(dtype) + nan.squeeze(-1), vectors.to(dtype) + nan


def operations(d: int, n: int, bent: bool, structure: Structure = FULL) -> int:
    """Return about how many multiplications and additions the solution of a problem takes.

    Args:
        d: outputs.
        n: columns of ``[W b]``.
        bent: the loss contains a transfer, so that the eigenvectors of C are needed.
        structure: which entries of C the solution takes.
    """
    shape = structure.shape(n)
    if len(shape) == 1:
        return d * n
    if len(shape) == 3:
        blocks, size, _ = shape
        return blocks * operations(d, size, bent)
    return 9 * n**3 + 4 * d * n**2 if bent else n**3 // 3 + 2 * d * n**2
