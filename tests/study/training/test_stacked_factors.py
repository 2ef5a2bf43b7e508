"""Orthogonal factors and inverses by matrix products, compared with the library's in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_locoprop.study.training import stacked_factors
from torch_locoprop.study.training.stacked_factors import (
    LEAF,
    TOLERANCE,
    inverse,
    inverse_root,
    of_stacks,
    orthogonal_factor,
)

TIE = 1e-10  # far below the rounding of float32
ROUNDING = 4e-7  # of the entries of QᵀQ for Q in float32
CONDITIONS = (1.0, 1e3, 1e6, 1e12)


def orthogonal(n: int, numbers: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=numbers, dtype=torch.float64))[0]


def spectrum(n: int, condition: float, rank: int) -> Tensor:
    values = torch.logspace(0, -math.log10(condition), n, dtype=torch.float64)
    return values * (torch.arange(n) < rank)


def symmetric(values: Tensor, numbers: torch.Generator) -> Tensor:
    vectors = orthogonal(len(values), numbers)
    return vectors * values @ vectors.mT


def angles(found: Tensor, expected: Tensor) -> Tensor:
    """The sine of the angle between columns, whose signs do not count."""
    cosine = (found * expected).sum(-2, keepdim=True)
    return torch.linalg.vector_norm(found - cosine * expected, dim=-2)


def determined(matrix: Tensor) -> Tensor:
    """The angle by which the tie may turn each column of Q, to first order.

    A change of columns of unit length by TIE turns the span of the first j by at most TIE / σⱼ, where
    σⱼ is their smallest singular value. The angle of column j is that of two spans.
    """
    scaled = matrix / torch.linalg.vector_norm(matrix, dim=0)
    last = [torch.linalg.svdvals(scaled[:, : j + 1])[-1].item() for j in range(len(matrix))]
    return 4 * TIE * len(matrix) ** 0.5 / torch.tensor(last, dtype=torch.float64).clamp_min(1e-300)


def check(matrix: Tensor, start: Tensor, precision: float) -> None:
    (found,) = orthogonal_factor(matrix[None], start[None])
    assert found.dtype == matrix.dtype
    wide = found.double()
    eye = torch.eye(len(matrix), dtype=torch.float64)
    assert (wide.mT @ wide - eye).abs().max() < max(precision, 2 * TOLERANCE)
    if not (torch.linalg.vector_norm(matrix.double(), dim=0) > 0).all():
        return
    q = torch.linalg.qr(matrix.double())[0]
    bound = determined(matrix.double())
    sure = bound < 1e-3  # the bound is of first order
    assert (angles(wide, q)[sure] <= bound[sure] + precision * 10).all()


@given(
    seed=st.integers(0, 2**31),
    n=st.sampled_from([1, 2, 7, 33, 150]),
    condition=st.sampled_from(CONDITIONS),
    share=st.sampled_from([1.0, 1.0, 0.5, 0.1, 0.0]),
    kind=st.sampled_from(["general", "power", "near", "own"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=120, deadline=None)
def test_the_orthogonal_factor_is_that_of_qr(
    seed: int, n: int, condition: float, share: float, kind: str, dtype: torch.dtype
) -> None:
    """For any matrix, and for power iterations from a basis that is random, near or converged."""
    numbers = torch.Generator().manual_seed(seed)
    values = spectrum(n, condition, math.ceil(share * n))
    start = orthogonal(n, numbers)
    if kind == "general":
        matrix = start * values @ orthogonal(n, numbers)
    else:
        system = symmetric(values, numbers)
        if kind != "power":
            start = torch.linalg.eigh(system)[1].flip(-1)
        if kind == "near":
            turned = start + 1e-2 * torch.randn(n, n, generator=numbers) / n**0.5
            start = torch.linalg.qr(turned)[0]
        matrix = system @ start
    check(matrix.to(dtype), start.to(dtype), ROUNDING if dtype == torch.float32 else 1e-7)


def zeros(n: int) -> Tensor:
    return torch.zeros(n, n)


def ones(n: int) -> Tensor:
    return torch.ones(n, n)


def doubled(n: int) -> Tensor:
    """Each column twice."""
    columns = torch.randn(n, n // 2, generator=torch.Generator().manual_seed(1))
    return columns.repeat_interleave(2, dim=1)


def dead(n: int) -> Tensor:
    """Statistics of inputs of which every third is always zero, after a power iteration."""
    numbers = torch.Generator().manual_seed(2)
    rows = torch.randn(n, n, generator=numbers) * (torch.arange(n) % 3 > 0)
    return rows.mT @ rows @ orthogonal(n, numbers).float()


def hilbert(n: int) -> Tensor:
    return 1 / (torch.arange(n)[:, None] + torch.arange(n) + 1.0)


def unequal(n: int) -> Tensor:
    """Columns from 1e-30 to 1e30 times their usual length."""
    rows = torch.randn(n, n, generator=torch.Generator().manual_seed(3))
    return rows * torch.logspace(-30, 30, n)


def opposite(n: int) -> Tensor:
    return -torch.eye(n)


SINGULAR = [zeros, ones, doubled, dead, hilbert, unequal, opposite]


@pytest.mark.parametrize("make", SINGULAR)
@pytest.mark.parametrize("n", [4, 60, 2 * LEAF + 10])
def test_the_factor_of_every_matrix_is_orthogonal(make: Callable[[int], Tensor], n: int) -> None:
    matrix = make(n)
    for start in (torch.eye(n), orthogonal(n, torch.Generator().manual_seed(0)).float()):
        check(matrix, start, ROUNDING)


@pytest.mark.parametrize("make", SINGULAR)
@pytest.mark.parametrize("n", [4, 60, 2 * LEAF + 10])
def test_repetitions_suffice(
    make: Callable[[int], Tensor], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = make(n)
    start = orthogonal(n, torch.Generator().manual_seed(0)).float()
    monkeypatch.setattr(torch.linalg, "qr", None)
    orthogonal_factor(matrix[None], start[None])


def test_vanishing_columns_stay_as_they_were() -> None:
    numbers = torch.Generator().manual_seed(0)
    system = symmetric(torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0]).double(), numbers)
    basis = torch.linalg.eigh(system)[1].flip(-1)
    product = system @ basis
    product[:, 3:] = 0.0
    found = orthogonal_factor(product[None], basis[None])[0]
    torch.testing.assert_close(found, basis, rtol=0, atol=1e-7)


def test_one_matrix_of_a_stack_does_not_change_another() -> None:
    """A matrix that is not finite gives NaN, without QR of the library for any other."""
    numbers = torch.Generator().manual_seed(0)
    stack = torch.randn(4, 20, 20, generator=numbers)
    start = torch.eye(20).expand_as(stack)
    expected = orthogonal_factor(stack[:2], start[:2])
    stack[2, 3, 4], stack[3, 0, 0] = torch.nan, torch.inf
    found = orthogonal_factor(stack, start)
    torch.testing.assert_close(found[:2], expected, rtol=0, atol=1e-6)
    assert found[2:].isnan().any(-1).any(-1).all()


def test_the_library_takes_over_where_repetitions_do_not_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stacked_factors, "REPETITIONS", 1)
    stack = torch.stack([ones(30), torch.eye(30)])
    found = orthogonal_factor(stack, torch.eye(30).expand_as(stack))
    expected = torch.linalg.qr(stack.double())[0].float()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("n", [1, 5, LEAF, LEAF + 1, 3 * LEAF - 7])
def test_the_inverse_root_is_that_of_the_cholesky_factor(n: int) -> None:
    numbers = torch.Generator().manual_seed(n)
    systems = torch.stack([symmetric(spectrum(n, 1e4, n), numbers) for _ in range(3)])
    found = inverse_root(systems)
    expected = torch.linalg.inv(torch.linalg.cholesky(systems, upper=True))
    assert found.tril(-1).eq(0).all()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n", [3, 2 * LEAF + 3])
def test_inverses(n: int) -> None:
    numbers = torch.Generator().manual_seed(n)
    systems = torch.stack([symmetric(spectrum(n, 1e3, n), numbers) for _ in range(3)]).float()
    systems[1] -= 2 * torch.eye(n)  # not positive definite
    found = inverse(systems)
    assert found.dtype == torch.float32
    expected = torch.linalg.inv(systems.double()).float()
    torch.testing.assert_close(found[::2], expected[::2], rtol=1e-5, atol=1e-4)
    assert found[1].isnan().any()


def test_matrices_of_one_shape_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []

    def difference(left: Tensor, right: Tensor) -> Tensor:
        shapes.append(left.shape)
        return left - right

    monkeypatch.setattr(stacked_factors, "MOST", 4 * 9)
    numbers = [(3, 2.0, 1.0), (5, 7.0, 4.0), (3, 5.0, 2.0), (3, 1.0, 0.5)]
    given = [(torch.full((2, n, n), a), torch.full((2, n, n), b)) for n, a, b in numbers]
    found = of_stacks(difference, given)
    assert [t.shape for t in found] == [left.shape for left, _ in given]
    assert [t.unique().item() for t in found] == [a - b for _, a, b in numbers]
    assert shapes == [(4, 3, 3), (2, 3, 3), (1, 5, 5), (1, 5, 5)]
