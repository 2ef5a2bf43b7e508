"""The change of a transfer's value in the kernels, against another formula in float64."""

import pytest
import torch
from torch import Tensor

from torch_locoprop.fast.triton import availability, local_iterations, matrix_products, rmsprop
from torch_locoprop.paper.transfers import ReLU, Sigmoid, Tanh


def changes(transfer: type, z: Tensor, a: Tensor) -> Tensor:
    """Return ``f(z + a) − f(z)`` from the kernels, with ``a = W Xᵀ`` for one column and X = 1."""
    kernels, kind, d = availability.kernels(), local_iterations.TRANSFERS[transfer], len(z)
    codes, delta = torch.empty_like(z), z.new_full((d, 8), torch.nan)
    kernels.encode_all[(1, -(-d // 16), 1)](
        z, z, codes, 0.0, 0.0, 1, d, rmsprop.FLOAT, rmsprop.FLOAT,
        TRANSFER=kind, HAS_BIAS=False, TILE=16,
    )  # fmt: skip
    tiles = matrix_products.RESIDUAL["ieee"]
    kernels.residual[tiles.grid(8, d, 1)](
        a, z.new_ones(1), codes, codes, delta, 1, 1, d, 0,
        TRANSFER=kind, HAS_BIAS=False, ENCODES=False, N_UNIT=1, ROW_UNIT=1, DESCRIPTORS=False,
        **tiles.options("ieee"),
    )  # fmt: skip
    assert not delta[:, 1:].any()  # filled up
    return delta[:, 0].double()


def pairs(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z = torch.cat([3 * torch.randn(300, generator=generator), torch.linspace(-29.9, 29.9, 101)])
    size = 10 ** torch.empty(len(z)).uniform_(-6, 1.3, generator=generator)
    return z.to(device), (size * torch.randn(len(z), generator=generator)).to(device)


@pytest.mark.parametrize(("transfer", "scale"), [(Tanh, 1.0), (Sigmoid, 0.5)])
def test_to_rounding_of_the_difference(transfer: type, scale: float, device: str) -> None:
    z, a = pairs(device)
    wide_z, wide_a = scale * z.double(), scale * a.double()
    exact = scale * wide_a.sinh() / (wide_z.cosh() * (wide_z + wide_a).cosh())
    torch.testing.assert_close(changes(transfer, z, a), exact, rtol=3e-6, atol=1e-37)


def test_of_a_kink(device: str) -> None:
    z, a = pairs(device)
    exact = (z.double() + a.double()).relu() - z.double().relu()
    torch.testing.assert_close(changes(ReLU, z, a), exact, rtol=0, atol=4e-6)


@pytest.mark.parametrize("transfer", [Tanh, Sigmoid, ReLU])
@pytest.mark.parametrize("where", ["z", "a"])
def test_what_is_no_number_stays_none(transfer: type, where: str, device: str) -> None:
    one, none = torch.ones(1, device=device), torch.full((1,), torch.nan, device=device)
    assert changes(transfer, *((none, one) if where == "z" else (one, none))).isnan().all()


@pytest.mark.parametrize("transfer", [Tanh, Sigmoid])
def test_from_far_away_and_back(transfer: type, device: str) -> None:
    far = torch.tensor([-1e30, -200.0, -70.0, -42.0, -30.0, 0.0, 30.0, 42.0, 70.0, 200.0, 1e30])
    z, a = far.repeat(11).to(device), far.repeat_interleave(11).to(device)
    wide_z, f = z.double(), transfer().f
    exact = f(wide_z + a.double()) - f(wide_z)
    torch.testing.assert_close(changes(transfer, z, a), exact, rtol=0, atol=1e-6)
