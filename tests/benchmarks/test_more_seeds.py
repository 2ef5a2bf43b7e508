"""More seeds of runs: the populations that train them, and the runs that they leave."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from study.mini_study import TASK

from benchmarks import more_seeds
from benchmarks.more_seeds import Planned, Waiting, main, source_of
from torch_locoprop.study.equal_budgets import workers
from torch_locoprop.study.figures.images import Images
from torch_locoprop.study.training import matrix_population
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import POPULATION, RunFolder
from torch_locoprop.study.training.run_result import result_of
from torch_locoprop.study.training.runner import run

ROOT = Path(__file__).parents[2]
FEW = Images(None, (90, 30))
TOLERANCES = {"adam": 2e-5, "muon": 3e-4, "adamw": 0.0}
"""Those of the tests of populations; AdamW has none."""

MISSING = ("typer", "rich", "optuna", "matplotlib", "pytorch_optimizer")
PROGRAM = """
import sys
from benchmarks import more_seeds
from torch_locoprop.study.figures.images import Images

more_seeds.Images = lambda folder: Images(None, (90, 30))
more_seeds.main(sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few images, and a working directory of its own for what is not finished."""
    monkeypatch.setattr(more_seeds, "Images", lambda folder: FEW)
    monkeypatch.chdir(tmp_path)


@cache
def config(method: str, seed: int = 0) -> RunConfig:
    settings = {"lr": 0.02} if method == "muon" else {}
    return RunConfig(method, settings, seed=seed, weight_decay=1e-3, **TASK, epochs=2)


def begun(top: Path, *methods: str) -> Path:
    """Return the folder of a task with runs at seed 0."""
    for method in methods:
        run(config(method), top / "task" / f"{method}-s0", data=FEW.load("curves"))
    for path in [*top.glob("task/*/lock"), *top.glob("task/*/checkpoint.pt")]:
        path.unlink()
    return top / "task"


def words(top: Path, *methods: str) -> list[str]:
    return ["--runs", str(top), "--tasks", "task", "--methods", *methods, "--revision", "abc"]


def content(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_missing_seeds_are_those_of_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = begun(tmp_path, *TOLERANCES)
    before = content(task)
    main([*words(tmp_path, *TOLERANCES), "--jobs", "1"])
    after = content(task)
    assert {name: after[name] for name in before} == before
    assert sorted(after) == sorted(
        f"{method}-s{seed}/{file}"
        for method in TOLERANCES
        for seed in (0, 1, 2)
        for file in ("config.json", "metrics.jsonl")
    )
    for method, tolerance in TOLERANCES.items():
        for seed in (1, 2):
            made = result_of(task / f"{method}-s{seed}")
            assert made.finished
            assert made.config == config(method, seed)
            alone = run(made.config, tmp_path / "alone" / made.folder.name, data=FEW.load("curves"))
            for mine, other in zip(made.metrics, alone.metrics, strict=True):
                losses = (other.train_loss, other.test_loss)
                assert (mine.train_loss, mine.test_loss) == pytest.approx(losses, rel=tolerance)
            described, expected = (RunFolder(each.folder).description() for each in (made, alone))
            population = {} if method == "adamw" else {POPULATION: 2}
            assert described["environment"] == {**expected["environment"], **population}
            assert described["data"] == expected["data"]
            assert described["revision"] == "abc"
    assert "0 of 6 runs are still missing." in capsys.readouterr().out
    monkeypatch.setattr(workers, "train_job", None)  # what is not called cannot fail
    main(words(tmp_path, *TOLERANCES))
    assert content(task) == after


def test_a_population_that_is_interrupted_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = begun(tmp_path, "muon", "adam")
    whole = matrix_population.train_together

    def interrupted(*given: Any) -> Any:
        recorder = given[-1]

        def on_epoch(rows: Any) -> Any:
            if next(iter(rows.values())).epoch == 1:
                raise RuntimeError("lost")
            return recorder(rows)

        return whole(*given[:-1], on_epoch)

    with monkeypatch.context() as patch:
        patch.setattr(matrix_population, "train_together", interrupted)
        with pytest.raises(SystemExit, match="Failed jobs: 1"):
            main(words(tmp_path, "muon", "adam"))
    names = [*(f"adam-s{seed}" for seed in (0, 1, 2)), "muon-s0"]
    assert sorted(path.name for path in task.iterdir()) == names
    before = content(task)
    main(words(tmp_path, "muon", "adam"))
    after = content(task)
    assert {name: after[name] for name in before} == before
    assert {path.name for path in task.iterdir()} == {*names, "muon-s1", "muon-s2"}


def test_a_run_that_is_there_by_then_stays(tmp_path: Path) -> None:
    task = begun(tmp_path, "adam")
    options = more_seeds._options(words(tmp_path, "adam"))
    (planned,) = more_seeds.plan(options)
    run(config("adam", 1), task / "adam-s1", data=FEW.load("curves"))
    before = content(task)
    with pytest.raises(OSError, match="adam-s1"):
        workers.train_job(planned.job, planned.work)
    assert content(task) == before


def test_settings_of_another_method(tmp_path: Path) -> None:
    task = begun(tmp_path, "kfac@3")
    main([*words(tmp_path, "kfac@2", "sgd"), "--like", "kfac@2=kfac@3", "--seeds", "0", "1"])
    assert sorted(path.name for path in task.iterdir()) == ["kfac@2-s0", "kfac@2-s1", "kfac@3-s0"]
    for seed in (0, 1):
        made = RunFolder(task / f"kfac@2-s{seed}").config()
        assert made == replace(config("kfac@2"), seed=seed)
        assert made.settings["every"] == 2
    source = source_of(task, "kfac@3", {"kfac@3": "kfac@2"})
    assert source is not None
    assert source.config == config("kfac@3"), "a run of its own counts first"


def test_other_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = begun(tmp_path, "adam")
    before = content(task)
    monkeypatch.setattr(more_seeds, "Images", lambda folder: Images(None, (60, 30)))
    with pytest.raises(SystemExit, match="trained on other images of curves"):
        main(words(tmp_path, "adam"))
    main([*words(tmp_path, "adam"), "--plan"])
    assert content(task) == before


def test_only_what_ends_in_time_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = begun(tmp_path, "adam", "muon")
    before = content(task)
    main([*words(tmp_path, "muon", "adam"), "--minutes", "0.1"])
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(", about")[0] for line in told if "not started" in line] == [
        f"not started: task: {method}-s1, {method}-s2" for method in ("muon", "adam")
    ]
    assert told[-1] == "4 of 4 runs are still missing."
    assert content(task) == before
    work = workers.Work({}, "cpu", task, FEW, task)
    jobs = [
        Planned([{"run": str(seconds)}], work, seconds, "clock") for seconds in (900.0, 60.0, 50.0)
    ]
    waiting = Waiting(jobs, time.time() + 100)
    started = [waiting.next() for _ in range(3)]
    assert started == [(jobs[1].job, work), (jobs[2].job, work), None]
    assert waiting.left == jobs[:1]


def test_estimates_are_from_the_clock_or_from_seed_0(tmp_path: Path) -> None:
    steps = {name: row["ms"] for name, row in clock()["models"]["standard"].items()}
    for method, timed in (("muon", "muon"), ("rmsprop", "adamw"), ("kfac@10", "kfac@10")):
        run = RunFolder(tmp_path / method)
        source = more_seeds.Source(tmp_path, method, RunConfig(method, dataset="mnist"), run)
        expected = more_seeds.START + more_seeds.PER_MEMBER * 2 * 6000 * steps[timed] / 1e3
        assert source.seconds(2) == (pytest.approx(expected), "clock")
    source = source_of(begun(tmp_path, "adam"), "adam", {})
    assert source is not None
    last = result_of(tmp_path / "task/adam-s0").metrics[-1]
    assert source.seconds(2) == (more_seeds.START + last.seconds, "seed 0")


def clock() -> Any:
    return json.loads(more_seeds.CLOCK.read_text())


def test_the_longest_job_of_a_method_is_first(tmp_path: Path) -> None:
    for name, epochs in (("short", 1), ("long", 5)):
        own = replace(config("adam"), model="standard", batch_size=1000, epochs=epochs)
        for method in ("adam", "muon"):
            described = {"config": replace(own, method=method, settings={}).to_dict(), "data": {}}
            RunFolder(tmp_path / name / f"{method}-s0").begin(described)
    given = ["--tasks", "short", "long", "--methods", "muon", "adam", "--plan", "--together", "1"]
    jobs = more_seeds.plan(more_seeds._options(["--runs", str(tmp_path), *given]))
    assert [(each.work.results.name, each.job[0]["run"]) for each in jobs] == [
        (task, f"{method}-s{seed}")
        for method in ("muon", "adam")
        for task in ("long", "short")
        for seed in (1, 2)
    ]


def test_several_processes_without_packages(tmp_path: Path) -> None:
    task = begun(tmp_path, "adam")
    described = {"config": config("soap").to_dict(), "data": FEW.load("curves").metadata}
    RunFolder(task / "soap-s0").begin(described)
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in MISSING:
        (blocked / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})\n")
    command = [sys.executable, "-c", PROGRAM, *words(tmp_path, "soap", "adam"), "--jobs", "2"]
    path = os.pathsep.join(map(str, (blocked, ROOT, ROOT / "src")))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 4 runs are still missing." in done.stdout
    for method in ("adam", "soap"):
        for seed in (1, 2):
            assert result_of(task / f"{method}-s{seed}").finished
    assert len(list(task.iterdir())) == 6
