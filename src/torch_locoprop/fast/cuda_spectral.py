"""The products of a spectral step on a GPU, in shapes and dtypes for which its matrix units are fast.

The plain versions are ``torch.matmul``, :func:`torch_locoprop.paper.spectral.polar` and
``torch.cholesky_inverse``. The matrix ``[W b]`` of a layer with a bias has an odd number of columns.
Rows of such a matrix are not aligned in memory, and products of them in bfloat16 take three to four
times as long on an H200. Rows and columns of zeros change no product, so matrices are padded with them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_locoprop.paper import spectral
from torch_locoprop.paper.fisher import LARGEST
from torch_locoprop.paper.gram import Gram, full_products

MULTIPLE = 16  # rows and columns are padded to multiples of it; 64 is not faster
STRIP = 1024  # rows of an inverse triangular matrix that are multiplied at a time
SPLIT_FROM = 2**30  # multiplications of a product from which splitting its factors pays


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of matrices in float32, as the sum of three products in bfloat16.

    bfloat16 has 8 of the 24 digits of float32. A factor is split into its value in bfloat16 and the
    remainder, of which bfloat16 takes 8 digits again. The product of the two remainders is left out:
    an error of about 2⁻¹⁶ of the product of the lengths of a row and a column. ``docs/spectral.md``
    compares it with the rounding of the polar factor that follows in bfloat16.

    Args:
        left: a matrix, ``[..., d, n]``.
        right: a matrix, ``[..., n, m]``.
    """
    d, m = left.shape[-2], right.shape[-1]
    coarse, fine = _split(padded(left))
    other_coarse, other_fine = _split(padded(right))
    # The small terms come first, so that their sum is not rounded to the digits of the large one.
    factors = (coarse, other_fine), (fine, other_coarse), (coarse, other_coarse)
    if coarse.dim() == 2:
        found = torch.mm(*factors[0], out_dtype=torch.float32)
        for pair in factors[1:]:
            found = torch.addmm(found, *pair, out_dtype=torch.float32)
    else:
        stacked = [(one.flatten(0, -3), other.flatten(0, -3)) for one, other in factors]
        found = torch.bmm(*stacked[0], out_dtype=torch.float32)
        for pair in stacked[1:]:
            found = torch.baddbmm(found, *pair, out_dtype=torch.float32)
        found = found.view(*coarse.shape[:-2], *found.shape[-2:])
    return found[..., :d, :m]


def product_fits(left: Tensor, right: Tensor) -> bool:
    """Return True if :func:`product` serves these factors on a GPU, and is faster than ``@``."""
    is_large = left.numel() * right.shape[-1] >= SPLIT_FROM
    return is_large and left.dtype == right.dtype == torch.float32


def gram(x: Tensor) -> Gram:
    """Return XᵀX of rows in float32, computed by products in bfloat16.

    Rows in bfloat16 need one product, which is exact but for its sums. Others are split as in
    :func:`product`, into ``X = R + S``. Here ``SᵀS`` is not left out: if all rows of S are equal, it
    is large along them, where XᵀX may be small.

    Args:
        x: rows ``[rows, n]``.
    """
    rows, n = x.shape
    total = x.sum(0, dtype=torch.float32)
    if n % MULTIPLE:
        x = F.pad(x, (0, -n % MULTIPLE))
    if x.dtype == torch.bfloat16:
        square = torch.mm(x.mT, x, out_dtype=torch.float32)
    else:
        coarse, fine = _split(x)
        square = torch.mm(coarse.mT, fine, out_dtype=torch.float32)
        square = square + square.mT  # the small terms come first, as in product()
        for factor in (fine, coarse):
            square = torch.addmm(square, factor.mT, factor, out_dtype=torch.float32)
    return Gram(square[:n, :n].contiguous(), total, rows)


def gram_fits(x: Tensor, dtype: torch.dtype) -> bool:
    """Return True if :func:`gram` serves these rows on a GPU, for XᵀX in this dtype, and pays.

    Rows that are split need about ten launches, and one product in float32 needs one.
    """
    if x.dim() != 2 or dtype != torch.float32 or x.dtype.itemsize > dtype.itemsize:
        return False
    return x.dtype == torch.bfloat16 or x.numel() * x.shape[-1] >= SPLIT_FROM


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
    with full_products(factor):
        root = triangular_inverse(factor)
        if factor.dim() > 2 or n <= STRIP:
            return root.mT @ root
        found = torch.zeros_like(root)
        for start in range(0, n, STRIP):  # the rows of a strip end at the diagonal
            end = min(start + STRIP, n)
            rows = root[start:end, :end]
            found[:end, :end].addmm_(rows.mT, rows)
        return found


def _split(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in bfloat16 and what remains of it, in bfloat16 too."""
    coarse = matrix.bfloat16()
    return coarse, (matrix - coarse).bfloat16()


def triangular_inverse(factor: Tensor) -> Tensor:
    """Return ``L⁻¹``: that of its quarters, for which matrix products do most of the work.

    With ``L = [[A, 0], [B, D]]``, ``L⁻¹ = [[A⁻¹, 0], [−D⁻¹ B A⁻¹, D⁻¹]]``.

    Args:
        factor: L, lower triangular, ``[..., n, n]``.
    """
    n = factor.shape[-1]
    if n <= (STRIP if factor.dim() == 2 else LARGEST):
        eye = torch.eye(n, dtype=factor.dtype, device=factor.device)
        solved: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
        return solved
    half = n // 2
    first = triangular_inverse(factor[..., :half, :half])
    last = triangular_inverse(factor[..., half:, half:])
    found = torch.zeros_like(factor)
    found[..., :half, :half], found[..., half:, half:] = first, last
    found[..., half:, :half] = -(last @ (factor[..., half:, :half] @ first))
    return found


def padded(matrix: Tensor) -> Tensor:
    """Return the matrix with rows and columns of zeros up to a multiple of `MULTIPLE`."""
    d, n = matrix.shape[-2:]
    if d % MULTIPLE == n % MULTIPLE == 0:
        return matrix
    return F.pad(matrix, (0, -n % MULTIPLE, 0, -d % MULTIPLE))
