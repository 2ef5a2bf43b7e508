"""``XᵀX``: all that the gradient of a squared loss needs of a layer's rows.

For a residual ``a − a*`` the rows enter the local gradient only through

    (a(W̃) − a(W))ᵀ X = Δ XᵀX ,

so an iteration costs one product with an ``n × n`` matrix instead of two with all the rows. Whether
``XᵀX`` is kept in place of the rows is decided in ``recording/row_reduction.py``, and how it is
computed in ``fast/dispatch.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from threading import RLock
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from torch_locoprop.paper.tensors import Tensors

# The precision of products is one setting for all threads; the backward passes of each GPU
# run in a thread of their own.
_PRECISION = RLock()


@dataclass(frozen=True)
class Structure:
    """The entries of C that a step takes: all, those of blocks on the diagonal, or the diagonal.

    C belongs to the columns of ``[W b]`` that are trained. Blocks have consecutive columns, at most
    ``block_size`` each and all about as many. The last block is padded with zeros if it has fewer
    columns than the others.
    """

    kind: str = "full"  # or "block", "diagonal"
    block_size: int = 1024
    ones: bool = True  # the last column is that of the bias

    def reduces(self, columns: int) -> bool:
        """Return True if the structure leaves out entries of a C with this number of columns."""
        within = {"full": columns, "block": self.block_size, "diagonal": 1}
        return columns > within[self.kind]

    def shape(self, columns: int) -> tuple[int, ...]:
        """Return the shape of C for n = ``columns``: ``(n, n)``, ``(b, n/b, n/b)`` or ``(n,)``."""
        if not self.reduces(columns):
            return columns, columns
        if self.kind == "diagonal":
            return (columns,)
        blocks = -(-columns // self.block_size)
        size = -(-columns // blocks)
        return blocks, size, size

    def fits(self, entries: Tensor | None, columns: int) -> bool:
        """Return True if there are entries of C, or of its inverse, in this structure."""
        shape = self.shape(columns)
        return entries is not None and tuple(entries.shape[-len(shape) :]) == shape


FULL = Structure()


class RowUse(NamedTuple):
    """The products of a layer's rows that a step needs, beyond the gradient of the backward pass."""

    gradients: int = 0  # how many gradients of a squared loss; its value costs as much as one
    square: bool = False  # XᵀX itself
    precise: bool = False  # XᵀX in float64
    structure: Structure = FULL  # structure of XᵀX; FULL unless entries are left out
    coarse: bool = False  # 16 of the 24 digits of float32 suffice for XᵀX

    @property
    def is_any(self) -> bool:
        """True if the step needs anything of the rows."""
        return self.gradients > 0 or self.square

    def dtype(self, like: Tensor) -> torch.dtype:
        """Return the dtype in which ``XᵀX`` is needed for a weight ``like``."""
        return torch.float64 if self.precise else gram_dtype(like)


def gram_dtype(like: Tensor) -> torch.dtype:
    """Return the dtype of ``XᵀX`` for a weight ``like``: its own, or float32 in place of float16.

    The largest number of float16 is 65,504, which sums over so many rows exceed.
    """
    return torch.float32 if like.dtype == torch.float16 else like.dtype


class GramOf(Protocol):
    """A function that computes the :class:`Gram` of rows; :meth:`Gram.of` is the plain one."""

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Gram: ...


class RowProducts(Protocol):
    """Products of the rows from which the gradient of a squared loss follows."""

    def gradient(self, moved: Tensors) -> Tensors:
        """Return by how much a displacement of the trained tensors changes the gradient."""
        ...


@dataclass(frozen=True)
class Gram:
    """The products of the rows X ``[..., rows, n]`` with themselves and with a constant one."""

    square: Tensor  # XᵀX [..., n, n]; empty if no step will use it
    total: Tensor  # Xᵀ1 [..., n]
    rows: float | Tensor  # how many there are, or the sum of their weights

    @property
    def structure(self) -> Structure:
        """The entries of the products that exist."""
        return FULL

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of these products."""
        counts = [self.rows] if isinstance(self.rows, Tensor) else []
        return [self.square, self.total, *counts]

    def with_tensors(self, tensors: Iterable[Tensor]) -> Self:
        """Return products with other tensors, in the order of :attr:`tensors`."""
        given = iter(tensors)
        square, total = next(given), next(given)
        return replace(self, square=square, total=total, rows=next(given, self.rows))

    @classmethod
    def of(cls, x: Tensor, weight: Tensor | None = None) -> Gram:
        """Return the products of the rows, each counted ``weight`` times.

        The products have all digits of float32, also where the user allows TF32: an inverse needs them,
        and iterations with an ``XᵀX`` of TF32 drift far off at times.

        Args:
            x: rows ``[..., rows, n]``.
            weight: how often each row counts ``[rows, 1]``; None counts each once.
        """
        with full_products(x):
            if weight is None:
                return cls(x.mT @ x, x.sum(-2), x.shape[-2])
            weighted = weight * x
            return cls(weighted.mT @ x, weighted.sum(-2), weight.sum())

    @classmethod
    def unknown(cls, like: Tensor, rows: int) -> Gram:
        """Return the record of rows whose products no step will use; it holds their number only."""
        return cls(like.new_empty(0, 0), like.new_empty(0), rows)

    @property
    def is_known(self) -> bool:
        """True if the products were computed."""
        return self.square.numel() > 0

    def serves(self, use: RowUse | None, like: Tensor) -> bool:
        """Return True if these products are all that ``use`` needs of the rows; None needs the rows."""
        if use is None or not use.is_any:
            return use is not None
        if self.structure != use.structure:
            return False
        return self.is_known and not (use.precise and self.square.dtype != use.dtype(like))

    def __add__(self, other: Gram) -> Gram:
        rows = self.rows + other.rows
        if not (self.is_known and other.is_known):
            return Gram(self.square.new_empty(0, 0), self.total[:0], rows)
        both = self.square + other.square, self.total + other.total
        return replace(self, square=both[0], total=both[1], rows=rows)

    def to(self, dtype: torch.dtype) -> Self:
        """Return the products rounded to another dtype."""
        if self.square.dtype == dtype:
            return self
        return replace(self, square=self.square.to(dtype), total=self.total.to(dtype))

    def times(self, count: float, rows: float | Tensor) -> Self:
        """Return the products with each row counted ``count`` times, as products of ``rows`` rows."""
        return replace(self, square=self.square * count, total=self.total * count, rows=rows)

    def joint(self, weight: bool, bias: bool) -> Tensor:
        """Return ``[X 1]ᵀ[X 1]``, restricted to the columns of the tensors that are trained."""
        if not bias:
            return self.square
        *leading, n = self.total.shape
        joint = self.total.new_empty(*leading, n + 1, n + 1)
        joint[..., :n, :n] = self.square
        joint[..., n, :n] = joint[..., :n, n] = self.total
        # Filled as a block: assigning a single entry copies from the host, which no CUDA graph can.
        joint[..., n:, n:] = self.rows
        return joint if weight else joint[..., n:, n:]

    def gradient(self, moved: Tensors) -> Tensors:
        """Return ``(X ΔWᵀ + 1 Δbᵀ)ᵀ [X 1]`` for the displacements of weight and bias that are given.

        The bias has terms of its own, so that the large product keeps the shape of the weight.
        """
        return in_dtype_of(self.square, moved, self._gradient)

    def _gradient(self, moved: Tensors) -> Tensors:
        weight, bias = moved.get("weight"), moved.get("bias")
        if weight is None:
            return {} if bias is None else {"bias": bias * self.rows}
        if bias is None:
            return {"weight": weight @ self.square}
        outer = bias.unsqueeze(-1) * self.total.unsqueeze(-2)
        with full_products(weight):  # the two terms of the bias nearly cancel
            of_weight = (weight @ self.total.unsqueeze(-1)).squeeze(-1)
        return {
            "weight": _add_product(outer, weight, self.square),
            "bias": of_weight + bias * self.rows,
        }


def in_dtype_of(
    products: Tensor, moved: Tensors, gradient: Callable[[Tensors], Tensors]
) -> Tensors:
    """Return gradients that are computed in the dtype of the products, rounded to that of ``moved``."""
    if all(tensor.dtype == products.dtype for tensor in moved.values()):
        return gradient(moved)
    found = gradient({name: tensor.to(products.dtype) for name, tensor in moved.items()})
    return {name: tensor.to(moved[name].dtype) for name, tensor in found.items()}


def saves_work(rows: int, d: int, n: int, gradients: int) -> bool:
    """Return True if ``gradients`` gradients after the first cost less through XᵀX than by rows."""
    return rows * n * n + gradients * d * n * n < 2 * gradients * rows * d * n


def full_products(like: Tensor) -> AbstractContextManager[None]:
    """Compute products on the device of ``like`` with all digits of float32 instead of TF32's."""
    return products_in("ieee", like)


@contextmanager
def products_in(precision: str, like: Tensor) -> Iterator[None]:
    """Compute products of float32 on the device of ``like`` in one precision.

    Code that ``torch.compile`` traces keeps the precision that is set: a graph cannot change it.

    Args:
        precision: ``"ieee"`` or ``"tf32"``.
        like: a tensor on the device of the products; on a CPU nothing changes.
    """
    if not like.is_cuda or torch.compiler.is_compiling():
        yield
        return
    matmul = torch.backends.cuda.matmul
    with _PRECISION:
        before = matmul.fp32_precision
        if before == precision:
            yield
            return
        matmul.fp32_precision = precision
        try:
            yield
        finally:
            matmul.fp32_precision = before


def _add_product(start: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add ``left @ right`` to ``start`` in place and return it."""
    if start.dim() == 2:
        return start.addmm_(left, right)
    if start.dim() == 3:
        return start.baddbmm_(left, right)
    return start.add_(torch.matmul(left, right))
