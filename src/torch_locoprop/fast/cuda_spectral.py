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
from torch_locoprop.paper.gram import full_products, products_in
from torch_locoprop.paper.tensors import Product

MULTIPLE = 16  # rows and columns are padded to multiples of it; 64 is not faster
STRIP = 1024  # rows of an inverse triangular matrix that are multiplied at a time
COARSE = -(2**13)  # the bits of a float32 that TF32 has: all but 13 of the mantissa
SPLIT_FROM = 2**30  # multiplications of a product from which splitting its factors pays


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of matrices in float32, as the sum of three products in TF32.

    TF32 has 11 of the 24 digits of float32. A factor is split into its first 11 digits and the
    remainder, of which TF32 takes 11 again. The product of the two remainders is left out: an error of
    about 2⁻²² of the product of the lengths of a row and a column. ``docs/spectral.md`` compares it
    with the rounding of the polar factor that follows in bfloat16.

    Args:
        left: a matrix, ``[..., d, n]``.
        right: a matrix, ``[..., n, m]``.
    """
    d, m = left.shape[-2], right.shape[-1]
    coarse, fine = _split(padded(left))
    other_coarse, other_fine = _split(padded(right))
    with products_in("tf32", left):
        found = coarse @ other_fine  # the small terms first
        found = _plus_product(_plus_product(found, fine, other_coarse), coarse, other_coarse)
    return found[..., :d, :m]


def product_fits(left: Tensor, right: Tensor) -> bool:
    """Return True if :func:`product` serves these factors on a GPU, and is faster than ``@``."""
    is_large = left.numel() * right.shape[-1] >= SPLIT_FROM
    return is_large and left.dtype == right.dtype == torch.float32


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
    """Return a matrix in TF32 and the remainder, which add up to the given one."""
    coarse = matrix.view(torch.int32).bitwise_and(COARSE).view(torch.float32)
    return coarse, matrix - coarse


def _plus_product(start: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``start + left @ right``; a matrix and stacked matrices are changed in place."""
    if start.dim() > 3:
        return start + left @ right
    add: Product = start.addmm_ if start.dim() == 2 else start.baddbmm_
    return add(left, right)


def triangular_inverse(factor: Tensor) -> Tensor:
    """Return ``L⁻¹``: that of its quarters, for which matrix products do most of the work.

    With ``L = [[A, 0], [B, D]]``, ``L⁻¹ = [[A⁻¹, 0], [−D⁻¹ B A⁻¹, D⁻¹]]``.

    Args:
        factor: L, lower triangular, ``[..., n, n]``.
    """
    n = factor.shape[-1]
    if n <= STRIP:
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
