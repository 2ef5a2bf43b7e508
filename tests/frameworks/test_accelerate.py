"""LocoProp under Accelerate: equal to the plain loop, with accumulation and resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import assert_close, weights
from torch import Tensor
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="needs the extra 'frameworks'")

from accelerate.state import AcceleratorState, GradientState

Main = Callable[..., list[Tensor]]


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def module(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("accelerate_classifier")


@pytest.fixture
def main(module: ModuleType) -> Main:
    """Run the example and return the final weights."""

    def run(folder: Path, *arguments: Any) -> list[Tensor]:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        return weights(module.main(["--folder", str(folder), *(str(a) for a in arguments)]))

    return run


def test_the_same_weights_as_the_plain_loop(module: ModuleType, main: Main, tmp_path: Path) -> None:
    model, criterion, opt = module.make()
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.99)
    losses = []
    for _ in range(3):
        for points, labels in DataLoader(module.spirals(), 100):
            loss = criterion(model(points), labels)
            loss.backward()
            opt.step()
            schedule.step()
            opt.zero_grad()
            losses.append(loss.item())
    assert_close(main(tmp_path, "--epochs", 3), weights(model), 0.0)
    assert losses[-1] < 0.8 * losses[0]


def test_accumulated_batches_are_one_large_batch(main: Main, tmp_path: Path) -> None:
    large = main(tmp_path, "--epochs", 2, "--batch-size", 100)
    many = main(tmp_path, "--epochs", 2, "--batch-size", 25, "--accumulate", 4)
    assert_close(many, large, 1e-7)
    small = main(tmp_path, "--epochs", 2, "--batch-size", 25)
    assert not torch.allclose(small[0], large[0], atol=1e-3)


@pytest.mark.usefixtures("apply")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_resumed_run_is_bit_identical(main: Main, tmp_path: Path, accumulate: int) -> None:
    options = ("--accumulate", accumulate)
    straight = main(tmp_path / "straight", "--epochs", 4, *options)
    half = main(tmp_path / "halves", "--epochs", 2, *options)
    assert not torch.equal(half[0], straight[0])
    resumed = main(tmp_path / "halves", "--epochs", 4, "--resume", *options)
    assert_close(resumed, straight, 0.0)


def test_resuming_goes_on_from_the_latest_run(main: Main, tmp_path: Path) -> None:
    """A longer, older run in the same folder must not be resumed."""
    straight = main(tmp_path / "straight", "--epochs", 3)
    main(tmp_path / "used", "--epochs", 4, "--batch-size", 50)
    main(tmp_path / "used", "--epochs", 2)
    assert_close(main(tmp_path / "used", "--epochs", 3, "--resume"), straight, 0.0)


def test_the_summary_is_printed(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(tmp_path, "--epochs", 1)
    printed = capsys.readouterr().out
    assert "softmax" in printed
    assert "4,547 of 4,547 parameters in local problems" in printed
