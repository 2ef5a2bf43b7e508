"""How the matrix products of our kernels are launched on a GPU: tile sizes, operands, and XᵀX.

The kernels are in ``kernels.py``. The local iterations that use them are in ``local_iterations.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_locoprop.fast.cuda_streams import on_device
from torch_locoprop.fast.triton import availability


class TileSizes(NamedTuple):
    """The tile of a product that one program computes, and the resources of a program."""

    height: int  # rows of the product
    width: int  # columns of the product
    depth: int  # terms of the sum that are loaded at a time
    warps: int
    stages: int  # stages of the software pipeline

    def grid(self, columns: int, d: int, members: int) -> tuple[int, int, int]:
        """Return the grid of programs for products ``[members, d, columns]``."""
        return -(-columns // self.width), -(-d // self.height), members

    def options(self, precision: str) -> dict[str, object]:
        """Return the keyword arguments of a kernel launch for a precision of products."""
        sizes = {"HEIGHT": self.height, "WIDTH": self.width, "DEPTH": self.depth}
        how = {"PRECISION": "tf32" if precision == "bf16" else precision}  # bf16 ignores it
        limit = {} if torch.version.hip else {"maxnreg": self.registers}
        return {**sizes, **how, **limit, "num_warps": self.warps, "num_stages": self.stages}

    @property
    def registers(self) -> int:
        """The number of registers of each thread that lets two programs run on a multiprocessor."""
        return min(2**16 // (2 * 32 * self.warps), 255)


# The tile sizes of the kernels `residual` and `step` by the precision of products: the fastest of those
# that benchmarks/parts.py has tried on an H200.
RESIDUAL = {
    "bf16": TileSizes(128, 128, 64, 8, 3),
    "tf32": TileSizes(128, 128, 32, 8, 3),
    "tf32x3": TileSizes(64, 64, 32, 4, 3),
    "ieee": TileSizes(64, 64, 32, 4, 3),
}
STEP = {**RESIDUAL, "bf16": TileSizes(64, 128, 64, 4, 3)}

TRANSPOSE_TILE = 64  # rows and columns that one program transposes


def is_countable(members: int, d: int, n: int, rows: int) -> bool:
    """Return True if the kernels' indices suffice: 32 bits for entries, 16 bits for programs."""
    entries = members * max(d, n + 1) * (rows + 7)
    return entries < 2**31 and -(-max(d, n + 1) // TRANSPOSE_TILE) < 2**16


def square_fits(x: Tensor) -> bool:
    """Return True if :func:`square` supports these rows ``[rows, n]`` or ``[members, rows, n]``."""
    if x.dim() not in (2, 3) or not availability.supports([unexpanded(x)]):
        return False
    rows, n = x.shape[-2:]
    return is_countable(members(x), n, n, rows) and is_countable(members(x), n, n, n)


def square(x: Tensor) -> Tensor:
    """Return ``[X 1]ᵀX [..., n + 1, n]`` in the precision of float32, even if TF32 is allowed.

    Args:
        x: rows ``[rows, n]`` or ``[members, rows, n]``.
    """
    own = unexpanded(x)
    rows, n = own.shape[-2:]
    with on_device(x.device):
        transposed = transposed_inputs(own, padded(rows), True, torch.float32)
        columns, inner = transposed.shape[-2:]
        found = own.new_empty(*own.shape[:-2], columns, padded(columns))
        precision = "ieee" if availability.precision() == "ieee" else "tf32x3"
        tiles = RESIDUAL[precision]
        left, right, are_descriptors = operands(transposed, transposed, tiles)
        # A linear residual at zero displacement of the bias is the plain product of its factors.
        availability.kernels().residual[tiles.grid(found.shape[-1], columns, members(own))](
            left, right, found, found, found,
            inner // unit(inner), columns, columns, member_stride(transposed),
            TRANSFER=0, HAS_BIAS=False, ENCODES=False,
            N_UNIT=unit(inner), ROW_UNIT=1, DESCRIPTORS=are_descriptors,
            **tiles.options(precision),
        )  # fmt: skip
    return found[..., :n].expand(*x.shape[:-2], columns, n)


def unexpanded(x: Tensor) -> Tensor:
    """Return ``[1, ...]`` in place of ``[members, ...]`` if all members share the same memory."""
    return x[:1] if x.dim() == 3 and x.stride(0) == 0 else x


def padded(length: int) -> int:
    """Return a length rounded up to a multiple of 8, so that all rows begin at aligned addresses."""
    return -(-length // 8) * 8


def transposed_inputs(x: Tensor, columns: int, has_bias: bool, dtype: torch.dtype) -> Tensor:
    """Return ``[X 1]ᵀ``, or ``Xᵀ`` without a bias.

    Args:
        x: rows ``[..., rows, n]``.
        columns: number of columns of the result, at least ``rows``; further ones are zero.
        has_bias: append the column of ones.
        dtype: the dtype of the result.
    """
    rows, n = x.shape[-2:]
    height, tile = n + 1 if has_bias else n, TRANSPOSE_TILE
    transposed = x.new_empty(*x.shape[:-2], height, columns, dtype=dtype)
    grid = (-(-columns // tile), -(-height // tile), members(x))
    availability.kernels().transpose_inputs[grid](
        x, transposed, rows, columns, n, HAS_BIAS=has_bias, TILE=tile
    )
    return transposed


def operands(left: Tensor, right: Tensor, tiles: TileSizes) -> tuple[Any, Any, bool]:
    """Return the factors of a product as a kernel takes them.

    Returns:
        Left and right factor, and True if they are tensor descriptors.
    """
    if not availability.can_use_descriptors(left, right):
        return left, right, False
    # reshape, not flatten: a matrix of one row may have any stride, which a reshaped one has not.
    left, right = (t.reshape(-1, t.shape[-1]) for t in (left, right))
    return (
        availability.descriptor(left, tiles.height, tiles.depth),
        availability.descriptor(right, tiles.width, tiles.depth),
        True,
    )


def members(tensor: Tensor) -> int:
    """Return the number of problems in a tensor ``[members, ·, ·]``; 1 for ``[·, ·]``."""
    return tensor.shape[0] if tensor.dim() == 3 else 1


def member_stride(rows: Tensor) -> int:
    """Return the number of rows between those of two successive members; 0 if all share them."""
    return rows.shape[-2] if rows.dim() == 3 and rows.shape[0] > 1 else 0


def unit(length: int) -> int:
    """Return the largest of 8, 4, 2, 1 that divides a length: entries that can be loaded at once."""
    return next(unit for unit in (8, 4, 2, 1) if length % unit == 0)
