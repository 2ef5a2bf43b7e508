"""The epoch in which the mean of a method's seeds passed a loss, in seconds if it was timed."""

from pathlib import Path

import pytest

from benchmarks import results_table
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import Metrics
from torch_locoprop.study.training.run_result import RunResult

RESULTS = Path(__file__).parents[2] / "results"


def run(losses: list[float], seed: int = 0) -> RunResult:
    rows = tuple(Metrics(n, x, x, float(n), 1.0, False) for n, x in enumerate(losses))
    return RunResult(Path("run"), RunConfig("adam", dataset="nowhere", seed=seed), rows)


def test_the_mean_of_the_seeds_counts() -> None:
    runs = [run([90, 70, 60, 54, 52]), run([90, 74, 62, 58, 50], seed=1)]
    assert results_table.passed(61, runs) == 2
    assert results_table.passed(60, runs) == 3
    assert results_table.passed(50, runs) is None


def test_a_method_that_was_not_timed_says_so() -> None:
    row = results_table.reach_row([60, 40], [run([90, 60])])
    assert row == ["adam", "1", "–", "not timed"]


def test_seconds_are_epochs_times_those_of_the_timing_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_table, "seconds_per_epoch", lambda _: 0.25)
    row = results_table.reach_row([80, 60], [run([90, 80, 70, 60])])
    assert row == ["adam", "1: 0.2 s", "3: 0.8 s", "0.250"]


@pytest.mark.skipif(not RESULTS.is_dir(), reason="a source distribution has no runs")
def test_the_committed_runs_have_a_table() -> None:
    lines = results_table.reach_table(RESULTS / "mnist-tanh-standard", [60, 52]).splitlines()
    ours = next(line for line in lines if line.startswith("| locoprop-m |"))
    assert ours.count(" s |") == 2
