"""C in three structures: which shapes fit a gradient, and its products, against dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_locoprop.paper.gram import Gram, RowUse, Structure
from torch_locoprop.paper.structured_gram import ReducedGram, StructuredGram

# Gradient, C, and whether C fits it without and with columns of zeros in the last block.
SHAPES = [
    ((3, 4), (4, 4), True, True),
    ((3, 4), (3, 4), False, False),
    ((3, 4), (4, 3), False, False),
    ((3, 4), (3, 3), False, False),
    ((3, 4), (1, 4), False, False),
    ((3, 4), (4,), True, True),
    ((3, 4), (3,), False, False),
    ((3, 4), (1,), False, False),
    ((3, 4), (2, 2, 2), True, True),
    ((3, 4), (4, 1, 1), True, True),
    ((3, 4), (1, 4, 4), True, True),
    ((3, 4), (2, 2, 3), False, False),
    ((3, 4), (2, 3, 2), False, False),
    ((3, 4), (4, 2, 1), False, False),
    ((3, 4), (2, 4, 2), False, False),
    ((3, 5), (2, 3, 3), False, True),
    ((3, 4), (2, 3, 3), False, True),
    ((3, 3), (2, 3, 3), False, True),
    ((3, 2), (2, 3, 3), False, False),
    ((3, 7), (2, 3, 3), False, False),
    ((3, 4), (2, 1, 1), False, False),
    ((3, 4), (2, 2, 2, 2), False, False),
    ((2, 3, 4), (2, 4, 4), True, True),
    ((2, 3, 4), (1, 4, 4), True, True),
    ((2, 3, 4), (3, 4, 4), False, False),
    ((1, 3, 4), (2, 4, 4), False, False),
    ((2, 3, 4), (0, 4, 4), False, False),
    ((2, 3, 4), (2, 4), True, True),
    ((2, 3, 4), (1, 4), True, True),
    ((2, 3, 4), (3, 4), False, False),
    ((2, 3, 4), (2, 3), False, False),
    ((2, 3, 4), (2, 2, 2, 2), True, True),
    ((2, 3, 4), (1, 2, 2, 2), True, True),
    ((2, 3, 4), (3, 2, 2, 2), False, False),
    ((2, 3, 5), (2, 2, 3, 3), False, True),
    ((2, 5, 3, 4), (2, 5, 4, 4), True, True),
    ((2, 5, 3, 4), (2, 3, 4, 4), False, False),
    ((2, 5, 3, 4), (2, 5, 4), True, True),
    ((2, 5, 3, 4), (2, 3, 4), False, False),
    ((2, 5, 3, 4), (2, 5, 2, 2, 2), True, True),
    ((2, 5, 3, 4), (2, 3, 2, 2, 2), False, False),
    ((2, 3, 6), (2, 2, 5, 5), False, True),
    ((2, 5, 1, 2, 3, 4), (2, 5, 1, 2, 2, 2, 2), True, True),
    ((2, 5, 1, 2, 3, 4), (2, 5, 1, 3, 2, 2, 2), False, False),
    ((3, 4), (), False, False),
]


@pytest.mark.parametrize(("gradient", "gram", "fits", "fits_padded"), SHAPES, ids=str)
def test_shapes_that_fit_a_gradient(
    gradient: tuple[int, ...], gram: tuple[int, ...], fits: bool, fits_padded: bool
) -> None:
    for may_be_padded, expected in ((False, fits), (True, fits_padded)):
        given = torch.zeros(gradient), torch.zeros(gram)
        if expected:
            assert StructuredGram.beside(*given, may_be_padded=may_be_padded).entries is given[1]
        else:
            with pytest.raises(ValueError, match="does not fit a gradient"):
                StructuredGram.beside(*given, may_be_padded=may_be_padded)


def test_columns_of_zeros_have_to_be_allowed() -> None:
    with pytest.raises(ValueError, match="does not fit a gradient"):
        StructuredGram.beside(torch.zeros(3, 5), torch.zeros(2, 3, 3))


@pytest.mark.parametrize("shape", [(), (4,)])
def test_a_gradient_is_a_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Expected a matrix"):
        StructuredGram.beside(torch.zeros(shape), torch.zeros(4, 4))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def positive(entries: Tensor, structure: str) -> Tensor:
    """Return positive definite matrices, or positive diagonals."""
    if structure == "diagonal":
        return entries.square() + 0.5
    return entries @ entries.mT + 0.5 * torch.eye(entries.shape[-1], dtype=entries.dtype)


def dense(entries: Tensor, structure: str, n: int) -> Tensor:
    """Return C with all its zeros, ``[..., n, n]``."""
    if structure == "diagonal":
        return torch.diag_embed(entries)
    if structure == "dense":
        return entries
    blocks, size = entries.shape[-3:-1]
    whole = entries.new_zeros(*entries.shape[:-3], blocks * size, blocks * size)
    for i in range(blocks):
        at = slice(i * size, (i + 1) * size)
        whole[..., at, at] = entries[..., i, :, :]
    return whole[..., :n, :n]


# Structure, columns, and the shape of one C.
KINDS = [
    ("dense", 6, (6, 6)),
    ("block", 6, (2, 3, 3)),
    ("block", 5, (2, 3, 3)),
    ("diagonal", 6, (6,)),
]


def of_kind(
    structure: str, n: int, shape: tuple[int, ...], leading: tuple[int, ...]
) -> tuple[StructuredGram, Tensor, Tensor]:
    """Return a random C of a structure, the same with all its zeros, and a gradient."""
    entries = positive(draw(*leading, *shape), structure)
    if structure == "block" and n == 5:  # the last column of the last block is zero
        entries[..., -1, :, -1] = entries[..., -1, -1, :] = 0
    gradient = draw(*leading, 4, n)
    gram = StructuredGram.beside(gradient, entries, may_be_padded=True)
    return gram, dense(entries, structure, n), gradient


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize(("structure", "n", "shape"), KINDS)
def test_products_and_inverses(
    structure: str, n: int, shape: tuple[int, ...], leading: tuple[int, ...]
) -> None:
    """Each member of a population has its own numbers."""
    gram, c, gradient = of_kind(structure, n, shape, leading)
    shift, scale = draw(*leading).abs() + 0.3, draw(*leading).abs() * 2 + 0.1
    eye = torch.eye(n, dtype=torch.float64)
    system = shift[..., None, None] * eye + scale[..., None, None] * c
    inverse = torch.linalg.inv(system)
    torch.testing.assert_close(gram.times(gradient), gradient @ c)
    torch.testing.assert_close(gram.solve(gradient, shift, scale), gradient @ inverse)
    found = dense(gram.inverse(shift, scale, well_posed=True), structure, n)
    torch.testing.assert_close(found, inverse)
    own = torch.linalg.inv(shift[..., None, None] * eye + c)
    found = gram.damped_inverse(shift[..., None, None], None)
    torch.testing.assert_close(dense(found, structure, n), own)
    one = torch.tensor(0.7, dtype=torch.float64)
    torch.testing.assert_close(
        gram.solve(gradient, one, 0.4), gradient @ torch.linalg.inv(0.7 * eye + 0.4 * c)
    )


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize(("structure", "n", "shape"), KINDS)
def test_means_of_the_diagonal(
    structure: str, n: int, shape: tuple[int, ...], leading: tuple[int, ...]
) -> None:
    gram, c, _ = of_kind(structure, n, shape, leading)
    mean = c.diagonal(dim1=-2, dim2=-1).mean(-1)
    torch.testing.assert_close(gram.damping(0.3), 0.3 * mean)
    found = dense(gram.unit_diagonal().entries, structure, n)
    torch.testing.assert_close(found, c / mean[..., None, None])
    past = draw(*leading, *shape)
    torch.testing.assert_close(
        gram.averaged_with(past, 0.8).entries, 0.8 * past + 0.2 * gram.entries
    )


STRUCTURES = [Structure("block", 3), Structure("block", 4), Structure("diagonal")]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: f"{s.kind}-{s.block_size}")
@pytest.mark.parametrize("leading", [(), (2,)], ids=str)
def test_reduced_products_of_rows(structure: Structure, leading: tuple[int, ...]) -> None:
    x = draw(*leading, 20, 6)
    found = ReducedGram.reduced(x, structure)
    wide = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    whole = wide.mT @ wide
    if structure.kind == "diagonal":
        expected = whole.diagonal(dim1=-2, dim2=-1)
    else:
        blocks = -(-7 // structure.block_size)
        size = -(-7 // blocks)
        expected = whole.new_zeros(*leading, blocks, size, size)
        for i in range(blocks):
            part = whole[..., i * size : (i + 1) * size, i * size : (i + 1) * size]
            expected[..., i, : part.shape[-2], : part.shape[-1]] = part
    torch.testing.assert_close(found.square, expected)
    assert found.total.numel() == 0
    assert found.rows == 20
    assert found.structure == structure
    moved = {"weight": draw(*leading, 4, 6), "bias": draw(*leading, 4)}
    delta = torch.cat([moved["weight"], moved["bias"].unsqueeze(-1)], -1)
    kind = "diagonal" if structure.kind == "diagonal" else "block"
    change = delta @ dense(expected, kind, 7)
    gradient = found.gradient(moved)
    torch.testing.assert_close(gradient["weight"], change[..., :-1])
    torch.testing.assert_close(gradient["bias"], change[..., -1])


def test_tensors_of_reduced_products() -> None:
    """The empty total is not among them; the number of rows is, if it is a tensor."""
    found = ReducedGram.reduced(draw(9, 6), Structure("diagonal"))
    (square,) = found.tensors
    assert square is found.square
    weighted = found.times(0.5, torch.tensor(4.5))
    square, rows = weighted.tensors
    torch.testing.assert_close(square, 0.5 * found.square)
    assert rows.item() == 4.5
    changed = weighted.with_tensors([square * 3, rows * 2])
    torch.testing.assert_close(changed.square, 1.5 * found.square)
    assert changed.rows == 9.0
    assert changed.total is weighted.total


def test_other_structures_do_not_serve() -> None:
    like = torch.zeros(4, 6, dtype=torch.float64)
    diagonal = ReducedGram.reduced(draw(9, 6), Structure("diagonal"))
    assert diagonal.serves(RowUse(square=True, structure=Structure("diagonal")), like)
    assert not diagonal.serves(RowUse(square=True), like)
    assert not Gram.of(draw(9, 6)).serves(
        RowUse(square=True, structure=Structure("diagonal")), like
    )


def test_blocks_and_their_defaults() -> None:
    """A block has at most 1,024 columns, all blocks about as many, and the bias has a column."""
    block = Structure("block")
    assert block.ones
    assert not block.reduces(1024)
    assert block.reduces(1025)
    assert block.shape(1024) == (1024, 1024)
    assert block.shape(1025) == (2, 513, 513)
    assert block.shape(3000) == (3, 1000, 1000)
    assert Structure("diagonal").shape(1) == (1, 1)
    assert not Structure("diagonal").reduces(1)
    assert Structure("diagonal").shape(2) == (2,)


def test_a_number_does_not_change_the_dtype() -> None:
    """As in PyTorch, a scalar in float64 leaves tensors in float32 as they are."""
    gradient, shift = torch.ones(3, 4), torch.tensor(0.5, dtype=torch.float64)
    for entries in (torch.eye(4), torch.ones(4), torch.eye(2).expand(2, 2, 2)):
        found = StructuredGram.beside(gradient, entries).solve(gradient, shift, 1.5)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, gradient / 2)
