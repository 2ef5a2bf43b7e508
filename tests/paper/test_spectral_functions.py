"""The functions of the spectral step, against singular value decompositions and plain algebra."""

import math

import pytest
import torch
from torch import Tensor

from torch_locoprop.paper import spectral
from torch_locoprop.paper.spectral import (
    agreement,
    damped_inverse,
    equal_rows,
    growth,
    has_fast_bf16,
    length,
    polar,
    polar_operations,
    unit_length,
)
from torch_locoprop.paper.structured_gram import StructuredGram

SHAPES = [(4, 7), (7, 4), (5, 5), (1, 6), (6, 1), (1, 1), (3, 4, 7), (2, 3, 7, 4)]


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def quintic(s: Tensor) -> Tensor:
    """Five times the polynomial 3.4445 s − 4.775 s³ + 2.0315 s⁵ of a singular value."""
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return s


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_polar_applies_the_quintic_to_the_singular_values(shape: tuple[int, ...]) -> None:
    matrix = random(*shape)
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    of_unit_length = s / s.square().sum(-1, keepdim=True).sqrt()
    expected = u * quintic(of_unit_length).unsqueeze(-2) @ vt
    torch.testing.assert_close(polar(matrix), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spread", [1.0, 0.1, 1e-2])
def test_polar_is_close_to_the_polar_factor(spread: float) -> None:
    """All singular values come near one, so the inner product with M is near its greatest value.

    Among matrices of spectral norm one, the inner product with M is at most the sum of M's singular
    values, which the exact polar factor attains.
    """
    u, _, vt = torch.linalg.svd(random(20, 30), full_matrices=False)
    s = torch.logspace(0, torch.tensor(spread).log10().item(), 20, dtype=torch.float64)
    matrix = u * s @ vt
    found = polar(matrix)
    singular = torch.linalg.svdvals(found)
    assert singular.min() > 0.65
    assert singular.max() < 1.25
    assert (found * matrix).sum() / singular.max() > 0.6 * s.sum()


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1.0, 1e20, 1e37])
def test_polar_does_not_depend_on_the_scale(scale: float) -> None:
    matrix = random(5, 8).float()
    torch.testing.assert_close(polar(matrix * scale), polar(matrix), rtol=1e-4, atol=1e-4)


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(3, 4, dtype=torch.float64)
    assert torch.equal(polar(zeros), zeros)
    assert torch.equal(unit_length(zeros), zeros)
    assert equal_rows(zeros[:, :1], zeros[:, :1]).isfinite().all()
    assert torch.equal(StructuredGram(zeros[:, :3], "dense").unit_diagonal().entries, zeros[:, :3])


def test_a_lower_precision_of_the_products() -> None:
    matrix = random(6, 9).float()
    found = polar(matrix, torch.float64)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), polar(matrix.double()), rtol=1e-6, atol=1e-6)


def with_equal_rows(direction: Tensor) -> Tensor:
    """Return a direction whose rows have had their present lengths before."""
    lengths = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    return direction * equal_rows(lengths, direction.square().mean(-1, keepdim=True))


def test_equal_rows_keep_the_length_of_the_whole() -> None:
    direction = random(4, 6)
    found = with_equal_rows(direction)
    torch.testing.assert_close(length(found), length(direction))
    rows = found.square().mean(-1)
    torch.testing.assert_close(rows, rows.mean().expand(4))
    for row, before in zip(found, direction, strict=True):  # the direction of each row stays
        torch.testing.assert_close(row / row.norm(), before / before.norm())


def test_a_row_of_zeros_stays_one_among_others() -> None:
    direction = random(4, 6)
    direction[1] = 0
    found = with_equal_rows(direction)
    assert found.isfinite().all()
    assert not found[1].any()
    torch.testing.assert_close(length(found), length(direction))


def test_agreement_is_the_root_of_the_share_within_its_bounds() -> None:
    shares = torch.tensor([-3.0, 0.0, 0.01, 0.25, 1.0, 1.5]).double().reshape(6, 1, 1)
    expected = torch.tensor([0.2, 0.2, 0.2, 0.5, 1.0, 1.0]).double().reshape(6, 1, 1)
    known = torch.ones(1, 1).double()
    torch.testing.assert_close(agreement(shares, known, 0.2), expected)


def test_agreement_begins_at_one() -> None:
    share, weights = torch.full((1, 1), 0.36), torch.tensor([0.0, 0.5, 1.0]).reshape(3, 1, 1)
    expected = torch.tensor([1.0, 0.68**0.5, 0.6]).reshape(3, 1, 1)
    torch.testing.assert_close(agreement(share, weights, 0.1), expected)


@pytest.mark.parametrize(
    ("past", "left", "before", "known", "expected"),
    [
        (2.0, -3.0, -3.0, 1.0, 2 * 1.1**0.75),  # as much is left as there was
        (2.0, -3.0, -3.0, 0.5, 2 * 1.1**0.375),  # at the start
        (2.0, -1.0, -4.0, 1.0, 2.0),
        (2.0, 0.0, -4.0, 1.0, 2 * 1.1**-0.25),  # the minimum
        (2.0, 0.0, -4.0, 0.0, 2 * 1.1**-0.25),
        (2.0, 9.0, -4.0, 1.0, 2 * 1.1**-1.25),  # far behind it
        (2.0, -9.0, -4.0, 1.0, 2 * 1.1**0.75),
        (2.0, 3.0, 3.0, 1.0, 2 * 1.1**-1.25),  # the step was an ascent, and the next one would be
        (2.0, 0.0, 0.0, 1.0, 2 * 1.1**-0.25),
        (0.0, -3.0, -3.0, 1.0, 1.0),
        (1.0, 3.0, -3.0, 1.0, 1.0),
        (7.9, -3.0, -3.0, 1.0, 8.0),
    ],
)
def test_growth(past: float, left: float, before: float, known: float, expected: float) -> None:
    given = [torch.full((2, 1, 1), x).double() for x in (past, left, before, known)]
    found = growth(*given, rate=math.log(1.1), least=0.25, most=8.0)
    torch.testing.assert_close(found, torch.full((2, 1, 1), expected).double())


def test_the_damped_inverse() -> None:
    x = random(2, 5, 8)
    gram, damping = x.mT @ x, torch.tensor([0.1, 3.0]).double().reshape(2, 1, 1)
    found = damped_inverse(gram, damping, None)
    eye = torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(found, torch.linalg.inv(gram + damping * eye))


def test_matrices_without_a_cholesky_factor_keep_what_they_had() -> None:
    """One matrix of the two is not positive definite; the other one is not affected."""
    eye = torch.eye(3, dtype=torch.float64)
    gram, damping = torch.stack([eye, -eye]), torch.full((1, 1), 0.5).double()
    torch.testing.assert_close(damped_inverse(gram, damping, None)[1], eye)
    torch.testing.assert_close(damped_inverse(gram, damping, 7 * gram)[1], -7 * eye)
    torch.testing.assert_close(damped_inverse(gram, damping, 7 * gram)[0], eye / 1.5)


@pytest.mark.parametrize("instructions", [(True, False), (True, True), (False, False)], ids=str)
def test_bfloat16_on_a_cpu_only_where_it_is_fast_and_safe(
    instructions: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    bf16, tiles = instructions
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    spectral._cpu_has_bf16.cache_clear()
    try:
        large = torch.ones(2, 128, 300)
        assert spectral.has_fast_bf16(large) == (bf16 and not tiles)
        assert not spectral.has_fast_bf16(large.double())
        assert not spectral.has_fast_bf16(large[:, :127])
        assert not spectral.has_fast_bf16(large.to("meta"))
    finally:
        spectral._cpu_has_bf16.cache_clear()


@pytest.mark.parametrize(("d", "n"), [(3, 7), (7, 3), (5, 5), (1, 4)])
def test_operations_of_a_polar_factor(d: int, n: int) -> None:
    """Counted product by product: a product [a, b] @ [b, c] has 2abc of them."""
    short, long = min(d, n), max(d, n)
    products = [(short, long, short), (short, short, short), (short, short, long)]
    assert polar_operations(d, n) == 5 * sum(2 * a * b * c for a, b, c in products)


@pytest.mark.parametrize(("d", "n"), [(3, 7), (7, 3), (4, 4)])
def test_polar_multiplies_in_the_shorter_dimension(
    d: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, ...]] = []
    kept = spectral._plus_product

    def watched(beta: float, start: Tensor, alpha: float, left: Tensor, right: Tensor) -> Tensor:
        sizes.append(tuple(left.shape))
        return kept(beta, start, alpha, left, right)

    monkeypatch.setattr(spectral, "_plus_product", watched)
    polar(random(d, n))
    assert set(sizes) == {(min(d, n), min(d, n))}


def test_products_on_a_gpu_are_in_bfloat16() -> None:
    class OnGpu(Tensor):
        is_cuda = True

    assert has_fast_bf16(torch.ones(1, 1, dtype=torch.float64).as_subclass(OnGpu))
    assert not has_fast_bf16(torch.ones(1, 1, dtype=torch.float64))


def test_a_processor_of_which_nothing_is_known_has_no_fast_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Versions of PyTorch may leave out either question; with tiles, products may end programs."""
    asked = spectral._cpu_has_bf16.__wrapped__
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert asked()
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        with monkeypatch.context() as without:
            without.delattr(torch.cpu, name)
            assert not asked()


def test_zeros_among_large_entries_stay_zeros() -> None:
    found = unit_length(torch.tensor([[0.0, 3e30], [4e30, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.6], [0.8, 0.0]]))
