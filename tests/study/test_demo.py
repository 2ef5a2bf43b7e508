"""The demo at a tiny size: what it prints, what it draws, and that a seed repeats it."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR

from torch_locoprop.study import contest, demo
from torch_locoprop.study.autoencoder import reconstruction_loss
from torch_locoprop.study.schedule import warmup_then_decay
from torch_locoprop.study.training import WEIGHT_DECAY, Run, Task, train

TINY = ["--images", "32", "--epochs", "2"]
NAMES = ["LocoProp-M", "LocoProp-S", "RMSProp", "Adam"]
SETTINGS = {method.name: method.settings for method in contest.METHODS}


def small_task(epochs: int = 2) -> Task:
    images = torch.rand(48, 12)
    return Task(images[:40], images[40:], (12, 8, 3), epochs=epochs, batch_size=10, seed=0)


def run_demo(out: Path, *more: str, terminal: bool = False) -> tuple[dict[str, Run], str]:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100)
    return demo.main([*TINY, "--out", str(out), *more], console), text.getvalue()


def test_writes_figure_table_and_lines(tmp_path: Path) -> None:
    out = tmp_path / "new folder" / "demo.png"
    runs, text = run_demo(out)
    assert list(runs) == NAMES
    assert len({run.train_loss[0] for run in runs.values()}) == 1, "all start from one model"
    height, width, _ = imread(out).shape
    assert (width, height) == (1200, 900)
    for name, run in runs.items():
        assert len(run.train_loss) == len(run.test_loss) == len(run.seconds) == 3
        assert run.seconds == sorted(run.seconds)
        row = next(line for line in text.splitlines() if "│" in line and name in line)
        assert f"{run.train_loss[-1]:.1f}" in row
        assert f"{run.test_loss[-1]:.1f}" in row
        assert f"{name:<11} epoch   2/2" in text
    assert str(out.name) in text


def test_a_seed_repeats_the_losses_exactly(tmp_path: Path) -> None:
    first, again = (run_demo(tmp_path / "demo.png", "--seed", "5")[0] for _ in range(2))
    for name in NAMES:
        assert first[name].train_loss == again[name].train_loss
        assert first[name].test_loss == again[name].test_loss


def test_another_seed_is_another_task() -> None:
    one, other = (contest.contest_task(images=8, epochs=1, seed=seed) for seed in (0, 1))
    assert not torch.equal(one.train, other.train)
    assert not torch.equal(one.model().encoder[0].weight, other.model().encoder[0].weight)
    assert not torch.equal(one.train[:2], one.test)


def test_a_terminal_gets_bars(tmp_path: Path) -> None:
    _, text = run_demo(tmp_path / "demo.png", terminal=True)
    assert "━" in text
    assert "epoch   2/2" not in text


def test_help_explains_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("--epochs", "--seed", "--out", "--images", "examples:", "convex problem"):
        assert word in text


def test_too_few_images_are_an_error() -> None:
    with pytest.raises(ValueError, match="Invalid images=3"):
        demo.main(["--images", "3"])


@pytest.mark.filterwarnings("ignore:The local solution")
def test_training_stops_when_the_loss_is_not_finite() -> None:
    _, run = train(small_task(epochs=5), SETTINGS["RMSProp"] | {"lr": 1e30})
    assert run.diverged
    assert len(run.train_loss) < 6


@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss(name: str) -> None:
    _, run = train(small_task(epochs=10), SETTINGS[name])
    assert run.train_loss[-1] < run.train_loss[0]
    assert math.isfinite(run.test_loss[-1])


def test_adam_baseline_is_torch_adam() -> None:
    """At ε far below every root of the second moment, TensorFlow's Adam and PyTorch's agree."""
    task = small_task()
    settings = SETTINGS["Adam"] | {"eps": 1e-12}
    _, run = train(task, settings)
    model = task.model()
    weights = [p for p in model.parameters() if p.dim() == 2]
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=settings["lr"],
        betas=(settings["momentum"], settings["decay"]),
        eps=1e-12,
    )
    schedule = LambdaLR(optimizer, warmup_then_decay(warmup_steps=1, total_steps=task.total_steps))
    for batches in task.shuffled_epochs():
        for images in batches:
            loss = reconstruction_loss(model(images), images)
            optimizer.zero_grad()
            loss.backward()
            with torch.no_grad():
                for weight in weights:
                    weight.mul_(1 - optimizer.param_groups[0]["lr"] * WEIGHT_DECAY)
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        final = reconstruction_loss(model(task.train), task.train).item()
    assert run.train_loss[-1] == pytest.approx(final, rel=1e-5)


def test_the_settings_are_the_winners_of_the_search() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "tune_demo.json"
    record = json.loads(path.read_text())
    assert record["epochs"] == contest.EPOCHS
    for method in contest.METHODS:
        trials = record["methods"][method.name]
        assert len(trials) == record["trials"]
        finite = [trial for trial in trials if trial["train_loss"] is not None]
        best = min(finite, key=lambda trial: trial["train_loss"])
        assert method.tuned == best["setting"]
