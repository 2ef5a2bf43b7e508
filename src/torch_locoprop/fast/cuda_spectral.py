"""The products of a spectral step on a GPU, in shapes for which its matrix units are fast.

The plain versions are :func:`torch_locoprop.paper.spectral.polar` and ``torch.cholesky_inverse``. The
matrix ``[W b]`` of a layer with a bias has an odd number of columns. Rows of such a matrix are not
aligned in memory, and products of them in bfloat16 take three to four times as long on an H200. Rows
and columns of zeros change no product, so matrices are padded with them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_locoprop.paper import spectral
from torch_locoprop.paper.gram import full_products

MULTIPLE = 16  # rows and columns are padded to multiples of it; 64 is not faster
STRIP = 1024  # rows of an inverse triangular matrix that are multiplied at a time


def polar(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a polar factor as :func:`torch_locoprop.paper.spectral.polar` does.

    Args:
        matrix: a matrix, ``[..., d, n]``.
        dtype: dtype of the matrix products; None is that of ``matrix``.
    """
    d, n = matrix.shape[-2:]
    return spectral.polar(padded(matrix), dtype)[..., :d, :n]


def inverse(factor: Tensor) -> Tensor:
    """Return ``(L Lᵀ)⁻¹`` as ``torch.cholesky_inverse`` does.

    Args:
        factor: L, lower triangular, ``[..., n, n]``.
    """
    n = factor.shape[-1]
    eye = torch.eye(n, dtype=factor.dtype, device=factor.device)
    root: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
    with full_products(factor):
        if factor.dim() > 2 or n <= STRIP:
            return root.mT @ root
        found = torch.zeros_like(root)
        for start in range(0, n, STRIP):  # the rows of a strip end at the diagonal
            end = min(start + STRIP, n)
            rows = root[start:end, :end]
            found[:end, :end].addmm_(rows.mT, rows)
        return found


def padded(matrix: Tensor) -> Tensor:
    """Return the matrix with rows and columns of zeros up to a multiple of `MULTIPLE`."""
    d, n = matrix.shape[-2:]
    if d % MULTIPLE == n % MULTIPLE == 0:
        return matrix
    return F.pad(matrix, (0, -n % MULTIPLE, 0, -d % MULTIPLE))
