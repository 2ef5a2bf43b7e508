"""LocoProp under Lightning: equal to the plain loop, with accumulation and resuming."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import assert_close, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torch_locoprop import LocoProp
from torch_locoprop.study.data.curves import curves

lightning = pytest.importorskip("lightning", reason="needs the extra 'frameworks'")


pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "The 'train_dataloader' does not have many workers",
        r"Checkpoint directory .* exists and is not empty",
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    )
]

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
Main = Callable[..., list[Tensor]]


@pytest.fixture
def module(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("lightning_autoencoder")


@pytest.fixture
def main(module: ModuleType, tmp_path: Path) -> Main:
    """Run the example on 64 images, by default in float64, and return the final weights."""

    def run(*arguments: Any, precision: str = "64-true", **trainer: Any) -> list[Tensor]:
        given = [str(a) for a in ("--images", 64, "--folder", tmp_path, *arguments)]
        return weights(module.main(given, precision=precision, **QUIET, **trainer))

    return run


def plain(module: ModuleType, epochs: int, clip: float | None = None) -> list[Tensor]:
    """Train the example's model in a plain PyTorch loop and return the final weights."""
    torch.manual_seed(0)
    model = module.Autoencoder().double()
    [opt], [schedule] = model.configure_optimizers()
    losses = []
    for _ in range(epochs):
        for batch in curves(64, seed=0).double().split(16):
            loss = 784 * nn.functional.binary_cross_entropy_with_logits(model.network(batch), batch)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        schedule.step()
    assert losses[-1] < 0.85 * losses[0]
    return weights(model)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_same_weights_as_the_plain_loop(
    module: ModuleType, main: Main, clip: float | None
) -> None:
    found = main("--epochs", 3, "--batch-size", 16, gradient_clip_val=clip)
    assert_close(found, plain(module, 3, clip), 1e-14)


def test_accumulated_batches_are_one_large_batch(main: Main) -> None:
    large = main("--epochs", 3, "--batch-size", 32)
    assert_close(main("--epochs", 3, "--batch-size", 8, "--accumulate", 4), large, 1e-9)
    small = main("--epochs", 3, "--batch-size", 8)
    assert not torch.allclose(small[0], large[0], atol=1e-4)


@pytest.mark.usefixtures("apply")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_is_bit_identical(main: Main, accumulate: int, tmp_path: Path) -> None:
    """Uses float32: under "64-true", Lightning rounds restored weights, with any optimizer."""
    own = partial(main, "--batch-size", 16, "--accumulate", accumulate, precision="32-true")
    straight = own("--epochs", 4, "--folder", tmp_path / "straight")
    half = own("--epochs", 2)
    assert not torch.equal(half[0], straight[0])
    assert_close(own("--epochs", 4, "--resume"), straight, 0.0)


def test_resuming_goes_on_from_the_latest_run(main: Main, tmp_path: Path) -> None:
    """A longer, older run in the same folder must not be resumed."""
    own = partial(main, "--batch-size", 16, precision="32-true")
    straight = own("--epochs", 3, "--folder", tmp_path / "straight")
    (tmp_path / "mine.ckpt").write_text("kept")
    own("--epochs", 4, "--batch-size", 8)
    own("--epochs", 2)
    assert_close(own("--epochs", 3, "--resume"), straight, 0.0)
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"last.ckpt", "mine.ckpt"}


def test_the_module_itself_may_be_the_model(
    module: ModuleType, main: Main, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Lightning calls `training_step` and never the module itself; the layers are still recorded."""
    expected = main("--epochs", 2, "--batch-size", 16)

    def configure_optimizers(self: Any) -> LocoProp:
        opt = LocoProp(self, output_transfer="sigmoid")
        return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.99)]

    monkeypatch.setattr(module.Autoencoder, "configure_optimizers", configure_optimizers)
    assert_close(main("--epochs", 2, "--batch-size", 16), expected, 0.0)
    assert "network.0" in capsys.readouterr().out


def test_manual_optimization_of_two_networks(tmp_path: Path) -> None:
    """Two optimizers on two parts of a module, stepped by hand, move both parts."""

    class Two(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 6)
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor]) -> None:
            for opt in self.optimizers():
                loss = nn.functional.mse_loss(self.two(torch.tanh(self.one(batch[0]))), batch[0])
                opt.zero_grad()
                self.manual_backward(loss)
                opt.step()

        def configure_optimizers(self) -> list[LocoProp]:
            return [LocoProp(self.one, lr=1e-3), LocoProp(self.two, lr=1e-3)]

    model = Two()
    data = TensorDataset(torch.rand(16, 6))
    before = weights(model)
    fit = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        **QUIET,
    )
    fit.fit(model, DataLoader(data, 8))
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    assert all(moved)
