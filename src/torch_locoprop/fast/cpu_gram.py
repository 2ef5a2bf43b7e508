"""``XᵀX`` on a CPU in little more than half the work, because the matrix is symmetric.

The plain version is ``x.mT @ x``, in :meth:`torch_locoprop.paper.gram.Gram.of`.
"""

from __future__ import annotations

import torch
from torch import Tensor

STRIP = 128  # number of columns whose products with all later columns are computed at once


def fits(x: Tensor) -> bool:
    """Return True if :func:`square` can compute XᵀX of these rows and is faster.

    Args:
        x: rows ``[..., rows, n]``.
    """
    return x.is_cpu and x.dim() == 2 and x.shape[-1] > STRIP


def square(x: Tensor) -> Tensor:
    """Return ``XᵀX [n, n]`` of the rows ``x [rows, n]``.

    The part below the diagonal is computed strip by strip, and copied to above the diagonal.
    """
    n = x.shape[-1]
    square = x.new_empty(n, n)
    for start in range(0, n, STRIP):
        end = start + STRIP
        torch.mm(x[:, start:].mT, x[:, start:end], out=square[start:, start:end])
        square[start:end, end:] = square[end:, start:end].mT
    return square
