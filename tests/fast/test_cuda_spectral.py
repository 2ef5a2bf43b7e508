"""Products of the spectral step in the shapes for a GPU equal the plain ones; they run on a CPU too."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_locoprop import LocoProp
from torch_locoprop.fast import cuda_spectral, dispatch
from torch_locoprop.fast.triton import matrix_products
from torch_locoprop.paper import spectral
from torch_locoprop.paper.gram import Gram, full_products

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(7, 20), (20, 7), (16, 33), (3, 9, 17), (1, 5), (16, 32)])
def test_a_padded_polar_factor_equals_the_plain_one(shape: tuple[int, ...]) -> None:
    matrix = drawn(*shape)
    found = cuda_spectral.polar(matrix)
    assert found.shape == matrix.shape
    torch.testing.assert_close(found, spectral.polar(matrix), rtol=1e-11, atol=1e-12)


def test_products_have_multiples_of_16_rows_and_columns() -> None:
    padded = cuda_spectral.padded(drawn(2, 30, 785))
    assert padded.shape == (2, 32, 800)
    assert not padded[:, 30:].any()
    assert not padded[..., 785:].any()
    aligned = drawn(32, 48)
    assert cuda_spectral.padded(aligned) is aligned


def test_a_polar_factor_of_zeros_is_zero_and_one_of_nan_is_nan() -> None:
    assert not cuda_spectral.polar(torch.zeros(4, 6)).any()
    assert cuda_spectral.polar(torch.full((4, 6), torch.nan)).isnan().all()


@pytest.mark.parametrize("strip", [2, 3, 100])
@pytest.mark.parametrize("shape", [(7,), (3, 7)])
def test_an_inverse_from_a_cholesky_factor(
    strip: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_spectral, "STRIP", strip)
    monkeypatch.setattr(cuda_spectral, "LARGEST", strip)
    rows = drawn(*shape, 20)
    matrix = rows @ rows.mT
    found = cuda_spectral.inverse(torch.linalg.cholesky(matrix))
    eye = torch.eye(7, dtype=torch.float64).expand_as(matrix)
    torch.testing.assert_close(found @ matrix, eye, rtol=0, atol=1e-11)


def test_on_a_cpu_the_plain_inverse_is_taken() -> None:
    factor = torch.linalg.cholesky(drawn(5, 9) @ drawn(5, 9).mT)
    assert torch.equal(dispatch.inverse(factor), torch.cholesky_inverse(factor))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(500, 785), (785, 500)])
def test_on_a_gpu_dispatch_pads(shape: tuple[int, int]) -> None:
    matrix = drawn(*shape).float().cuda()
    found = dispatch.polar(matrix, torch.bfloat16)
    assert torch.equal(found, cuda_spectral.polar(matrix, torch.bfloat16))
    expected = spectral.polar(matrix.double())
    assert (found - expected).norm() < 0.02 * expected.norm()


class InBfloat16(TorchDispatchMode):
    """Takes the products of bfloat16 factors with sums in float32, which PyTorch has on GPUs only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func not in (aten.mm.dtype, aten.addmm.dtype, aten.bmm.dtype, aten.baddbmm.dtype):
            assert "mm" not in func.__name__
            return func(*args, **(kwargs or {}))
        *start, left, right, dtype = args
        assert (left.dtype, right.dtype, dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        found = left.float() @ right.float()
        return start[0] + found if start else found


def factors(*shape: int) -> tuple[Tensor, Tensor]:
    """A gradient ``[..., d, n]`` and the inverse of a damped C, as in a spectral step, in float32.

    The inputs have a large mean, and the gradient is largest along it, so that the product cancels.
    """
    *leading, d, n = shape
    scales = torch.logspace(0, -2, n, dtype=torch.float64)
    x = drawn(*leading, 2 * n, n, seed=1) * scales + 0.5
    gram = x.mT @ x
    gram /= gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    inverse = torch.linalg.inv(gram + 0.02 * torch.eye(n, dtype=torch.float64))
    gradient = drawn(*leading, d, 2 * n, seed=2) @ x
    return gradient.float(), inverse.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(40, 16), (33, 21)])
def test_the_square_of_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (drawn(*shape) + 1).to(DEVICE, dtype)
    with nullcontext() if GPU else InBfloat16():
        found = cuda_spectral.gram(x)
    wide = x.double()
    expected = wide.mT @ wide
    largest = 2**-15 if dtype == torch.float32 else 2**-20  # two factors of 16 digits
    assert (found.square - expected).abs().max() < largest * expected.diagonal().max()
    torch.testing.assert_close(found.total.double(), wide.sum(0), rtol=1e-5, atol=1e-5)
    assert found.square.is_contiguous()
    assert (found.square.dtype, found.total.dtype) == (torch.float32, torch.float32)
    assert found.rows == shape[0]


def test_no_direction_gains_as_much_as_the_damping() -> None:
    """Rows that have one error of rounding: bfloat16 alone gives a direction without inputs 0.03."""
    n = 2048
    signs = torch.tensor([1.0, -1.0]).repeat(n // 2)
    x = (1.0039 + 1e-4 * signs).expand(8, n)  # rounded to 1.0078 and 1
    with nullcontext() if GPU else InBfloat16():
        found = cuda_spectral.gram(x.to(DEVICE)).square.cpu()
    mean = found.diagonal().mean()
    assert abs(signs @ found @ signs / n / mean) < 1e-3
    rounded = x.bfloat16().float()
    assert (rounded @ signs).square().sum() / n / mean > 0.03


@pytest.mark.parametrize(
    ("shape", "of_rows", "dtype", "coarse", "expected"),
    [
        ((9, 4), torch.float32, torch.float32, True, True),
        ((9, 4), torch.float16, torch.float32, True, True),
        ((9, 4), torch.float32, torch.float32, False, False),
        ((2, 9, 4), torch.float32, torch.float32, True, False),
        ((9, 4), torch.float32, torch.float64, True, False),
        ((9, 4), torch.float64, torch.float32, True, False),
        ((9, 4), torch.bfloat16, torch.bfloat16, True, False),
        ((8, 4), torch.float32, torch.float32, True, False),
        ((8, 4), torch.bfloat16, torch.float32, True, True),
    ],
)
def test_which_squares_are_coarse_on_a_gpu(
    shape: tuple[int, ...],
    of_rows: torch.dtype,
    dtype: torch.dtype,
    coarse: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those in float32 of the rows of one layer; groups of a convolution are stacked matrices.

    Rows in float32 are split if the product is large, which is here one of nine rows.
    """
    coarsely = []
    monkeypatch.setattr(cuda_spectral, "SPLIT_FROM", 9 * 4 * 4)
    monkeypatch.setattr(cuda_spectral, "gram", lambda x: coarsely.append(x) or Gram.of(x.float()))
    x = torch.ones(shape, dtype=of_rows, device=DEVICE)
    if not GPU:
        monkeypatch.setattr(Tensor, "is_cuda", True)
        monkeypatch.setattr(matrix_products, "square_fits", lambda x: False)
    found = dispatch.gram_in(x, dtype, coarse=coarse)
    assert found.square.dtype == dtype
    assert bool(coarsely) is expected


def test_only_a_step_in_bfloat16_takes_a_coarse_square(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(x: Tensor, dtype: torch.dtype, *, coarse: bool = False) -> Any:
        asked.append(coarse)
        return gram_in(x, dtype, coarse=coarse)

    gram_in = dispatch.gram_in
    monkeypatch.setattr(dispatch, "gram_in", noted)
    for settings, expected in (
        ({}, True),
        ({"local_products": "full"}, False),
        ({"variant": "locoprop-s", "solver": "exact"}, False),
    ):
        layer = nn.Linear(2, 3)
        opt = LocoProp(layer, output_transfer="linear", **settings)
        layer(torch.ones(9, 2)).sum().backward()
        opt.step()
        assert asked == [expected], settings
        asked.clear()


def test_rows_in_bfloat16_stay_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast the input of a layer is in bfloat16, and its weight in float32."""
    asked = []

    def noted(x: Tensor, dtype: torch.dtype, *, coarse: bool = False) -> Any:
        asked.append((x.dtype, dtype))
        return gram_in(x, dtype, coarse=coarse)

    gram_in = dispatch.gram_in
    monkeypatch.setattr(dispatch, "gram_in", noted)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    opt = LocoProp(model, preset="spectral")
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(9, 2)).sum().backward()
    opt.step()
    assert asked == [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", [(30, 65), (3, 20, 48), (2, 3, 8, 17)])
def test_three_products_in_bfloat16_have_twice_the_digits_of_one(shape: tuple[int, ...]) -> None:
    """On a GPU the products are its own; on a CPU factors are in bfloat16 and sums in float32."""
    left, right = (factor.to(DEVICE) for factor in factors(*shape))
    with nullcontext() if GPU else InBfloat16():
        found = cuda_spectral.product(left, right)
    expected = left.double() @ right.double()
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    full = relative_error(rounding_only(left, right), expected)
    assert relative_error(found, expected) < 400 * max(full, 2**-23)
    once = left.bfloat16().double() @ right.bfloat16().double()
    assert relative_error(once, expected) > 50 * relative_error(found, expected)


def rounding_only(left: Tensor, right: Tensor) -> Tensor:
    with full_products(left):
        return left @ right


def test_a_polar_factor_in_bfloat16_hides_the_error_of_three_products() -> None:
    """The steps are as far from float64 as with a product in float64."""
    left, right = (factor.to(DEVICE) for factor in factors(120, 161))
    with nullcontext() if GPU else InBfloat16():
        found = cuda_spectral.product(left, right)
    exact = left.double() @ right.double()
    expected = spectral.polar(exact)
    ours, best = (
        relative_error(spectral.polar(matrix.float(), torch.bfloat16), expected)
        for matrix in (found, exact)
    )
    assert ours < 1.05 * best
    in_full = relative_error(spectral.polar(found.double()), expected)
    assert in_full < 0.1 * best


def test_products_that_are_not_finite_stay_so() -> None:
    for bad in (torch.inf, torch.nan):
        left = torch.ones(4, 4)
        left[1, 2] = bad
        with InBfloat16():
            found = cuda_spectral.product(left, torch.eye(4))
        assert not found[1].isfinite().all()


@pytest.mark.parametrize("strip", [1, 2, 3, 100])
@pytest.mark.parametrize("shape", [(9,), (2, 7)])
def test_the_inverse_of_a_triangular_matrix(
    strip: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_spectral, "STRIP", strip)
    monkeypatch.setattr(cuda_spectral, "LARGEST", strip)
    factor = drawn(*shape, shape[-1]).tril() + 5 * torch.eye(shape[-1], dtype=torch.float64)
    found = cuda_spectral.triangular_inverse(factor)
    assert not found.triu(1).any()
    torch.testing.assert_close(found, torch.linalg.inv(factor), rtol=1e-11, atol=1e-12)


def test_only_large_products_of_float32_are_split() -> None:
    left, right = factors(20, 30)
    assert not cuda_spectral.product_fits(left, right)
    large = torch.empty(1024, 1024), torch.empty(1024, 1024)
    assert cuda_spectral.product_fits(*large)
    assert not cuda_spectral.product_fits(large[0].double(), large[1].double())


def test_local_products_decide_where_they_are_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_spectral, "SPLIT_FROM", 2**29)
    left, right = (factor.to(DEVICE) for factor in factors(2048, 512))
    plain = dispatch.product(left, right)
    assert dispatch.product_for("full") is dispatch.product
    found = dispatch.product_for("bf16")(left, right)
    assert torch.equal(found, cuda_spectral.product(left, right) if GPU else plain)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("shape", [(1000, 785), (3, 256, 513)])
def test_a_product_fits_a_cuda_graph(shape: tuple[int, ...]) -> None:
    left, right = (factor.cuda() for factor in factors(*shape))
    expected = cuda_spectral.product(left, right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cuda_spectral.product(left, right)
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
