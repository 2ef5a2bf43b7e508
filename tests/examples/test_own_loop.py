"""The loop without the optimizer class has the weights of LocoProp."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from torch_locoprop import LocoProp
from torch_locoprop.solvers import Exact

FILE = Path(__file__).parents[2] / "examples" / "own_loop.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_loop", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_of(example: ModuleType, method: str) -> dict[str, Any]:
    """Return the settings of LocoProp that correspond to a method of the example."""
    own = dict(example.SETTINGS[method])
    if method == "closed-form":
        return {"variant": "locoprop-s", "solver": Exact(damping=own.pop("damping")), **own}
    if method == "locoprop-s":
        return {"variant": "locoprop-s", **own}
    own.pop("agreement")  # 1, as in the general preset
    return own


@pytest.mark.parametrize("method", ["closed-form", "locoprop-s", "spectral"])
def test_weights_equal_those_of_locoprop(example: ModuleType, method: str) -> None:
    by_hand, ours = example.network().double(), example.network().double()
    losses = example.train(by_hand, example.METHODS[method], 6)
    opt = LocoProp(ours, **settings_of(example, method))
    for images, expected in zip(example.batches(6, torch.float64), losses, strict=True):
        total = 0.0
        for part in images.chunk(3):
            loss = example.criterion(ours(part), part) / 3
            loss.backward()
            total += loss.item()
        opt.step()
        opt.zero_grad()
        assert total == pytest.approx(expected, rel=1e-9)
    before = example.network().double()
    for mine, theirs, old in zip(
        by_hand.parameters(), ours.parameters(), before.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
        assert not torch.equal(mine, old)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--method", "closed-form", "--every", "10"),
        ("--method", "closed-form", "--structure", "diagonal"),
        ("--method", "locoprop-s"),
        ("--method", "spectral", "--structure", "diagonal"),
    ],
)
def test_every_method_learns(
    example: ModuleType, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    example.main([*arguments, "--steps", "60"])
    first, *_, last = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert last < first / 5
