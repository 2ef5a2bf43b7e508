"""``XᵀX``: all that the gradient of a squared loss needs of a layer's rows.

For a residual ``a − a*`` the rows enter the local gradient only through

    (a(W̃) − a(W))ᵀ X = Δ XᵀX ,

so an iteration costs one product with an ``n × n`` matrix instead of two with all the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor

from torch_locoprop.fast import cuda_streams
from torch_locoprop.fast.triton import matrix_products
from torch_locoprop.paper.tensors import Tensors

# The precision of products is one for all threads, of which backward passes have one for each GPU.
_PRECISION = RLock()
STRIP = 128  # columns whose products with themselves are computed at once
# Multiplications up to which, in an ordinary loop, the host takes longer over our kernels than the GPU
# over cuBLAS's.
SMALL = 2**31
# In such a loop a GPU has XᵀX of a layer outside of the graph of its step. That is worth while where it
# is a fraction of the rows.
FRACTION = 4


class Use(NamedTuple):
    """What a step makes of a layer's rows, beyond the gradient that the backward pass has found."""

    gradients: int = 0  # of a squared loss; its value is as much work as one
    square: bool = False  # XᵀX itself
    precise: bool = False  # and that in float64

    @property
    def is_any(self) -> bool:
        return self.gradients > 0 or self.square

    def dtype(self, like: Tensor) -> torch.dtype:
        """That of the products for a weight."""
        return torch.float64 if self.precise else like.dtype

    def is_better(self, x: Tensor, like: Tensor, rows: int) -> bool:
        """Whether the products of all rows are smaller than x, and no more work than by rows.

        On a GPU much smaller. ``like`` is the weight as a matrix ``[..., d, n]``. Where x has a part of
        the rows only, the work is that of all: of fewer, a CPU never holds more than of all.
        """
        d, n = like.shape[-2:]
        numbers = like.numel() // max(d, 1) * (n + 1)
        if self.precise and like.device.type == "mps":  # which has no float64
            return False
        size = numbers * self.dtype(like).itemsize
        if size * (FRACTION if _is_launched_alone(like) else 1) >= x.numel() * x.element_size():
            return False
        return self.square or saves_work(rows, d, n, self.gradients)


@dataclass(frozen=True)
class Gram:
    """The products of the rows X ``[..., rows, n]`` with themselves and with a constant one."""

    square: Tensor  # XᵀX [..., n, n]; empty where no use was to be made of it
    total: Tensor  # Xᵀ1 [..., n]
    rows: int | Tensor

    @classmethod
    def of(cls, x: Tensor, weight: Tensor | None = None, *, apart: bool = False) -> Gram:
        """Of the rows, each counting ``weight`` ``[rows, 1]`` times; ``apart`` from a layer's solution.

        With all digits even where a user's own products have fewer: an inverse needs them, and so do
        iterations, which are far off at times where the products in both have those of TF32.
        """
        small = apart and _is_launched_alone(x) and x.numel() * x.shape[-1] <= SMALL
        if weight is None and not small and matrix_products.square_fits(x):
            both = matrix_products.square(x)
            return cls(both[..., :-1, :], both[..., -1, :], x.shape[-2])
        with full_products(x):
            if weight is None:
                return cls(square_of(x), x.sum(-2), x.shape[-2])
            weighted = weight * x
            return cls(weighted.mT @ x, weighted.sum(-2), weight.sum())

    @classmethod
    def unknown(cls, like: Tensor, rows: int) -> Gram:
        """Of rows that nobody will ask for."""
        return cls(like.new_empty(0, 0), like.new_empty(0), rows)

    @property
    def is_known(self) -> bool:
        return self.square.numel() > 0

    def serves(self, use: Use | None, like: Tensor) -> bool:
        """Whether it is all that such a use needs of the rows."""
        if use is None or not use.is_any:
            return use is not None
        return self.is_known and not (use.precise and self.square.dtype != use.dtype(like))

    def __add__(self, other: Gram) -> Gram:
        rows = self.rows + other.rows
        if not (self.is_known and other.is_known):
            return Gram(self.square[:0, :0], self.total[:0], rows)
        return Gram(self.square + other.square, self.total + other.total, rows)

    def to(self, dtype: torch.dtype) -> Gram:
        """The same, rounded to another dtype."""
        if self.square.dtype == dtype:
            return self
        return Gram(self.square.to(dtype), self.total.to(dtype), self.rows)

    def joint(self, weight: bool, bias: bool) -> Tensor:
        """``[X 1]ᵀ[X 1]``, of the columns that multiply what is trained."""
        if not bias:
            return self.square
        *leading, n = self.total.shape
        joint = self.total.new_empty(*leading, n + 1, n + 1)
        joint[..., :n, :n] = self.square
        joint[..., n, :n] = joint[..., :n, n] = self.total
        # Filled in, as a block is; to a single entry it would be copied from the host: no graph can.
        joint[..., n:, n:] = self.rows
        return joint if weight else joint[..., n:, n:]

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
        with full_products(weight):  # the bias's two terms nearly cancel
            of_weight = (weight @ self.total.unsqueeze(-1)).squeeze(-1)
        return {
            "weight": _add_product(outer, weight, self.square),
            "bias": of_weight + bias * self.rows,
        }


def _is_launched_alone(x: Tensor) -> bool:
    """Whether work beside a backward pass is no part of a graph of the whole step.

    Steps of the study count as graphs, all of them: a resumed run begins with some that are none.
    """
    return x.is_cuda and not cuda_streams.gradients_stay()


def square_of(x: Tensor) -> Tensor:
    """``XᵀX``; on a CPU, where work is time, little more than the half of it: it is symmetric."""
    n = x.shape[-1]
    if not x.is_cpu or x.dim() != 2 or n <= STRIP:
        return x.mT @ x
    square = x.new_empty(n, n)
    for start in range(0, n, STRIP):
        end = start + STRIP
        torch.mm(x[:, start:].mT, x[:, start:end], out=square[start:, start:end])
        square[start:end, end:] = square[end:, start:end].mT
    return square


def saves_work(rows: int, d: int, n: int, gradients: int) -> bool:
    """Whether so many gradients after the first cost less through the Gram matrix than by rows."""
    return rows * n * n + gradients * d * n * n < 2 * gradients * rows * d * n


@contextmanager
def full_products(like: Tensor) -> Iterator[None]:
    """Products with all digits of float32, not with those of TF32."""
    if not like.is_cuda:
        yield
        return
    matmul = torch.backends.cuda.matmul
    with _PRECISION:
        before = matmul.fp32_precision
        if before == "ieee":
            yield
            return
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before


def _add_product(start: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``start + left @ right``, into ``start``."""
    if start.dim() == 2:
        return start.addmm_(left, right)
    if start.dim() == 3:
        return start.baddbmm_(left, right)
    return start.add_(torch.matmul(left, right))
