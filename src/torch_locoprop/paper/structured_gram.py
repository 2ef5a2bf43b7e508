"""``C = XᵀX`` in full, or reduced to blocks on its diagonal or to the diagonal itself.

Three structures of C for a gradient ``G`` of shape ``[..., d, n]``:

    dense            [..., n, n]
    block-diagonal   [..., b, n/b, n/b]    b blocks of consecutive columns
    diagonal         [..., n]

Leading dimensions are those of G, each of the same size or of size 1. So the number of dimensions says
which structure a tensor has: as many as G, one more, or one less.

X may end with a column of ones, for the bias in the last column of ``[W b]``. If the blocks have more
columns than X, the last columns of the last block are zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_locoprop.paper.fisher import cholesky, cholesky_inverse, cholesky_solve, relative_damping
from torch_locoprop.paper.gram import FULL, Gram, Structure, full_products, in_dtype_of
from torch_locoprop.paper.linear_map import with_ones
from torch_locoprop.paper.spectral import damped_inverse
from torch_locoprop.paper.tensors import (
    Inverse,
    Number,
    Product,
    Tensors,
    join,
    split,
)

STRUCTURES = ("dense", "block", "diagonal")


@dataclass(frozen=True)
class StructuredGram:
    """C in one of three structures, with the products that steps need."""

    entries: Tensor
    structure: str  # one of STRUCTURES
    columns: int | None = None  # n; None: the blocks have as many columns as X

    @classmethod
    def beside(
        cls, gradient: Tensor, gram: Tensor, *, may_be_padded: bool = False
    ) -> StructuredGram:
        """Wrap C; its number of dimensions tells the structure.

        Args:
            gradient: G, ``[..., d, n]``.
            gram: C, in one of the shapes of this module.
            may_be_padded: the last block may end with columns of zeros.

        Raises:
            ValueError: if C has none of these shapes.
        """
        if gradient.dim() < 2:
            raise ValueError(
                f"Invalid gradient of shape {list(gradient.shape)}. Expected a matrix [d, n], or "
                "stacked matrices [..., d, n]."
            )
        structures = {0: "dense", 1: "block", -1: "diagonal"}
        found = cls(gram, structures.get(gram.dim() - gradient.dim(), ""), gradient.shape[-1])
        if not found._fits(gradient, may_be_padded):
            *leading, _, n = gradient.shape
            stack = "".join(f"{size}, " for size in leading)
            raise ValueError(
                f"A Gram matrix of shape {list(gram.shape)} does not fit a gradient of shape "
                f"{list(gradient.shape)}. Expected [{stack}{n}, {n}] (dense), [{stack}b, {n}/b, {n}/b] "
                f"(block-diagonal) or [{stack}{n}] (diagonal). If the gradient has a last column for "
                "the bias, the rows of the Gram matrix need a last column of ones."
            )
        return found

    def _fits(self, gradient: Tensor, may_be_padded: bool) -> bool:
        *leading, _, n = gradient.shape
        shape = self.entries.shape
        if self.structure == "dense":
            right = shape[-2:] == (n, n)
        elif self.structure == "block":
            padding = shape[-3] * shape[-1] - n
            fits = 0 <= padding <= shape[-1] if may_be_padded else padding == 0
            right = shape[-2] == shape[-1] and fits
        else:
            right = self.structure == "diagonal" and shape[-1] == n
        stacked = zip(shape, leading, strict=False)  # the dimensions of one C come after these
        return right and all(size in (1, other) for size, other in stacked)

    @property
    def diagonal(self) -> Tensor:
        """The diagonal of C, ``[..., n]``."""
        if self.structure == "diagonal":
            return self.entries
        diagonal = self.entries.diagonal(dim1=-2, dim2=-1)
        return diagonal.flatten(-2)[..., : self.columns] if self.structure == "block" else diagonal

    def times(self, left: Tensor, product: Product = torch.matmul) -> Tensor:
        """Return ``L C`` for a matrix L of shape ``[..., d, n]``, computed by ``product``."""
        if self.structure == "diagonal":
            return left * self.entries.unsqueeze(-2)
        return self._whole(product(self._parts(left), self.entries))

    def gradient(self, moved: Tensors) -> Tensors:
        """Return ``Δ C``, the change of a squared loss's gradient, for the displacement "weight"."""
        return {"weight": self.times(moved["weight"])}

    def damping(self, damping: float) -> Tensor:
        """Return λ, ``damping`` times the mean diagonal of all of C, ``[...]``."""
        return relative_damping(self.diagonal.mean(-1), damping)

    def solve(
        self, left: Tensor, shift: Tensor, scale: Number, *, well_posed: bool = True
    ) -> Tensor:
        """Return ``L (shift · I + scale · C)⁻¹``.

        Args:
            left: L, ``[..., d, n]``.
            shift: a number for each matrix, ``[...]`` or a scalar.
            scale: a number, or one for each matrix, ``[...]``.
            well_posed: False computes in float64 where the dtype of C is not precise enough.

        Returns:
            The solution, ``[..., d, n]``; NaN where the matrix is not positive definite by rounding.
        """
        system = self._system(shift, scale)
        if self.structure == "diagonal":
            return left / system.unsqueeze(-2)
        factor = cholesky(system, well_posed=well_posed)
        return self._whole(cholesky_solve(factor, self._parts(left).mT).mT)

    def inverse(self, shift: Tensor, scale: Number, *, well_posed: bool) -> Tensor:
        """Return ``(shift · I + scale · C)⁻¹`` in the structure of C; see :meth:`solve`."""
        system = self._system(shift, scale)
        if self.structure == "diagonal":
            return 1 / system
        factor = cholesky(system, well_posed=well_posed)
        return cholesky_inverse(factor)

    def _system(self, shift: Tensor, scale: Number) -> Tensor:
        """Return ``shift · I + scale · C`` in the structure of C."""
        if self.structure == "diagonal":
            return _unsqueezed(shift, 1) + _unsqueezed(scale, 1) * self.entries
        inner, like = self._inner_dimensions, self.entries
        eye = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
        return _unsqueezed(shift, inner) * eye + _unsqueezed(scale, inner) * like

    def unit_diagonal(self) -> StructuredGram:
        """Return C divided by its mean diagonal, over all blocks together; C of zeros stays zeros."""
        mean = self.diagonal.mean(-1).clamp_min(torch.finfo(self.entries.dtype).tiny)
        return replace(self, entries=self.entries / _unsqueezed(mean, self._inner_dimensions))

    def averaged_with(self, past: Tensor, decay: float) -> StructuredGram:
        """Return ``decay · past + (1 − decay) · C``."""
        return replace(self, entries=torch.lerp(self.entries, past, decay))

    def damped_inverse(
        self,
        damping: Tensor,
        otherwise: Tensor | None,
        inverse_of: Inverse = torch.cholesky_inverse,
    ) -> Tensor:
        """Return ``(C + λI)⁻¹`` in the structure of C, without waiting for the device.

        Args:
            damping: λ, ``[..., 1, 1]``.
            otherwise: returned for matrices that have no Cholesky factor by rounding; None is I.
            inverse_of: computes an inverse from a Cholesky factor.
        """
        if self.structure == "diagonal":
            return 1 / (self.entries + damping.squeeze(-1))
        own = damping.unsqueeze(-1) if self.structure == "block" else damping
        return damped_inverse(self.entries, own, otherwise, inverse_of)

    @property
    def _inner_dimensions(self) -> int:
        """The number of dimensions of one C."""
        return {"diagonal": 1, "dense": 2, "block": 3}[self.structure]

    def _parts(self, matrix: Tensor) -> Tensor:
        """Return the columns of each block: ``[..., d, n] -> [..., b, d, n/b]``."""
        if self.structure == "dense":
            return matrix
        blocks, size = self.entries.shape[-3:-1]
        whole = _padded(matrix, blocks * size)
        return whole.reshape(*whole.shape[:-1], blocks, size).movedim(-2, -3)

    def _whole(self, parts: Tensor) -> Tensor:
        """Return the inverse of :meth:`_parts`."""
        if self.structure == "dense":
            return parts
        return parts.movedim(-3, -2).flatten(-2)[..., : self.columns]


@dataclass(frozen=True)
class ReducedGram(Gram):
    """``[X 1]ᵀ[X 1]`` reduced to blocks on its diagonal, or to the diagonal, in place of XᵀX.

    ``square`` has the entries that are kept, for the columns that are trained, and ``total`` is empty.
    """

    kept: Structure = FULL

    @classmethod
    def reduced(cls, x: Tensor, structure: Structure) -> ReducedGram:
        """Return the products of rows.

        Args:
            x: rows ``[..., rows, n]``.
            structure: which entries of the products are kept.
        """
        joint = with_ones(x, True, structure.ones)
        with full_products(x):
            if structure.kind == "diagonal":
                square = diagonal_gram(joint)
            else:
                blocks, size, _ = structure.shape(joint.shape[-1])
                square = block_gram(_padded(joint, blocks * size), size)
        return cls(square, x.new_empty(0), x.shape[-2], structure)

    @property
    def structure(self) -> Structure:
        return self.kept

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in super().tensors if tensor is not self.total]

    def with_tensors(self, tensors: Iterable[Tensor]) -> ReducedGram:
        square, *counts = tensors
        return super().with_tensors([square, self.total, *counts])

    def joint(self, weight: bool, bias: bool) -> Tensor:
        """Return the entries, which are those of the trained columns."""
        return self.square

    def gradient(self, moved: Tensors) -> Tensors:
        """Return ``Δ C`` for the displacements of the trained tensors."""
        return in_dtype_of(self.square, moved, self._gradient)

    def _gradient(self, moved: Tensors) -> Tensors:
        joint = join(moved)
        curvature = StructuredGram.beside(joint, self.square, may_be_padded=True)
        with full_products(joint):
            return {name: t.clone() for name, t in split(curvature.times(joint), moved).items()}


def block_gram(x: Tensor, block_size: int) -> Tensor:
    """Return the blocks on the diagonal of ``XᵀX``.

    Args:
        x: the rows X, ``[..., rows, n]``.
        block_size: columns of a block, which divides n.

    Returns:
        The blocks, ``[..., n / block_size, block_size, block_size]``.
    """
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block_size, block_size)
    return Gram.of(blocks.movedim(-2, -3)).square


def diagonal_gram(x: Tensor) -> Tensor:
    """Return the diagonal of ``XᵀX``: ``[..., rows, n] -> [..., n]``."""
    return x.square().sum(-2)


def _padded(matrix: Tensor, columns: int) -> Tensor:
    """Return a matrix with columns of zeros behind it: ``[..., n] -> [..., columns]``."""
    missing = columns - matrix.shape[-1]
    return torch.nn.functional.pad(matrix, (0, missing)) if missing else matrix


def _unsqueezed(number: Number, dimensions: int) -> Number:
    """Return a number ``[...]`` with so many dimensions of size 1 behind."""
    if not isinstance(number, Tensor) or number.dim() == 0:
        return number
    return number.reshape(number.shape + (1,) * dimensions)
