"""The protocol of equal budgets: its stages, winners, plan, table, and continuation after any kill."""

import json
import math
import multiprocessing
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mini_study as mini
import pytest
import torch

from torch_locoprop.study import methods
from torch_locoprop.study.equal_budgets import plan, reached_losses, study, summary, trials, workers
from torch_locoprop.study.equal_budgets.study import How, Study, StudyDescription, stored
from torch_locoprop.study.equal_budgets.task_study import Budget, SearchImages, TaskStudy
from torch_locoprop.study.figures.images import Images
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.training.run_folder import RunFolder


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "QUICK", mini.SMALL)


def lines_of(folder: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the results by trial; each trial has one."""
    found = trials.read_results(folder / "standard/results.jsonl")
    by_trial = {trials.identity(line): line for line in found}
    assert len(by_trial) == len(found)
    return by_trial


# The protocol ---------------------------------------------------------------------------------


def test_a_study_gives_every_method_the_same_and_then_seeds_of_both_winners(
    tmp_path: Path,
) -> None:
    own = Study(tmp_path, mini.description(methods=("adam", "muon", "sgd")))
    assert own.run("cpu") == 0
    found = lines_of(tmp_path)
    for method in own.description.methods:
        search = [line for line in found.values() if line["method"] == method]
        search, finals = (
            [line for line in search if line["stage"] == stage] for stage in ("search", "final")
        )
        assert sorted(line["trial"] for line in search) == [0, 1, 2]
        assert {line["epoch"] for line in search if not line["diverged"]} == {2}, "none is pruned"
        ended = [line for line in search if not line["diverged"]]
        best = {
            min(ended, key=lambda line: line[loss])["trial"]
            for loss in ("train_loss", "held_out_loss")
        }
        assert {(line["trial"], line["seed"]) for line in finals} == {
            (trial, seed) for trial in best for seed in (0, 1)
        }
        for line in finals:
            (origin,) = (each for each in search if each["trial"] == line["trial"])
            assert line["settings"] == origin["settings"]
    assert not (tmp_path / "standard/running").exists()


def test_the_search_never_sees_the_test_images(tmp_path: Path) -> None:
    Study(tmp_path, mini.description(1, methods=("adam",))).run("cpu")
    images = Images(None, mini.SMALL.images)
    whole = images.load("curves")
    search = SearchImages(images, 0.1).load("curves")
    assert (len(search.train), len(search.test)) == (108, 12)
    parts = torch.cat([search.train, search.test])
    assert torch.equal(parts.sum(1).sort()[0], whole.train.sum(1).sort()[0]), "a partition"
    for line in lines_of(tmp_path).values():
        is_search = line["stage"] == "search"
        expected = search if is_search else whole
        assert line["data"]["fingerprint"] == expected.fingerprint
        assert ("test_loss" in line, "held_out_loss" in line) == (not is_search, is_search)


def test_the_second_half_is_around_the_best_of_the_first(tmp_path: Path) -> None:
    own = Study(tmp_path, mini.description(6, methods=("adam",))).tasks[0]
    first = own.next_trials()
    assert [trial["trial"] for trial in first] == [0, 1, 2]
    assert own.next_trials() == first, "what is drawn stays"
    for trial in first:
        result(own, trial, loss=50.0 + abs(trial["trial"] - 1))
    second = own.next_trials()
    assert [trial["trial"] for trial in second] == [3, 4, 5]
    space = trials.space_of(own.content, "adam")
    for name, domain in space.items():
        center = trials.position(first[1]["settings"][name], domain)
        for trial in second:
            assert abs(trials.position(trial["settings"][name], domain) - center) <= 0.126


@pytest.mark.parametrize("method", methods.names())
@pytest.mark.parametrize("end", [0.0, 1.0])
def test_settings_beyond_the_ends_of_the_space_are_valid(method: str, end: float) -> None:
    content = trials.empty({}, [method])
    space = trials.space_of(content, method)
    best = {name: trials._at(end, domain) for name, domain in space.items()}
    line = {"method": method, "seed": 0, "diverged": False, "train_loss": 1.0, "settings": best}
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    for trial in trials.around(content, [line], method, 8):
        if not methods.get(method).missing_package:
            RunConfig(method, trial["settings"]).build_optimizer(model)


def test_diverged_trials_count_and_a_method_without_any_other_ends(tmp_path: Path) -> None:
    own = Study(tmp_path, mini.description(4, methods=("adam",))).tasks[0]
    for _ in range(2):
        for trial in own.next_trials():
            result(own, trial, loss=None)
    assert own.next_trials() == []
    assert own.left("adam", own.results()) == 0
    drawn = [trial["settings"]["lr"] for trial in own.content["trials"]]
    assert len(set(drawn)) == 4
    assert "| adam | all diverged |" in summary.table(own)


def result(task: TaskStudy, trial: dict[str, Any], loss: float | None, test: float = 1.0) -> None:
    """Store a result without training; the loss is halfway down after the first of two epochs."""
    second = "held_out" if trial["stage"] == "search" else "test"
    line = {
        **trial,
        "epoch": 2,
        "train_loss": loss,
        f"{second}_loss": None if loss is None else test,
        "diverged": loss is None,
        "seconds": 3.0,
        "train": [] if loss is None else [100.0, (100.0 + loss) / 2, loss],
        "wall": 4.0,
        "config": {"epochs": 2},
    }
    with task.results_file.open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_the_table_has_both_winners_with_their_spread(tmp_path: Path) -> None:
    own = Study(tmp_path, mini.description(1)).tasks[0]
    for trial in own.next_trials():
        if trial["method"] == "adam":
            result(own, trial, 50.0, test=60.0)
    for trial in own.next_trials():
        if trial["method"] == "adam":
            result(own, trial, 50.0 + 2 * trial["seed"], test=70.0 + trial["seed"])
    first, second = summary.rows(own)
    train, test = "51.00 ± 1.41", "70.50 ± 0.71"
    assert first[:6] == ["adam", train, test, train, test, "3.0"]
    assert second[:2] == ["muon", "0 trials so far"], "never unequal budgets in one table"
    assert summary.with_spread([1.0, None]) == "1 of 2 diverged"
    assert summary.with_spread([1.0]) == "1.00"


def test_the_table_has_the_settings_of_both_winners(tmp_path: Path) -> None:
    own = Study(tmp_path, mini.description(2, methods=("adam",))).tasks[0]
    for train, held_out in ((50.0, 61.0), (51.0, 60.0)):
        (trial,) = own.next_trials()
        result(own, trial, train, test=held_out)
    first, second = own.content["trials"]
    for trial in own.next_trials():
        result(own, trial, 50.0)
    (row,) = summary.rows(own)
    settings, edges = row[summary.HEAD.index("settings") :]
    by_train, by_held_out = settings.split("; by held-out: ")
    for text, trial in ((by_train, first), (by_held_out, second)):
        assert f"lr {trial['settings']['lr']:.4g}, momentum" in text
    assert len(edges.split("; by held-out: ")) == 2


def finished(folder: Path, losses: dict[str, tuple[float, float]]) -> TaskStudy:
    """A task whose methods have one trial, and these train losses at the two seeds of the winner."""
    own = Study(folder, mini.description(1, methods=tuple(losses))).tasks[0]
    for trial in own.next_trials():
        result(own, trial, 50.0)
    for trial in own.next_trials():
        loss = losses[trial["method"]][trial["seed"]]
        result(own, trial, loss, test=100.0 - loss)
    return own


def test_epochs_and_seconds_to_losses_near_the_lowest(tmp_path: Path) -> None:
    """Muon ends at 40 on average, so the targets are 48, 44, 42 and 40.8."""
    own = finished(tmp_path, {"adam": (43.0, 47.5), "muon": (40.0, 40.0)})
    head, _, *rows = [x for x in summary.table(own).splitlines() if x.startswith("| ")][-4:]
    assert head == (
        "| method | train loss 48.00 | train loss 44.00 | train loss 42.00 | train loss 40.80 |"
    )
    reached = "2.0 ± 0.0: 3.0 ± 0.0 s"
    assert rows == [
        f"| muon | {' | '.join([reached] * 4)} |",
        f"| adam | {reached} | – | – | – |",
    ]


def test_the_profile_is_over_tasks_that_all_methods_have_finished(tmp_path: Path) -> None:
    outcomes = {
        "one": summary.summary(
            finished(tmp_path / "1", {"adam": (50.0, 50.0), "muon": (40.0, 40.0)})
        ),
        "two": summary.summary(
            finished(tmp_path / "2", {"adam": (30.0, 30.0), "muon": (31.0, 31.0)})
        ),
    }
    text = reached_losses.profile_table(outcomes)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert rows[:3] == [
        "| Train loss | within 1 % | within 2 % | within 5 % | within 10 % | within 20 % "
        "| within 50 % | within 100 % |",
        "| muon | 1 of 2 | 1 of 2 | 2 of 2 | 2 of 2 | 2 of 2 | 2 of 2 | 2 of 2 |",
        "| adam | 1 of 2 | 1 of 2 | 1 of 2 | 1 of 2 | 1 of 2 | 2 of 2 | 2 of 2 |",
    ]
    assert rows[4].startswith("| adam | 1 of 2"), (
        "by test loss adam is first: 50 and 70 of 60 and 69"
    )
    assert text.endswith("Tasks: one, two. Means over the seeds, divided by the lowest mean.\n")
    unfinished = [{**row, "winners": {}} for row in outcomes["two"] if row["method"] == "adam"]
    assert reached_losses.profile_table({**outcomes, "three": unfinished}) == ""
    assert reached_losses.profile_table({"one": outcomes["one"]}) == ""


def test_populations_and_runs_alone_agree(tmp_path: Path) -> None:
    given = mini.description(2, methods=("adam", "muon"))
    Study(tmp_path / "alone", given).run("cpu")
    Study(tmp_path / "together", given).run(How("cpu", together=8))
    one, other = (lines_of(tmp_path / name) for name in ("alone", "together"))
    assert one.keys() == other.keys()
    for key, line in one.items():
        assert line["train_loss"] == pytest.approx(other[key]["train_loss"], rel=1e-3)
    assert {line["together"] for line in one.values()} == {1}
    assert {line["together"] for line in other.values()} == {1, 2}


def test_a_failure_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, said = workers.run, list[str]()

    def fail(config: RunConfig, *given: Any, **options: Any) -> Any:
        if config.method == "adam":
            raise RuntimeError("broken")
        return own(config, *given, **options)

    monkeypatch.setattr(workers, "run", fail)
    described = mini.description(2)
    assert Study(tmp_path, described).run("cpu", said.append) == 1
    assert said == ["adam: failed, broken"]
    assert {line["method"] for line in lines_of(tmp_path).values()} == {"muon"}
    monkeypatch.undo()
    monkeypatch.setattr(study, "QUICK", mini.SMALL)
    assert Study(tmp_path, described).run("cpu") == 0
    assert "so far" not in (tmp_path / "standard/table.md").read_text()


# Continuing -----------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_kills_change_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch_locoprop.study.equal_budgets.study", "pytest"])
    moments, kills = random.Random(0), 0
    while True:
        started = context.Event()
        process = context.Process(
            target=mini.run_to_the_end, args=(str(tmp_path / "killed"), started)
        )
        process.start()
        assert started.wait(60)
        process.join(None if kills == 6 else moments.uniform(0.05, 0.6))
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, "a study that was continued failed"
        kills += 1
    assert kills >= 3
    Study(tmp_path / "whole", mini.description(epochs=20)).run("cpu")
    killed, whole = (lines_of(tmp_path / name) for name in ("killed", "whole"))
    assert killed.keys() == whole.keys()
    for key, line in killed.items():
        assert line["train"] == whole[key]["train"], "to the digits that are stored"
        assert line["settings"] == whole[key]["settings"]
    assert not (tmp_path / "killed/standard/running").exists()


def test_a_half_written_result_is_trained_again(tmp_path: Path) -> None:
    described = mini.description(1, methods=("adam",))
    Study(tmp_path, described).run("cpu")
    whole = lines_of(tmp_path)
    path = tmp_path / "standard/results.jsonl"
    text = path.read_text()
    path.write_text(text[:-40])
    assert len(lines_of(tmp_path)) == len(whole) - 1
    Study(tmp_path, described).run("cpu")
    again = lines_of(tmp_path)
    assert {k: v["train"] for k, v in again.items()} == {k: v["train"] for k, v in whole.items()}
    path.write_text("{\n" + text)
    with pytest.raises(RunError, match=r"Line 1 of .*results\.jsonl is not a result"):
        Study(tmp_path, described).run("cpu")


def test_time_that_runs_out_ends_a_study_that_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described, said = mini.description(1, methods=("adam",)), list[str]()
    late = How("cpu", deadline=time.time() - 1)
    assert Study(tmp_path, described).run(late, said.append) == 0
    assert said == ["adam: not started"]
    now = time.time()
    times = iter([now, *[now + 100] * 50])
    with monkeypatch.context() as patch:
        patch.setattr(workers.time, "time", lambda: next(times))
        Study(tmp_path, described).run(How("cpu", deadline=now + 50), said.append)
    assert said[1:] == ["adam: stopped, too little time is left"]
    assert Study(tmp_path, described).run("cpu") == 0
    assert len(lines_of(tmp_path)) == 3


def test_a_free_process_takes_the_next_job_while_others_are_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's second half is drawn while Muon's first half still trains; the winners come last."""
    started: list[tuple[str, str, int]] = []

    class Process:
        """A process that does its work when its end is waited for."""

        def __init__(self, target: Any, args: Any, daemon: bool) -> None:
            self.job, self.work = args
            self.exitcode: int | None = None
            self.sentinel = self

        def start(self) -> None:
            started.append((self.job[0]["method"], self.job[0]["stage"], len(self.job)))

    def end(running: list[Process], timeout: float | None) -> None:
        soonest = min(running, key=lambda process: process.job[0]["method"])
        workers.train_job(soonest.job, soonest.work)
        soonest.exitcode = 0

    context = type("Context", (), {"Process": Process})
    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setattr(workers, "wait", end)
    assert Study(tmp_path, mini.description(4)).run(How("cpu", jobs=2, together=12)) == 0
    assert [(method, stage) for method, stage, _ in started] == [
        ("adam", "search"),
        ("muon", "search"),
        ("adam", "search"),
        ("adam", "final"),
        ("muon", "search"),
        ("muon", "final"),
    ]
    assert [size for *_, size in started][:3] == [2, 2, 2]
    assert started[3][2] in (2, 4), "one winner or two, at two seeds, as one population"
    assert "so far" not in (tmp_path / "standard/table.md").read_text()


def test_processes_that_are_interrupted_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes: Ctrl-C in the parent ends its children, which save a checkpoint first."""
    described = StudyDescription(
        ("standard",), ("adam", "sgd"), Budget(1, (0,)), quick=True, epochs=100_000
    )
    own = Study(tmp_path, described)
    task = own.tasks[0]
    jobs = workers.jobs_of(task.next_trials(), task.task, "cpu", 1)
    work = replace(own.work(task, "search", How("cpu")), images=Images(None, (40, 10)))
    waiting = iter((job, work) for job in jobs)

    def wait(sentinels: Any, timeout: float | None) -> None:
        while len(list((tmp_path / "standard/running").glob("*/metrics.jsonl"))) < len(sentinels):
            time.sleep(0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        workers.in_processes(lambda: next(waiting, None), 2, math.inf)
    assert multiprocessing.active_children() == []
    for folder in (tmp_path / "standard/running").iterdir():
        checkpoint = RunFolder(folder).checkpoint()
        assert checkpoint is not None
        assert checkpoint.metrics == RunFolder(folder).metrics(), "no epoch is lost"


# Descriptions ---------------------------------------------------------------------------------


def test_a_description_goes_through_json_and_grows() -> None:
    described = mini.description(5, epochs=7)
    again = StudyDescription.from_dict(json.loads(json.dumps(described.to_dict())))
    assert again == described
    more = described.extended(("relu", "standard"), ("sgd",))
    assert more.tasks == ("standard", "relu")
    assert more.methods == ("adam", "muon", "sgd")
    assert described.task("standard")["epochs"] == 7
    assert StudyDescription().task("deep")["model"] == "deep"


def test_more_methods_have_the_same_budget(tmp_path: Path) -> None:
    described = mini.description(2, methods=("adam",))
    Study(tmp_path, described).run("cpu")
    before = lines_of(tmp_path)
    Study(tmp_path, described.extended(("relu",), ("sgd",))).run("cpu")
    after = lines_of(tmp_path)
    assert {k: v for k, v in after.items() if v["method"] == "adam"} == before
    assert sum(v["method"] == "sgd" and v["stage"] == "search" for v in after.values()) == 2
    assert (tmp_path / "relu/table.md").is_file()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tasks": ("standrd",)}, "Unknown task 'standrd'. Did you mean 'standard'"),
        ({"methods": ("adem",)}, "Did you mean 'adam'"),
    ],
)
def test_unknown_names_are_errors(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mini.description(**given)
    with pytest.raises(ValueError, match="Invalid budget=0"):
        Budget(0)
    with pytest.raises(ValueError, match="seeds"):
        Budget(1, ())


def test_another_study_in_the_folder_is_refused(tmp_path: Path) -> None:
    Study(tmp_path, mini.description(1, methods=("sgd",))).run("cpu")
    with pytest.raises(RunError, match="trials is 1 there and 2 here"):
        Study(tmp_path, mini.description(2))
    with pytest.raises(RunError, match="epochs is 2 there and 3 here"):
        Study(tmp_path, mini.description(1, epochs=3))
    assert stored(tmp_path) == mini.description(1, methods=("sgd",))
    assert stored(tmp_path / "elsewhere") is None
    for content in ("{}", '{"tasks": [], "methods": [], "budget": {}, "quick": true, "epochs": 1}'):
        (tmp_path / "study.json").write_text(content)
        with pytest.raises(RunError, match="is not the description of a study"):
            stored(tmp_path)


# The plan -------------------------------------------------------------------------------------


def test_the_plan_counts_what_is_left_and_uses_the_time_of_finished_trials(tmp_path: Path) -> None:
    own = Study(tmp_path, mini.description(3))
    first = own.plan("cpu", lambda config, images: 10.0 if config.method == "adam" else 20.0)
    assert [(each.left, each.seconds, each.measured) for each in first] == [
        (3 + 2 * 2, 10.0, False),
        (3 + 2 * 2, 20.0, False),
    ]
    assert plan.total_seconds(first, 2) == 7 * (10 + 20) / 2
    task = own.tasks[0]
    for trial in task.next_trials():
        if trial["method"] == "adam":
            result(task, trial, 50.0)
    adam = own.plan("cpu", lambda config, images: math.nan)[0]
    assert (adam.done, adam.left, adam.seconds, adam.measured) == (2, 1 + 2 * 2, 4.0, True)
    for _ in range(2):
        for trial in task.next_trials():
            result(task, trial, 50.0)
    adam = own.plan("cpu", lambda config, images: math.nan)[0]
    assert (adam.done, adam.left) == (3 + 2, 0), "one trial has won by both losses"


def test_an_estimate_grows_with_the_work() -> None:
    config = RunConfig("adam", dataset="curves", model="784-6-3", batch_size=10, epochs=4)
    one = min(plan.seconds_of_run(config, 100) for _ in range(3))
    assert 0 < one < plan.seconds_of_run(replace(config, epochs=4000), 100)
