"""Products of the spectral step in the shapes for a GPU equal the plain ones; they run on a CPU too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_locoprop.fast import cuda_spectral, dispatch
from torch_locoprop.paper import spectral


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
