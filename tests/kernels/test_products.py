"""XᵀX by the kernels: on a GPU, or by Triton's interpreter."""

import pytest
import torch

from torch_locoprop.gram import Gram
from torch_locoprop.kernels import on_device, products


@pytest.mark.parametrize("members", [None, 1, 3])
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (20, 17), (24, 16), (37, 33)])
def test_equals_the_plain_version(
    device: str, members: int | None, rows: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (rows, n) if members is None else (members, rows, n)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)
    assert products.square_fits(x)
    ours = Gram.of(x)
    monkeypatch.setattr(on_device, "SWITCHED_OFF", True)
    theirs = Gram.of(x.double())
    torch.testing.assert_close(ours.square.double(), theirs.square, rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(ours.total.double(), theirs.total, rtol=2e-6, atol=2e-5)
    assert ours.rows == theirs.rows == rows


def test_rows_that_all_members_have(device: str) -> None:
    x = torch.randn(1, 20, 9, device=device)
    ours = Gram.of(x.expand(3, -1, -1))
    assert ours.square.shape == (3, 9, 9)
    assert ours.square.stride(0) == 0
    torch.testing.assert_close(ours.square[2], (x[0].mT @ x[0]), rtol=1e-5, atol=1e-4)


def test_what_is_left_to_others(device: str) -> None:
    x = torch.randn(20, 9, device=device)
    assert products.square_fits(x)
    assert not products.square_fits(x.double())
    assert not products.square_fits(x[:, ::2])
    assert not products.square_fits(x.expand(2, 2, 20, 9))
