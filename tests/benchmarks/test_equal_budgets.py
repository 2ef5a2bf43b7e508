"""Equal budgets in miniature: drawing, running, resuming and the table."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import equal_budgets
from torch_locoprop.study.data import datasets
from torch_locoprop.study.equal_budgets import workers
from torch_locoprop.study.equal_budgets.trial_table import table
from torch_locoprop.study.equal_budgets.trials import position, read_results, read_trials, space_of
from torch_locoprop.study.methods import in_equal_budgets

METHODS = ["muon", "kfac@10", "rmsprop", "locoprop-s"]
TINY = ["--device", "cpu", "--model", "784-6-3", "--epochs", "2", "--limit", "1200"]


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated images instead of downloaded ones, in this process instead of others."""
    images = datasets.some_curves(1200, 100)
    monkeypatch.setattr(datasets, "load", lambda name, **_: images)
    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda _: _Context)
    monkeypatch.setattr(workers, "wait", lambda sentinels, timeout: None)
    monkeypatch.setattr(workers.signal, "signal", lambda number, handler: None)


class _InThisProcess:
    """A process that has ended when it has started."""

    def __init__(self, target: Any, args: Any, daemon: bool) -> None:
        self._call = lambda: target(*args)
        self.exitcode: int | None = None
        self.sentinel = 0

    def start(self) -> None:
        try:
            self._call()
            self.exitcode = 0
        except SystemExit:
            self.exitcode = 1


class _Context:
    Process = _InThisProcess


def drawn(folder: Path, trials: int = 3) -> dict[str, Any]:
    arguments = ["--folder", str(folder), "--trials", str(trials), "--methods", *METHODS]
    equal_budgets.main(["draw", *arguments])
    return read_trials(folder)


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


def test_the_committed_trials_are_those_that_are_drawn(tmp_path: Path) -> None:
    if not equal_budgets.FOLDER.is_dir():
        pytest.skip("a source distribution has no results")
    equal_budgets.main(["draw", "--folder", str(tmp_path)])
    committed, again = read_trials(equal_budgets.FOLDER), read_trials(tmp_path)
    assert {k: v for k, v in committed.items() if k != "trials"} == {
        k: v for k, v in again.items() if k != "trials"
    }
    first = [t for t in committed["trials"] if t["trial"] < 12 and t["seed"] == 0]
    assert first == again["trials"]
    assert len(first) == 12 * len(in_equal_budgets())


def test_settings_are_spread_over_the_space(tmp_path: Path) -> None:
    content = drawn(tmp_path, trials=8)
    for method in METHODS:
        own = [t["settings"] for t in content["trials"] if t["method"] == method]
        for name, domain in space_of(content, method).items():
            if name == "gamma":
                assert {settings[name] for settings in own} <= set(domain.ends)
                continue
            places = [position(settings[name], domain) for settings in own]
            assert {int(8 * place) for place in places} == set(range(8))  # one in each eighth


def test_more_trials_around_the_best(tmp_path: Path) -> None:
    drawn(tmp_path)
    best = {"lr": 1e-5, "gamma": 100.0, "momentum": 0.99, "decay": 0.99, "eps": 1e-8}
    results = [
        line("locoprop-s", 0, 60.0, **(best | {"lr": 1.0})),
        line("locoprop-s", 1, 52.0, **best),
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in results))
    for arguments in (["--around", "--trials", "5"], ["--winners", "1", "2"]):
        folder = ["--folder", str(tmp_path), "--methods", "locoprop-s"]
        equal_budgets.main(["draw", *arguments, *folder])
    content = read_trials(tmp_path)
    new = [t for t in content["trials"] if t["method"] == "locoprop-s"][3:]
    assert [(t["trial"], t["seed"]) for t in new] == [(n, 0) for n in range(3, 8)] + [
        (1, 1),
        (1, 2),
    ]
    assert all(t["settings"] == best for t in new[5:])
    for name, domain in space_of(content, "locoprop-s").items():
        values = [t["settings"][name] for t in new[:5]]
        if name == "gamma":
            assert set(values) <= {10.0, 100.0, 500.0}
        else:
            distances = [position(v, domain) - position(best[name], domain) for v in values]
            assert max(map(abs, distances)) <= 0.1251
            assert max(distances) - min(distances) > 0.1


def test_trials_are_run_once_and_the_rest_later(
    tmp_path: Path, curves: None, capsys: pytest.CaptureFixture[str]
) -> None:
    content = drawn(tmp_path)
    content["task"]["dataset"] = "curves"
    (tmp_path / "trials.json").write_text(json.dumps(content))
    out = tmp_path / "out"
    folders = ["--folder", str(tmp_path), "--out", str(out)]
    equal_budgets.main(["run", *folders, *TINY, "--methods", "muon", "rmsprop"])
    assert "6 trials ended, 0 are left." in capsys.readouterr().out
    first = read_results(out / "results.jsonl")
    (out / "results.jsonl").rename(tmp_path / "results.jsonl")
    equal_budgets.main(["run", *folders, *TINY, "--methods", *METHODS])
    assert "6 trials ended, 0 are left." in capsys.readouterr().out
    second = read_results(out / "results.jsonl")
    assert [each["method"] for each in first] == ["muon"] * 3 + ["rmsprop"] * 3
    assert {each["method"] for each in second} == {"kfac@10", "locoprop-s"}
    for each in first + second:
        assert len(each["train"]) == each["epoch"] + 1
        assert each["diverged"] or each["train"][-1] == pytest.approx(each["train_loss"], rel=1e-5)
        assert each["config"]["settings"].items() >= each["settings"].items()
    assert "| muon | 3 | 0 |" in table(content, first)


def test_a_population_that_fails_does_not_stop_the_others(
    tmp_path: Path,
    curves: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = drawn(tmp_path)
    content["task"]["dataset"] = "curves"
    (tmp_path / "trials.json").write_text(json.dumps(content))
    arguments = ["--folder", str(tmp_path), *TINY, "--methods", "kfac@10", "rmsprop"]
    monkeypatch.setattr(workers.matrix_population, "train_together", None)
    with pytest.raises(SystemExit, match="1 of 2 populations failed"):
        equal_budgets.main(["run", *arguments])
    assert "kfac@10: failed" in capsys.readouterr().out
    assert len(read_results(tmp_path / "results.jsonl")) == 3


def test_no_trial_is_begun_after_the_time(
    tmp_path: Path, curves: None, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn(tmp_path)
    equal_budgets.main(
        ["run", "--folder", str(tmp_path), *TINY, "--minutes", "0", "--methods", "muon"]
    )
    shown = capsys.readouterr().out
    assert "muon: not started" in shown
    assert "0 trials ended, 3 are left." in shown


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn(tmp_path)
    results = [
        line("muon", 0, 51.0, lr=0.099, momentum=0.989),
        line("muon", 1, 55.5, lr=0.01, momentum=0.9),
        line("muon", 2, None, lr=0.05, momentum=0.9),
        line("muon", 0, 51.5, seed=2, lr=0.099, momentum=0.989),
        line("muon", 0, 51.25, seed=1, lr=0.099, momentum=0.989),
        line("rmsprop", 0, None, lr=1.0),
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in results))
    best = "51.00, 51.25, 51.50 | lr 0.099, momentum 0.989 | lr (high), momentum (high) |"
    for arguments, row in (
        ([], f"| muon | 3 | 1 | 51.00 | 61.0 | 55.50 | {best}"),
        (["--first", "1"], f"| muon | 1 | 0 | 51.00 | 61.0 | 51.00 | {best}"),
    ):
        equal_budgets.main(["table", "--folder", str(tmp_path), *arguments])
        assert capsys.readouterr().out.splitlines()[2:] == [row]
