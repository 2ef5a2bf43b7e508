"""docs/results.md has the tables of the committed runs; a row names a run and how far it came."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import Metrics
from torch_locoprop.study.training.run_result import RunResult

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "results_table.py")
assert _spec is not None
assert _spec.loader is not None
results_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(results_table)


PAGE = ROOT / "docs" / "results.md"
TASKS = (
    *("mnist-tanh-standard", "mnist-tanh-deep", "mnist-tanh-wide", "mnist-tanh-standard-100"),
    *("mnist-relu-standard", "fashion-mnist-tanh-standard", "curves-tanh-standard"),
)
has_runs = pytest.mark.skipif(
    not (ROOT / "results").is_dir(), reason="a source distribution has no runs"
)


@has_runs
@pytest.mark.parametrize("task", TASKS)
def test_the_page_of_results_has_the_table_of_the_runs(task: str) -> None:
    page = PAGE.read_text()
    assert results_table.table(ROOT / "results" / task) in page
    assert f"python benchmarks/results_table.py results/{task}`" in page


@has_runs
def test_the_page_has_the_tables_of_variations_and_of_times() -> None:
    page, runs = PAGE.read_text(), ROOT / "results" / "mnist-tanh-standard"
    assert results_table.table(runs, varied=True) in page
    assert results_table.reach_table(runs, [60.0, 55.0, 53.0, 52.0]) in page


@has_runs
def test_numbers_beside_the_papers_claims_are_in_the_tables_of_the_runs() -> None:
    """Losses and seconds of the claims are in a table of the page, or in the caption of a figure."""
    before, rest = PAGE.read_text().split("## The paper's claims\n")
    claims = [row for row in rest.partition("\n## ")[0].splitlines() if row.startswith("| ")]
    assert len(claims) > 15
    captions = (ROOT / "results" / "figures").glob("*.md")
    tables = "\n".join([before, *(path.read_text() for path in captions)])
    known = set(re.findall(r"\d+\.\d+", tables))
    used = {number for row in claims for number in re.findall(r"\d+\.\d{2,}|\d+\.\d(?= s\b)", row)}
    assert len(used) > 40
    assert used - known == set()


@pytest.mark.parametrize(
    ("method", "settings", "label"),
    [
        ("locoprop-m", {}, "locoprop-m"),
        ("locoprop-m", {"local_steps": 5}, "locoprop-m, T = 5"),
        ("locoprop-m", {"solver": "adam", "lr": 1e-3}, "locoprop-m, local adam, lr = 0.001"),
        ("locoprop-m", {"lr": 2e-5, "gamma": 3.0}, "locoprop-m, lr = 2e-05, gamma = 3"),
        ("rmsprop", {"lr": 3e-5}, "rmsprop, lr = 3e-05"),
        ("kfac@10", {}, "kfac@10"),
    ],
)
def test_a_row_is_named_by_what_sets_it_apart(
    method: str, settings: dict[str, object], label: str
) -> None:
    config = RunConfig(method, settings)
    assert results_table.label(config) == label
    assert results_table.is_varied(config) == ("T = " in label or "local " in label)


def run(losses: list[float], *, seed: int = 0, diverged: bool = False) -> RunResult:
    rows = [Metrics(n, x, x + 10, float(n), 1.0, False) for n, x in enumerate(losses)]
    rows[-1] = replace(rows[-1], diverged=diverged)
    config = RunConfig("adam", {"lr": 0.5}, dataset="nowhere", seed=seed)
    return RunResult(Path("run"), config, tuple(rows))


def test_seeds_share_a_row_and_their_curves_a_mean() -> None:
    falling = [200.0 - n for n in range(101)]
    row = results_table.row([run([x + 2 for x in falling], seed=1), run(falling)])
    assert row[:3] == ["adam, lr = 0.5", "181.0", "161.0"]
    assert row[5:] == ["100.00, 102.00", "110.0, 112.0", ""]


def test_a_run_that_was_cut_off_or_diverged_says_so() -> None:
    cut_off = results_table.row([run([200.0 - n for n in range(31)])])
    assert cut_off[1:] == ["180.0", "", "", "", "170.00 in epoch 30", "", ""]
    diverged = results_table.row([run([200.0, 9000.0], diverged=True)])
    assert diverged[1:] == ["", "", "", "", "diverged in epoch 1", "", ""]
