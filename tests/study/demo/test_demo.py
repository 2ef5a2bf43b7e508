"""The demo at a tiny size: its output and figure, and that a seed repeats it."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from matplotlib.image import imread

from torch_locoprop.study.demo import run
from torch_locoprop.study.demo.figure import verdict
from torch_locoprop.study.methods import label
from torch_locoprop.study.training.run_result import RunResult

NAMES = ["LocoProp spectral", "Muon", "RMSProp", "Adam"]
# Train losses of the tiny demo with seed 0, after two epochs of one batch each.
AT_THE_END = {"LocoProp spectral": 447.9, "Muon": 497.1, "RMSProp": 529.3, "Adam": 378.8}


def tiny_demo(out: Path, seed: int = 0) -> dict[str, RunResult]:
    results = run.main(images=32, epochs=2, seed=seed, out=out)
    return {label(result.config.method): result for result in results}


def test_writes_figure_table_and_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new folder" / "demo.png"
    results = tiny_demo(out)
    text = capsys.readouterr().out
    assert list(results) == NAMES
    height, width, _ = imread(out).shape
    assert (width, height) == (1200, 900)
    for name, result in results.items():
        first, _, last = result.metrics
        assert first.train_loss == results["Adam"].metrics[0].train_loss
        assert first.train_loss == pytest.approx(545.1, rel=1e-3)
        assert last.train_loss == pytest.approx(AT_THE_END[name], rel=5e-3)
        row = next(line for line in text.splitlines() if "│" in line and name in line)
        assert f"{last.train_loss:.1f}" in row
        assert f"{last.test_loss:.1f}" in row
        assert f"{name:<17}  epoch 2/2" in text
        assert not result.folder.exists(), "nothing but the figure stays"
    assert str(out) in text
    best = min(results, key=lambda name: results[name].metrics[-1].train_loss)
    assert f"By the epoch {best} is ahead" in text
    assert "By the clock" in text


def test_a_seed_repeats_the_losses_exactly_and_another_is_another_task(tmp_path: Path) -> None:
    first, again, other = (tiny_demo(tmp_path / "demo.png", seed) for seed in (5, 5, 6))
    for name in NAMES:
        one, same, another = (
            [(row.train_loss, row.test_loss) for row in results[name].metrics]
            for results in (first, again, other)
        )
        assert one == same
        assert one[0] != another[0]


def test_a_terminal_gets_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    tiny_demo(tmp_path / "demo.png")
    text = capsys.readouterr().out
    assert "━" in text
    assert "epoch 2/2" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["--epochs", "--seed", "--out", "--images", "--seed 1", "convex problem"]),
        (["--images", "3"], ["Invalid value for '--images'"]),
        (["--epochs", "0"], ["Invalid value for '--epochs'"]),
    ],
)
def test_help_and_errors_explain(
    arguments: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    with pytest.raises(SystemExit) as stop:
        typer.run(run.main)
    assert stop.value.code == (0 if arguments == ["--help"] else 2)
    text = "".join(capsys.readouterr())
    for word in words:
        assert word in text


def test_the_methods_differ_in_nothing_but_their_settings() -> None:
    configs = run.configs(epochs=3, seed=1)
    assert [label(config.method) for config in configs] == NAMES
    assert len({replace(each, method="sgd", settings={}).name("") for each in configs}) == 1


def test_the_settings_are_the_winners_of_the_search() -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "tune_demo.json"
    record = json.loads(path.read_text())
    assert record["epochs"] == run.EPOCHS
    for name, settings in run.TUNED.items():
        trials = record["methods"][name]
        assert len(trials) == record["trials"]
        finite = [trial for trial in trials if trial["train_loss"] is not None]
        assert settings == min(finite, key=lambda trial: trial["train_loss"])["setting"]


def test_the_verdict_names_who_is_ahead() -> None:
    def ran(method: str, seconds: list[float], losses: list[float], diverged: bool = False) -> Any:
        rows = [
            SimpleNamespace(seconds=at, train_loss=loss)
            for at, loss in zip(seconds, losses, strict=True)
        ]
        config = SimpleNamespace(method=method, epochs=2)
        return SimpleNamespace(config=config, metrics=rows, diverged=diverged)

    slow = ran("general", [0.0, 2.0, 4.0], [9.0, 5.0, 1.0])
    quick = ran("adam", [0.0, 1.0, 2.5], [9.0, 6.0, 4.0])
    gone = ran("muon", [0.0, 1.0, 2.0], [9.0, 3.0, math.nan], diverged=True)
    assert verdict([slow, quick]) == (
        "By the epoch LocoProp is ahead: train loss 1.0 after 2 epochs. "
        "By the clock Adam is ahead: 4.0 after 2.5 s, when Adam ends."
    )
    assert "By the epoch LocoProp" in verdict([slow, quick, gone])
    assert "By the clock LocoProp is ahead: 5.0 after 2.0 s, when Muon ends." in verdict(
        [slow, quick, gone]
    )
