"""``XᵀX``: all that the gradient of a squared loss needs of a layer's rows.

For a residual ``a − a*`` the rows enter the local gradient only through

    (a(W̃) − a(W))ᵀ X = Δ XᵀX ,

so an iteration costs one product with an ``n × n`` matrix instead of two with all the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

SMALL = 256  # columns whose products with themselves are computed at once


@dataclass(frozen=True)
class Gram:
    """The products of the rows X ``[..., rows, n]`` with themselves and with a constant one."""

    square: Tensor  # XᵀX [..., n, n]
    total: Tensor  # Xᵀ1 [..., n]
    rows: int | Tensor

    @classmethod
    def of(cls, x: Tensor, weight: Tensor | None = None) -> Gram:
        """Of the rows, each counting ``weight`` ``[rows, 1]`` times."""
        if weight is None:
            return cls(square_of(x), x.sum(-2), x.shape[-2])
        weighted = weight * x
        return cls(weighted.mT @ x, weighted.sum(-2), weight.sum())

    def __add__(self, other: Gram) -> Gram:
        return Gram(self.square + other.square, self.total + other.total, self.rows + other.rows)

    def gradient(self, moved: Tensors) -> Tensors:
        """``(X ΔWᵀ + 1 Δbᵀ)ᵀ [X 1]`` for the displacements of "weight" and "bias" that are there.

        The bias has its own terms, so that the large product keeps the shape of the weight.
        """
        weight, bias = moved.get("weight"), moved.get("bias")
        if weight is None:
            return {} if bias is None else {"bias": bias * self.rows}
        if bias is None:
            return {"weight": weight @ self.square}
        outer = bias.unsqueeze(-1) * self.total.unsqueeze(-2)
        return {
            "weight": _add_product(outer, weight, self.square),
            "bias": (weight @ self.total.unsqueeze(-1)).squeeze(-1) + bias * self.rows,
        }


def square_of(x: Tensor) -> Tensor:
    """``XᵀX``; on a CPU, where work is time, of large blocks beside the diagonal only one of two."""
    if not x.is_cpu or x.dim() != 2:
        return x.mT @ x
    square = x.new_empty(x.shape[1], x.shape[1])
    _fill(square, x)
    return square


def _fill(square: Tensor, x: Tensor) -> None:
    """Write ``XᵀX`` into ``square``, block by block."""
    n = x.shape[1]
    if n < SMALL:
        torch.mm(x.mT, x, out=square)
        return
    half = n // 2
    left, right = x[:, :half], x[:, half:]
    beside = square[:half, half:]
    torch.mm(left.mT, right, out=beside)
    square[half:, :half] = beside.mT
    _fill(square[:half, :half], left)
    _fill(square[half:, half:], right)


def saves_work(rows: int, d: int, n: int, gradients: int) -> bool:
    """Whether so many gradients after the first cost less through the Gram matrix than by rows."""
    return rows * n * n + gradients * d * n * n < 2 * gradients * rows * d * n


def _add_product(start: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``start + left @ right``, into ``start``."""
    if start.dim() == 2:
        return start.addmm_(left, right)
    if start.dim() == 3:
        return start.baddbmm_(left, right)
    return start.add_(torch.matmul(left, right))
