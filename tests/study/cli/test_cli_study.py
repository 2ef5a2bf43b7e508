"""`locoprop study`: a whole study in miniature, its plan, and its continuation."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mini_study as mini
import pytest

from torch_locoprop.study import methods
from torch_locoprop.study.cli import exit_codes
from torch_locoprop.study.equal_budgets import plan, study
from torch_locoprop.study.equal_budgets.trials import read_results
from torch_locoprop.study.training import runner

WORDS = ["study", "--quick", "--tasks", "standard", "--methods", "adam,muon", "--device", "cpu"]
MINI = [*WORDS, "--budget", "2", "--seeds", "0,1", "--out", "there"]


@pytest.fixture(autouse=True)
def _small_tasks_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setattr(study, "QUICK", mini.SMALL)
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_one_command_runs_the_whole_protocol(run: Any) -> None:
    code, out, err = run(*MINI)
    assert code == 0
    assert "standard, 2 trials of each method, seeds 0, 1" in out
    assert "there/standard/table.md" in out
    assert "What is left" in err
    assert "standard: adam search 0 at seed 0, train " in err
    assert err.rstrip().endswith("; 0 s left")
    table = Path("there/standard/table.md").read_text()
    assert "| muon |" in table
    lines = read_results(Path("there/standard/results.jsonl"))
    assert sum(line["stage"] == "search" for line in lines) == 4
    code, out, err = run("study", "--resume", "--out", "there", "--json", "--quiet")
    assert (code, err) == (0, "")
    (found,) = json.loads(out).values()
    assert {row["method"] for row in found} == {"adam", "muon"}
    assert all(row["finished"] for row in found)
    assert read_results(Path("there/standard/results.jsonl")) == lines, "nothing is trained again"


def test_a_study_that_is_stopped_while_it_is_planned_is_continued(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(plan, "seconds_of_run", lambda *_: signal.raise_signal(signal.SIGINT))
        code, _, err = run(*MINI, "--quiet")
    assert code == exit_codes.INTERRUPTED
    assert err.endswith("Continue with: locoprop study --resume --out there\n")
    code, out, _ = run("study", "--resume", "--out", "there", "--plan", "--json")
    assert {each["method"] for each in json.loads(out)["plan"]} == {"adam", "muon"}


def test_a_folder_without_a_study_is_not_continued(run: Any) -> None:
    code, _, err = run("study", "--resume", "--out", "there")
    assert code == 1
    assert "there has no study to continue. Choose its folder (--out)" in " ".join(err.split())
    assert not Path("there").exists()


@pytest.mark.parametrize(
    ("kind", "word", "code"),
    [
        (signal.SIGINT, "Interrupted", exit_codes.INTERRUPTED),
        (signal.SIGTERM, "Terminated", exit_codes.TERMINATED),
    ],
)
def test_a_study_continues_within_a_trial(
    run: Any, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals, word: str, code: int
) -> None:
    own, steps = runner._Training._step, list[int]()

    def step(*given: Any) -> None:
        steps.append(1)
        if len(steps) == 6:
            signal.raise_signal(kind)
        own(*given)

    with monkeypatch.context() as patch:
        patch.setattr(runner._Training, "_step", step)
        found, _, err = run(*MINI, "--quiet")
    assert found == code
    assert err == f"{word}. Continue with: locoprop study --resume --out there\n"
    (folder,) = Path("there/standard/running").iterdir()
    assert (folder / "checkpoint.pt").is_file()
    del steps[:]
    with monkeypatch.context() as patch:
        patch.setattr(runner._Training, "_step", lambda *given: (steps.append(1), own(*given))[1])
        assert run("study", "--resume", "--out", "there", "--quiet")[0] == 0
    finals = sum(
        line["stage"] == "final" for line in read_results(Path("there/standard/results.jsonl"))
    )
    search, final = 4 * 2 * 4, finals * 2 * 4
    assert len(steps) == search + final - 6, "no step is repeated"


def test_the_plan_trains_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "seconds_of_run", lambda config, images: 30.0)
    code, out, _ = run(*MINI, "--plan")
    assert code == 0
    assert not Path("there").exists()
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in out.splitlines()]
    assert ["standard", "0", "12", "about 6 min"] in rows
    assert ["all", "0", "12", "about 6 min"] in rows
    found = json.loads(run(*MINI, "--plan", "--json", "--jobs", "2")[1])
    assert found["seconds"] == 180.0
    assert [each["left"] for each in found["plan"]] == [6, 6]


def test_time_is_a_limit(run: Any) -> None:
    code, out, err = run(*MINI, "--minutes", "0", "--quiet")
    assert code == 0
    assert err == "adam: not started\nmuon: not started\n"
    assert "12 trials are left. Give the command again with --resume." in out


def test_a_study_is_not_begun_twice_and_not_mixed(run: Any) -> None:
    run(*MINI, "--minutes", "0", "--quiet")
    code, _, err = run(*MINI)
    assert code == exit_codes.FAILED
    assert "there already has a study. Continue it with --resume" in err
    code, _, err = run("study", "--resume", "--out", "there", "--budget", "5", "--seeds", "3")
    assert code == exit_codes.FAILED
    assert "budget is 2 there and 5 here, seeds is (0, 1) there and (3,) here" in err
    words = ("study", "--resume", "--out", "there", "--methods", "sgd", "--plan", "--json")
    found = json.loads(run(*words)[1])["plan"]
    assert [each["method"] for each in found] == ["adam", "muon", "sgd"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "standrd"], "Did you mean 'standard'"),
        (["--methods", "adem"], "Did you mean 'adam'"),
        (["--seeds", "x"], "Invalid --seeds 'x'"),
        (["--budget", "0"], "Invalid budget=0"),
    ],
)
def test_wrong_usage(run: Any, words: list[str], message: str) -> None:
    code, out, err = run("study", "--quick", "--device", "cpu", *words)
    assert (code, out) == (exit_codes.USAGE, "")
    assert message in err
    assert not Path("studies").exists()


def test_a_method_without_its_package_is_left_out_and_named(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = methods.Method.missing_package.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        methods.Method,
        "missing_package",
        property(lambda self: "needs that" if self.name == "soap" else own(self)),
    )
    monkeypatch.setattr(plan, "seconds_of_run", lambda config, images: 1.0)
    code, out, err = run("study", "--quick", "--tasks", "standard", "--plan", "--json")
    assert code == 0
    assert "soap is left out: it needs that.\n" in err
    assert "soap" not in {each["method"] for each in json.loads(out)["plan"]}


def test_a_failure_is_an_exit_code(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(study.workers, "run", fail)
    code, out, err = run(*MINI, "--quiet")
    assert code == exit_codes.FAILED
    assert "adam: failed, broken\n" in err
    assert "0 trials so far" in out
