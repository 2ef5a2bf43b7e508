"""Products with rounded factors: which ones are rounded, and how large the error is."""

import pytest
import torch

from benchmarks import rounding
from torch_locoprop.fast.cpu_gram import square as square_of
from torch_locoprop.fast.cpu_onednn import product
from torch_locoprop.study.data.datasets import Dataset


@pytest.mark.parametrize("cut", [False, True])
def test_ten_digits_are_left(cut: bool) -> None:
    x = torch.randn(1000)
    rounded = rounding.to_tf32(x, cut)
    off = (rounded - x).abs() / x.abs()
    assert off.max() <= 2 ** (-10 if cut else -11)
    assert off.max() > 2**-12
    assert torch.equal(rounding.to_tf32(rounded, cut), rounded)
    assert not cut or (rounded.abs() <= x.abs()).all()


@pytest.mark.parametrize("which", ["network", "square", "iterations"])
def test_only_what_is_asked_for_is_rounded(which: str) -> None:
    left, right, bias = torch.randn(40, 300), torch.randn(50, 300), torch.randn(50)

    def computed() -> dict[str, torch.Tensor]:
        return {
            "network": torch.addmm(bias, left, right.mT),
            "square": square_of(right),
            "iterations": product(left, right),
        }

    exact = computed()
    with rounding.Rounded([which]):
        found = computed()
    assert [name for name in exact if not torch.equal(exact[name], found[name])] == [which]
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("too", [False, True])
def test_the_gradient_of_biases_is_exact_unless_it_is_asked_for(too: bool) -> None:
    rows, moved = torch.randn(500, 300), torch.randn(40, 304)
    square = torch.zeros(304, 304)  # [X 1]ᵀ[X 1], padded to a multiple of eight columns
    square[:301, :301] = square_of(torch.cat([rows, torch.ones(500, 1)], 1))
    with rounding.Rounded(["iterations", "bias"] if too else ["iterations"]):
        found = product(moved, square)
    off = (found - moved @ square).abs().mean(0)
    assert off[:300].min() > 1e-3
    assert bool(off[300] > 1e-3) is too


def test_other_weights_at_the_start() -> None:
    draw = torch.rand(50, 12, generator=torch.Generator().manual_seed(7))
    data = Dataset("curves", draw[:40], draw[40:], "made for tests")
    task = {"model": "12-8-3", "batch_size": 15}
    plain = rounding.losses(data, [], None, **task)
    assert len(plain) == 3
    off = rounding.losses(data, [], 1, **task)
    assert off == rounding.losses(data, [], 1, **task)
    assert off[0] != plain[0]
    assert off == pytest.approx(plain, rel=0.01)
