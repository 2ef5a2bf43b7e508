"""Matrix products on a GPU by our kernels: in which parts, from what operands, and XᵀX itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_locoprop.fast.cuda_streams import on_device
from torch_locoprop.fast.triton import availability


class Parts(NamedTuple):
    """What one program computes of a product, how many terms at a time, and by how many threads."""

    tall: int
    broad: int
    deep: int
    warps: int
    stages: int

    def grid(self, columns: int, d: int, members: int) -> tuple[int, int, int]:
        return -(-columns // self.broad), -(-d // self.tall), members

    def options(self, precision: str) -> dict[str, object]:
        sizes = {"TALL": self.tall, "BROAD": self.broad, "DEEP": self.deep}
        how = {"PRECISION": "tf32" if precision == "bf16" else precision}  # which bf16 has not
        limit = {} if torch.version.hip else {"maxnreg": self.registers}
        return {**sizes, **how, **limit, "num_warps": self.warps, "num_stages": self.stages}

    @property
    def registers(self) -> int:
        """Of each thread, so that a multiprocessor has room for two programs."""
        return min(2**16 // (2 * 32 * self.warps), 255)


RESIDUAL = {
    "bf16": Parts(128, 128, 64, 8, 3),
    "tf32": Parts(128, 128, 32, 8, 3),
    "tf32x3": Parts(64, 64, 32, 4, 3),
    "ieee": Parts(64, 64, 32, 4, 3),
}
STEP = {**RESIDUAL, "bf16": Parts(64, 128, 64, 4, 3)}
"""The fastest of those that were tried on an H200, by the precision of products."""

TURNED = 64  # rows and columns that one program takes to transpose


def is_countable(members: int, d: int, n: int, rows: int) -> bool:
    """Whether entries of residuals and inputs have numbers of 32 bits, and programs those of 16."""
    entries = members * max(d, n + 1) * (rows + 7)
    return entries < 2**31 and -(-max(d, n + 1) // TURNED) < 2**16


def square_fits(x: Tensor) -> bool:
    """Whether the kernels take the rows ``[rows, n]`` or ``[members, rows, n]``."""
    if x.dim() not in (2, 3) or not availability.supports([own_rows(x)]):
        return False
    rows, n = x.shape[-2:]
    return is_countable(members(x), n, n, rows) and is_countable(members(x), n, n, n)


def square(x: Tensor) -> Tensor:
    """``[X 1]ᵀX [..., n + 1, n]`` with all digits of float32, whatever precision is allowed."""
    own = own_rows(x)
    rows, n = own.shape[-2:]
    with on_device(x.device):
        table = turned(own, padded(rows), True, torch.float32)
        columns, inner = table.shape[-2:]
        found = own.new_empty(*own.shape[:-2], columns, padded(columns))
        precision = "ieee" if availability.precision() == "ieee" else "tf32x3"
        parts = RESIDUAL[precision]
        left, right, in_blocks = factors(table, table, parts)
        availability.kernels().residual[parts.grid(found.shape[-1], columns, members(own))](
            left, right, found, found, found, inner // unit(inner), columns, columns, apart(table),
            TRANSFER=0, HAS_BIAS=False, NOTES=False,
            N_UNIT=unit(inner), ROW_UNIT=1, IN_BLOCKS=in_blocks, **parts.options(precision),
        )  # fmt: skip
    return found[..., :n].expand(*x.shape[:-2], columns, n)


def own_rows(x: Tensor) -> Tensor:
    """Those that are there, where all members have the same."""
    return x[:1] if x.dim() == 3 and x.stride(0) == 0 else x


def padded(length: int) -> int:
    """That of rows which all begin where a device likes to load from."""
    return -(-length // 8) * 8


def turned(x: Tensor, lead: int, has_bias: bool, dtype: torch.dtype) -> Tensor:
    """``[X 1]ᵀ``, without the ones if there is no bias."""
    rows, n = x.shape[-2:]
    columns = n + 1 if has_bias else n
    table = x.new_empty(*x.shape[:-2], columns, lead, dtype=dtype)
    grid = (-(-lead // TURNED), -(-columns // TURNED), members(x))
    availability.kernels().turn[grid](x, table, rows, lead, n, HAS_BIAS=has_bias, TILE=TURNED)
    return table


def factors(left: Tensor, right: Tensor, parts: Parts) -> tuple[Any, Any, bool]:
    """Those of a product, and whether as what the device fetches by the block."""
    if not availability.has_blocks(left, right):
        return left, right, False
    # Not flattened: a matrix of one row may have any stride, and only a reshaped one its width.
    left, right = (t.reshape(-1, t.shape[-1]) for t in (left, right))
    return (
        availability.blocks(left, parts.tall, parts.deep),
        availability.blocks(right, parts.broad, parts.deep),
        True,
    )


def members(tensor: Tensor) -> int:
    """How many problems there are, of tensors ``[members, ·, ·]`` or ``[·, ·]``."""
    return tensor.shape[0] if tensor.dim() == 3 else 1


def apart(rows: Tensor) -> int:
    """By how many rows those of one member are away from those of the next."""
    return rows.shape[-2] if rows.dim() == 3 and rows.shape[0] > 1 else 0


def unit(inner: int) -> int:
    """How many entries of such rows can be loaded at once."""
    return next(unit for unit in (8, 4, 2, 1) if inner % unit == 0)
