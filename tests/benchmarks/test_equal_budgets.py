"""The protocol of equal budgets by a command that needs torch alone, and the older folder's trials."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import equal_budgets
from torch_locoprop.study.equal_budgets.trial_table import table
from torch_locoprop.study.equal_budgets.trials import (
    identity,
    position,
    read_results,
    read_trials,
    space_of,
    space_to_dict,
    spread,
)
from torch_locoprop.study.methods import in_equal_budgets

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results" / "equal-budgets" / "standard"

WITHOUT_PACKAGES = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"typer", "rich", "optuna", "matplotlib", "pytorch_optimizer"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from dataclasses import replace
from benchmarks.equal_budgets import main
from torch_locoprop.study.equal_budgets import study

task = {"dataset": "curves", "model": "784-6-3", "batch_size": 30, "warmup_epochs": 1, "epochs": 2}
study.QUICK = replace(study.QUICK, tasks={"standard": task}, images=(120, 30))
main(sys.argv[1:])
"""
"""A program that runs the command on small tasks, on a machine where only torch is installed."""


def line(method: str, trial: int, loss: float | None, seed: int = 0, **settings: Any) -> Any:
    return {
        "method": method,
        "trial": trial,
        "seed": seed,
        "settings": settings,
        "train_loss": loss,
        "test_loss": None if loss is None else loss + 10,
        "diverged": loss is None,
    }


def test_the_committed_trials_are_those_that_are_drawn() -> None:
    if not COMMITTED.is_dir():
        pytest.skip("a source distribution has no results")
    content = read_trials(COMMITTED)
    first = [t for t in content["trials"] if t["trial"] < 12 and t["seed"] == 0]
    again = [t for method in content["spaces"] for t in spread(content, method, 0, 12)]
    assert first == again
    assert set(content["spaces"]) == set(in_equal_budgets())
    assert content["spaces"] == {name: space_to_dict(name) for name in content["spaces"]}


def test_settings_are_spread_over_the_space() -> None:
    methods = ("muon", "kfac@10", "rmsprop", "locoprop-s")
    content = {"spaces": {method: space_to_dict(method) for method in methods}}
    for method in methods:
        own = [t["settings"] for t in spread(content, method, 0, 8)]
        for name, domain in space_of(content, method).items():
            if name == "gamma":
                assert {settings[name] for settings in own} <= set(domain.ends)
                continue
            places = [position(settings[name], domain) for settings in own]
            assert {int(8 * place) for place in places} == set(range(8))  # one in each eighth


def results_in(folder: Path) -> dict[Any, Any]:
    """Return the results by trial; each trial has one."""
    found = read_results(folder / "standard/results.jsonl")
    by_trial = {identity(line): line for line in found}
    assert len(by_trial) == len(found)
    return by_trial


def test_the_protocol_without_packages_in_several_calls_on_several_machines(
    tmp_path: Path,
) -> None:
    """Killed once; the files of each call are carried to the next one, which continues."""
    given = [
        *("--quick", "--tasks", "standard", "--methods", "soap", "locoprop-spectral", "adam"),
        *("--budget", "4", "--seeds", "0", "1", "--together", "2", "--device", "cpu"),
        *("--epochs", "30", "--revision", "abc"),
    ]
    command = [sys.executable, "-c", WITHOUT_PACKAGES, "run", *given]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}

    def call(folder: Path, *more: str) -> str:
        whole = [*command, "--out", str(folder), *more]
        done = subprocess.run(whole, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = tmp_path / "first"
    process = subprocess.Popen([*command, "--out", str(first)], env=environment, cwd=tmp_path)
    while not read_results(first / "standard/results.jsonl"):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    second = tmp_path / "second" / "there"
    for name in ("study.json", "standard/trials.json", "standard/results.jsonl"):
        (second / name).parent.mkdir(parents=True, exist_ok=True)
        (second / name).write_bytes((first / name).read_bytes())
    # One of a population's trials ended: the other one needs no package of its method either.
    lines = (first / "standard/results.jsonl").read_text().splitlines(keepends=True)
    (second / "standard/results.jsonl").write_text("".join(lines[:1]))
    ended = results_in(second)
    assert "soap: not started" in call(second, "--minutes", "0")
    assert results_in(second) == ended
    out = call(second)
    assert out.rstrip().endswith("at most 0 left, about 0.0 minutes.")
    more = call(second, "--methods", "sgd")
    assert "sgd: 0 trials" not in more
    assert "adam: 6" in more or "adam: 8" in more, "methods of earlier calls stay"
    whole = results_in(second)
    assert {key: whole[key] for key in ended} == ended, "no finished trial is lost or trained again"
    for method in ("soap", "locoprop-spectral", "adam", "sgd"):
        own = [line for line in whole.values() if line["method"] == method]
        assert sum(line["stage"] == "search" for line in own) == 4
        assert {line["seed"] for line in own if line["stage"] == "final"} == {0, 1}
    assert {line["revision"] for line in whole.values()} == {"abc"}
    assert {line["together"] for line in whole.values()} <= {1, 2}
    assert "so far" not in (second / "standard/table.md").read_text()
    assert sorted(path.name for path in (second / "standard").iterdir()) == [
        *("results.jsonl", "table.md", "trials.json")
    ]


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"spaces": {method: space_to_dict(method) for method in ("muon", "rmsprop")}}
    (tmp_path / "trials.json").write_text(json.dumps(content))
    results = [
        line("muon", 0, 51.0, lr=0.099, momentum=0.989),
        line("muon", 1, 55.5, lr=0.01, momentum=0.9),
        line("muon", 2, None, lr=0.05, momentum=0.9),
        line("muon", 0, 51.5, seed=2, lr=0.099, momentum=0.989),
        line("muon", 0, 51.25, seed=1, lr=0.099, momentum=0.989),
        line("rmsprop", 0, None, lr=1.0),
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in results))
    equal_budgets.main(["table", str(tmp_path)])
    best = "51.00, 51.25, 51.50 | lr 0.099, momentum 0.989 | lr (high), momentum (high) |"
    row = f"| muon | 3 | 1 | 51.00 | 61.0 | 55.50 | {best}"
    assert capsys.readouterr().out.splitlines()[2:] == [row]
    assert table(content, results).splitlines()[2:] == [row]
