"""Products of the spectral step by oneDNN equal the plain ones, and are as accurate in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.fast import cpu_onednn, cpu_spectral, dispatch
from torch_locoprop.paper import spectral


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_spectral, "LARGE", 0)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SHAPES = pytest.mark.parametrize("shape", [(7, 20), (20, 7), (9, 9), (1, 5), (5, 1)])


@SHAPES
def test_a_polar_factor_has_the_singular_vectors_and_the_polynomial_of_the_values(
    shape: tuple[int, int],
) -> None:
    matrix = drawn(*shape)
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    found = cpu_spectral.polar(matrix)
    torch.testing.assert_close(found.double(), u @ (s.unsqueeze(-1) * v), rtol=1e-4, atol=1e-5)


@SHAPES
def test_dispatch_chooses_it(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, calls = drawn(*shape), []
    plain = cpu_onednn.product
    monkeypatch.setattr(cpu_onednn, "product", lambda *a: calls.append(a) or plain(*a))
    found = dispatch.polar(matrix)
    assert len(calls) == 15 if cpu_onednn.onednn_supports(matrix) else not calls
    torch.testing.assert_close(found, spectral.polar(matrix), rtol=1e-4, atol=1e-5)


def test_a_polar_factor_of_zeros_is_zero_and_one_of_nan_is_nan() -> None:
    assert not cpu_spectral.polar(torch.zeros(4, 6)).any()
    assert cpu_spectral.polar(torch.full((4, 6), torch.nan)).isnan().all()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_needs_no_symmetric_factor(transposed: bool) -> None:
    left, right = drawn(6, 11), drawn(11, 11, seed=1)
    right = right.mT if transposed else right
    expected = (left.double() @ right.double()).float()
    torch.testing.assert_close(dispatch.product(left, right), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "left", [drawn(3, 4, 5), drawn(4, 5).double(), drawn(4, 5).bfloat16(), drawn(4, 5).to("meta")]
)
def test_other_matrices_take_the_plain_product(left: Tensor) -> None:
    assert not cpu_spectral.fits(left)
    right = torch.ones(5, 2, dtype=left.dtype, device=left.device)
    assert dispatch.product(left, right).shape == (*left.shape[:-1], 2)


@pytest.mark.parametrize(("large", "calls"), [(40, 1), (41, 0)])
def test_small_products_stay_with_torch(
    large: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(cpu_spectral, "LARGE", large)
    monkeypatch.setattr(cpu_spectral, "fits", lambda left: seen.append(left) or False)
    dispatch.product(drawn(4, 5), drawn(5, 2))  # 40 multiplications
    dispatch.polar(drawn(4, 10))  # 4·10·4/2 = 80 of the smaller products
    assert len(seen) == calls + 1


@pytest.mark.parametrize("preset", ["general", "spectral"])
def test_training_is_the_same_to_rounding(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 5))
        opt = LocoProp(model, preset=preset, lr=0.02)
        for step in range(4):
            opt.zero_grad()
            model(drawn(30, 12, seed=step)).square().mean().backward()
            opt.step()
        return [p.detach().clone() for p in model.parameters()]

    fast = trained()
    assert all(map(torch.equal, fast, trained()))
    monkeypatch.setattr(cpu_spectral, "LARGE", torch.inf)
    for one, other in zip(fast, trained(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
