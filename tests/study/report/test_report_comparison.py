"""Runs found in folders, their grouping into tasks, and their ranking."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from study.report.made import MACHINE, made

from torch_locoprop.study import methods
from torch_locoprop.study.cli.shared import TASK, configuration, parsed
from torch_locoprop.study.report import comparison, page
from torch_locoprop.study.report.comparison import Task
from torch_locoprop.study.report.runs import find, find_timings, read
from torch_locoprop.study.report.series import LOSSES

ROW = (
    '{"epoch": 0, "train_loss": 1, "test_loss": 1, "seconds": %s, "memory_mib": 1, '
    '"diverged": false}'
)


def tasks_in(folder: Path) -> list[Task]:
    runs, skipped = find([folder])
    assert not skipped
    return comparison.tasks(runs)


def test_runs_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    made(tmp_path / "a" / "deep" / "down", [9.0, 3.0])
    made(tmp_path / "b", [9.0, 4.0])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("{}")  # some other program's
    runs, skipped = find([tmp_path, tmp_path / "a", tmp_path / "b" / ".." / "b"])
    assert [run.last.train_loss for run in runs] == [3.0, 4.0]
    assert not skipped


def test_curves_that_were_drawn_here_are_told_from_the_published_ones(tmp_path: Path) -> None:
    made(tmp_path / "drawn", [9.0, 3.0])
    other = made(tmp_path / "published", [9.0, 4.0]).path / "config.json"
    content = json.loads(other.read_text())
    content["data"] |= {"source": "digs3pts_1.mat", "fingerprint": "another"}
    other.write_text(json.dumps(content))
    titles = sorted(task.title for task in tasks_in(tmp_path))
    assert titles == [
        "curves (digs3pts_1.mat) · 16-6-2 · tanh",
        "curves (made for tests) · 16-6-2 · tanh",
    ]


def test_timings_are_no_results(tmp_path: Path) -> None:
    made(tmp_path / "result", [9.0, 3.0])
    made(tmp_path / "timings" / "standard-adam", [9.0, 8.0])
    assert [run.folder.name for run in find([tmp_path])[0]] == ["result"]
    assert [run.folder.name for run in find([tmp_path / "timings"])[0]] == ["standard-adam"]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", "{", "not the description of a run"),
        ("config.json", "[]", "not the description of a run"),
        ("config.json", '{"config": 3, "data": {}}', "config is 3, not an object"),
        ("config.json", '{"config": {"method": 3}, "data": {}}', "method in config.json is 3"),
        ("metrics.jsonl", "", "not even the untrained model"),
        ("metrics.jsonl", "{\n", "metrics.jsonl is not an epoch"),
        ("metrics.jsonl", "3", "metrics.jsonl is not an epoch"),
        ("metrics.jsonl", '{"epoch": 0}', "metrics.jsonl is not an epoch"),
        ("metrics.jsonl", ROW % '"1"', "line 1 of metrics.jsonl is not epoch 0"),
        ("metrics.jsonl", ROW % "NaN", "line 1 of metrics.jsonl is not epoch 0"),
    ],
)
def test_a_broken_run_does_not_cost_the_others(
    tmp_path: Path, file: str, content: str, reason: str
) -> None:
    made(tmp_path / "good", [9.0, 3.0])
    made(tmp_path / "bad", [9.0, 3.0])
    (tmp_path / "bad" / file).write_text(content)
    runs, skipped = find([tmp_path])
    assert [run.folder.name for run in runs] == ["good"]
    assert [entry.folder.name for entry in skipped] == ["bad"]
    assert reason in skipped[0].reason


def test_a_gap_in_the_metrics_is_not_drawn_over(tmp_path: Path) -> None:
    files = made(tmp_path / "run", [9.0, 5.0, 3.0])
    lines = (files.path / "metrics.jsonl").read_text().splitlines()
    (files.path / "metrics.jsonl").write_text("\n".join(lines[::2]))
    (entry,) = find([tmp_path])[1]
    assert "line 2 of metrics.jsonl is not epoch 1" in entry.reason


def test_what_differs_in_the_task_is_never_ranked_together(tmp_path: Path) -> None:
    made(tmp_path / "1", [9.0, 3.0])
    made(tmp_path / "2", [9.0, 4.0], "sgd")
    others = [{"model": "16-3"}, {"transfer": "relu"}, {"batch_size": 6}, {"epochs": 2}]
    for index, config in enumerate(others):
        made(tmp_path / f"other{index}", [9.0, 1.0], **config)
    files = made(tmp_path / "data", [9.0, 1.0])
    description = files.description()
    description["data"]["fingerprint"] = "another"
    files.begin(description)
    tasks = tasks_in(tmp_path)
    assert [len(task.runs) for task in tasks] == [2, 1, 1, 1, 1, 1]
    assert [series.method for series in tasks[0].series] == ["adam", "sgd"]


def test_seeds_of_a_configuration_are_one_series(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 6.0, 2.0], seed=1)
    made(tmp_path / "b", [8.0, 4.0, 4.0], seed=0)
    made(tmp_path / "c", [9.0, 5.0, 5.0], settings={"lr": 0.5})
    made(tmp_path / "d", [9.0, 5.0, 6.0], "sgd")
    (task,) = tasks_in(tmp_path)
    assert [series.label for series in task.series] == ["adam", "adam lr=0.5", "sgd"]
    first = task.series[0]
    assert [run.config["seed"] for run in first.runs] == [0, 1]
    assert first.last(LOSSES["train"]) == (3.0, 2.0, 4.0, 2)
    assert first.last(LOSSES["test"]) == (4.0, 3.0, 5.0, 2)
    assert first.curve(LOSSES["train"]) == [
        (8.5, 8.0, 9.0, 2),
        (5.0, 4.0, 6.0, 2),
        (3.0, 2.0, 4.0, 2),
    ]
    assert [series.dash for series in task.series] == [0, 1, 0]


def test_labels_are_short_where_they_stay_different(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 3.0], settings={"lr": 0.123456})
    made(tmp_path / "b", [9.0, 4.0], settings={"lr": 0.2})
    (task,) = tasks_in(tmp_path)
    assert [series.label for series in task.series] == ["adam lr=0.1235", "adam lr=0.2"]
    made(tmp_path / "c", [9.0, 5.0], settings={"lr": 0.123457})
    (task,) = tasks_in(tmp_path)
    labels = ["adam lr=0.123456", "adam lr=0.2", "adam lr=0.123457"]
    assert [series.label for series in task.series] == labels


def test_what_is_usual_goes_without_saying(tmp_path: Path) -> None:
    """Labels leave out the method's defaults, or else the most common values."""
    on_gpu = {"device": "cuda", "precision": "tf32"}
    usual = {"lr": 0.3}
    for name, settings, fields in (
        ("a", usual, on_gpu),
        ("b", {**usual, "local_steps": 5}, on_gpu),
        ("c", {"lr": 0.4, "solver": "adam"}, on_gpu),
        ("d", usual, {**on_gpu, "precision": "fp32"}),
        ("e", usual, {**on_gpu, "schedule": "linear"}),
    ):
        made(tmp_path / name, [9.0, 4.0], "locoprop-m", settings=settings, fields=fields)
    made(tmp_path / "f", [9.0, 5.0], "kfac@3")  # alone, whatever the others have
    for index, word in enumerate(("one", "one", "two")):
        fields = {"method": "mine", "settings": {"word": word, "number": index}}
        made(tmp_path / f"mine{index}", [9.0, 6.0], fields=fields)
    (task,) = tasks_in(tmp_path)
    assert {series.runs[0].folder.name: series.label for series in task.series} == {
        "a": "locoprop-m",
        "b": "locoprop-m local_steps=5",
        "c": "locoprop-m lr=0.4 solver=adam",
        "d": "locoprop-m precision=fp32",
        "e": "locoprop-m schedule=linear",
        "f": "kfac@3",
        "mine0": "mine number=0",
        "mine1": "mine number=1",
        "mine2": "mine word=two number=2",
    }


def test_what_is_usual_is_solid_wherever_it_ranks(tmp_path: Path) -> None:
    on_gpu = {"device": "cuda", "precision": "tf32"}
    for loss, settings, fields in (
        (1.0, {"lr": 0.4, "local_steps": 5}, on_gpu),
        (2.0, {}, {**on_gpu, "precision": "bf16"}),
        (3.0, {}, on_gpu),
        (4.0, {"local_steps": 5}, on_gpu),
    ):
        made(tmp_path / f"{loss}", [9.0, loss], "locoprop-m", settings=settings, fields=fields)
    made(tmp_path / "kfac", [9.0, 5.0], "kfac@3")
    made(tmp_path / "other", [9.0, 6.0], "kfac@2")  # of the same colour, and as usual
    (task,) = tasks_in(tmp_path)
    assert [(series.label, series.dash) for series in task.series] == [
        ("locoprop-m lr=0.4 local_steps=5", 3),
        ("locoprop-m precision=bf16", 1),
        ("locoprop-m", 0),
        ("locoprop-m local_steps=5", 2),
        ("kfac@3", 0),
        ("kfac@2", 1),
    ]


def test_a_setting_that_only_one_run_records_keeps_labels_apart(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0])
    files = made(tmp_path / "b", [9.0, 5.0])
    description = files.description()
    del description["config"]["settings"]["lr"]  # as a version without it would leave it
    files.begin(description)
    (task,) = tasks_in(tmp_path)
    usual = f"adam lr={methods.get('adam').settings['lr']:g}"
    assert [series.label for series in task.series] == [usual, "adam"]


def test_only_what_finished_has_a_place(tmp_path: Path) -> None:
    made(tmp_path / "done", [9.0, 6.0, 5.0])
    made(tmp_path / "half", [9.0, 1.0], "sgd", epochs=2)
    made(tmp_path / "wild", [9.0, 99.0], "rmsprop", epochs=2, diverged=True)
    made(tmp_path / "lost", [9.0, 7.0, 4.0], "kfac")
    made(tmp_path / "lost1", [9.0, math.nan], "kfac", epochs=2, seed=1, diverged=True)
    (task,) = tasks_in(tmp_path)
    assert [series.method for series in task.series] == ["adam", "sgd", "kfac", "rmsprop"]
    assert [series.method for series in task.placed] == ["adam"]
    remarks = ["", "interrupted at epoch 1 of 2", "1 of 2 runs diverged", "diverged in epoch 1"]
    assert [series.remark for series in task.series] == remarks
    kfac = task.series[2]
    assert kfac.last(LOSSES["train"]) == (4.0, 4.0, 4.0, 1)
    assert kfac.curve(LOSSES["train"])[1] == (7.0, 7.0, 7.0, 1)
    assert comparison.cautions(task) == ["1 of 5 runs interrupted.", "2 of 5 runs diverged."]


def test_finished_runs_are_ranked_beside_interrupted_ones(tmp_path: Path) -> None:
    """Three finished and two interrupted runs of one configuration and seed."""
    for index, end in enumerate((5.0, 5.5, 6.0)):
        made(tmp_path / f"done{index}", [9.0, 6.0, end])
    for index in range(2):
        made(tmp_path / f"cut{index}", [9.0, 1.0], epochs=2)
    made(tmp_path / "other", [9.0, 8.0, 7.0], "sgd")
    (task,) = tasks_in(tmp_path)
    adam, sgd = page.ranking(task)
    assert [adam["place"], sgd["place"]] == [1, 2]
    assert adam["seeds"] == [0]
    assert adam["train"] == {"mean": 5.0, "low": 5.0, "high": 5.0, "number": 1}
    assert adam["remark"] == "2 of 5 runs interrupted"
    assert comparison.summary(task).startswith(
        "adam has the lowest train loss after 2 epochs: 5.00"
    )
    curve = task.series[0].curve(LOSSES["train"])
    assert [point.mean for point in curve if point] == [9.0, 6.0, 5.0]
    assert comparison.cautions(task) == [
        "The best two have one seed each.",
        "2 of 6 runs interrupted.",
        "2 runs repeat the seed of another; the first of them counts.",
    ]


def test_an_interrupted_seed_does_not_enter_the_mean(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 6.0, 4.0])
    made(tmp_path / "b", [9.0, 8.0, 6.0], seed=1)
    made(tmp_path / "c", [9.0, 1.0], seed=2, epochs=2)
    (task,) = tasks_in(tmp_path)
    (row,) = page.ranking(task)
    assert row["seeds"] == [0, 1]
    assert row["place"] == 1
    assert task.series[0].curve(LOSSES["train"])[1] == (7.0, 6.0, 8.0, 2)


def test_of_interrupted_runs_of_a_seed_the_longest_counts(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 6.0], epochs=5)
    made(tmp_path / "b", [9.0, 6.0, 4.0], epochs=5)
    (task,) = tasks_in(tmp_path)
    (row,) = page.ranking(task)
    assert (row["place"], row["seeds"], row["train"]["mean"]) == (None, [0], 4.0)
    assert row["remark"] == "2 of 2 runs interrupted"
    assert comparison.summary(task) == "No run has finished yet."


def test_tabs_have_only_what_differs(tmp_path: Path) -> None:
    for index in range(2):
        made(tmp_path / f"usual{index}", [9.0, 3.0], seed=index)
    others = [
        {"transfer": "relu"},
        {"model": "16-3"},
        {"batch_size": 6},
        {"model": "16-3", "transfer": "relu"},
    ]
    for index, config in enumerate(others):
        made(tmp_path / f"{index}", [9.0, 3.0], **config)
    tasks = tasks_in(tmp_path)
    assert comparison.tabs(tasks) == [
        *("16-6-2 · tanh", "relu", "16-3", "batches of 6", "16-3 · relu")
    ]
    assert comparison.tabs(tasks[:1]) == ["curves · 16-6-2 · tanh"]
    assert comparison.tabs([]) == []
    files = made(tmp_path / "data", [9.0, 1.0])
    description = files.description()
    description["data"]["fingerprint"] = "another"
    files.begin(description)
    names = comparison.tabs(tasks_in(tmp_path))
    assert names[-1] == "another"
    assert len(set(names)) == len(names) == 6


def test_the_summary_names_the_best_the_margin_and_the_best_on_test_images(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0])
    made(tmp_path / "b", [9.0, 5.0], "sgd")
    (task,) = tasks_in(tmp_path)
    assert comparison.summary(task) == (
        "adam has the lowest train loss after 1 epoch: 4.00, 20.0 % below sgd (5.00). "
        "It is also the best on test images: 5.00."
    )
    assert comparison.cautions(task) == ["The best two have one seed each."]
    made(tmp_path / "c", [9.0, 6.0], seed=1)
    (task,) = tasks_in(tmp_path)
    assert comparison.cautions(task) == ["The difference is within the range of the seeds."]
    assert "level with" in comparison.summary(task)
    made(tmp_path / "d", [9.0, 100.0], seed=2)
    (task,) = tasks_in(tmp_path)
    assert "Seeds of adam end far apart: 4.00 to 100.00." in comparison.cautions(task)


def test_a_tie_is_called_that(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0])
    made(tmp_path / "b", [9.0, 4.0], "sgd")
    (task,) = tasks_in(tmp_path)
    assert "4.00, level with sgd (4.00)." in comparison.summary(task)


def test_a_summary_without_a_winner(tmp_path: Path) -> None:
    made(tmp_path / "wild", [9.0, 99.0], epochs=2, diverged=True)
    assert comparison.summary(tasks_in(tmp_path)[0]) == "Every run diverged."
    assert comparison.view(tasks_in(tmp_path)[0], "train") is None
    made(tmp_path / "half", [9.0, 1.0], "sgd", epochs=2)
    assert comparison.summary(tasks_in(tmp_path)[0]) == "No run has finished yet."
    made(tmp_path / "done", [9.0, 5.0, 3.0], "kfac")
    expected = "kfac ends at a train loss of 3.00 after 2 epochs."
    assert comparison.summary(tasks_in(tmp_path)[0]) == expected


def test_hyper_parameters_are_the_same_for_all_or_varied(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0])
    made(tmp_path / "b", [9.0, 5.0], "sgd", schedule="linear")
    (task,) = tasks_in(tmp_path)
    assert set(task.same) == {"warmup_epochs", "weight_decay", "precision", "device"}
    assert set(task.varied) == {"lr", "momentum", "decay", "eps", "schedule"}
    for series in task.series:
        known = {**task.about, **series.hyper_parameters, "method": series.method}
        missing = set(series.runs[0].config) - set(known) - {"settings", "seed"}
        assert not missing


def test_the_view_shows_the_differences_at_the_end(tmp_path: Path) -> None:
    falling = [500.0, 60.0, 55.0, 54.0, 53.0]
    made(tmp_path / "a", [*falling, 50.0])
    made(tmp_path / "b", [*falling, 51.0], "sgd")
    made(tmp_path / "c", [*falling, 52.0], "rmsprop")
    made(tmp_path / "d", [*falling, 200.0], "kfac")
    made(tmp_path / "e", [500.0, 1e9], "muon", epochs=5, diverged=True)
    (task,) = tasks_in(tmp_path)
    view = comparison.view(task, "train")
    assert view is not None
    low, high = view
    assert low < 50.0
    assert 55.0 < high < 500.0 * 0.9


def test_seconds_on_different_machines_are_marked(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0])
    made(tmp_path / "b", [9.0, 5.0], "sgd", environment={**MACHINE, "python": "3.12"})
    assert comparison.clock_notes(tasks_in(tmp_path)[0]) == []
    made(tmp_path / "c", [9.0, 5.0], "kfac", environment={**MACHINE, "machine": "m2"})
    assert comparison.clock_notes(tasks_in(tmp_path)[0]) == ["machine: m1, m2"]
    made(tmp_path / "d", [9.0, 5.0], "muon", fields={"precision": "tf32"})
    notes = ["machine: m1, m2", "precision: fp32, tf32"]
    assert comparison.clock_notes(tasks_in(tmp_path)[0]) == notes


TIMED = [9.0, 8.0, 7.0, 6.0]  # three epochs


def test_seconds_come_from_runs_that_were_alone(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0], settings={"lr": 0.5}, seed=1)
    made(tmp_path / "b", [9.0, 5.0], "sgd")
    made(tmp_path / "c", [9.0, 6.0], fields={"method": "mine"})
    made(tmp_path / "d", [9.0, 7.0], "rmsprop", fields={"precision": "tf32", "device": "cuda"})
    made(tmp_path / "e", [9.0, 8.0], "locoprop-s", settings={"local_steps": 5})
    alone = tmp_path / "deep" / "timings"
    files = made(alone / "adam", TIMED, seconds=0.25)
    made(alone / "rmsprop", TIMED, "rmsprop", seconds=2.0)
    elsewhere = {**MACHINE, "machine": "m2"}
    made(alone / "sgd", TIMED, "sgd", seconds=3.0, environment=elsewhere)
    made(alone / "steps", TIMED, "locoprop-s", settings={"local_steps": 10}, seconds=9.0)
    made(alone / "half", TIMED, "sgd", seconds=9.0, epochs=7)
    made(alone / "relu", TIMED, "sgd", seconds=9.0, transfer="relu")
    rows = [replace(row, seconds=row.seconds + 50 * (row.epoch > 0)) for row in files.metrics()]
    files.write_metrics(rows)  # the first epoch, which does not count, took longer
    (task,) = comparison.tasks(find([tmp_path])[0], find_timings([tmp_path]))
    found = {series.method: task.alone(series) for series in task.series}
    rates = {"adam": pytest.approx(0.25), "rmsprop": pytest.approx(2.0)}
    assert found == {**dict.fromkeys(("sgd", "mine", "locoprop-s")), **rates}
    assert comparison.clock_text(task) == (
        "Seconds of training, from short runs without other work on the machine: m1, 1 thread. "
        "Trained in another precision: rmsprop. Not timed: sgd, mine, locoprop-s. These are not "
        "drawn by seconds. The ranking shows the seconds of their own runs, which may have shared a "
        "machine."
    )
    ranked = page.ranking(task)
    assert [row["seconds"]["mean"] for row in ranked] == pytest.approx([0.25, 0.1, 0.1, 2.0, 0.1])
    assert [row["alone"] for row in ranked] == [True, False, False, True, False]


def test_seconds_and_memory_of_a_population_are_not_those_of_a_run(tmp_path: Path) -> None:
    together = {**MACHINE, "population": 2}
    made(tmp_path / "alone", [9.0, 4.0], seconds=0.25, device="cuda")
    for seed in (1, 2):
        more = {"seed": seed, "seconds": 0.5, "environment": together, "device": "cuda"}
        made(tmp_path / f"adam{seed}", [9.0, 5.0], **more)
        made(tmp_path / f"sgd{seed}", [9.0, 6.0], "sgd", **more)
    (task,) = comparison.tasks(find([tmp_path])[0])
    adam, sgd = page.ranking(task)
    assert (adam["seeds"], sgd["seeds"]) == ([0, 1, 2], [1, 2])
    for name, expected in (("seconds", 0.25), ("memory", 51.0)):
        assert (adam[name]["mean"], adam[name]["number"]) == (expected, 1)
        assert sgd[name] is None


def test_timings_of_other_images_are_not_taken(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0])
    files = made(tmp_path / "timings" / "a", TIMED)
    description = files.description()
    description["data"]["fingerprint"] = "another"
    files.begin(description)
    made(tmp_path / "timings" / "b", TIMED, "sgd").path.joinpath("config.json").write_text("{")
    (task,) = comparison.tasks(find([tmp_path])[0], find_timings([tmp_path]))
    assert not task.clock.seconds
    assert comparison.clock_text(task).startswith("Seconds of training, without evaluation.")
    assert [run.folder.name for run in find_timings([tmp_path / "timings"])] == ["a"]


def test_the_command_makes_the_same_run(tmp_path: Path) -> None:
    settings = {"solver": "adam", "regularizer": None, "lr": 3e-7}
    files = made(tmp_path / "a", [9.0, 4.0], "locoprop-s", settings=settings, seed=5)
    words = shlex.split(read(files.path).command)
    assert words[:2] == ["locoprop", "train"]
    options = list(zip(words[2::2], words[3::2], strict=True))
    task = {
        name: json.loads(value) if value.replace("e-", "").replace(".", "").isdigit() else value
        for option, value in options
        if (name := option.removeprefix("--").replace("-", "_")) in TASK
    }
    given = parsed(value for option, value in options if option == "--set")
    again = configuration({**task, "method": dict(options)["--method"], "settings": given})
    assert again == files.config()


def test_settings_of_an_unknown_method_are_shown_all_the_same(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0], fields={"method": "mine", "settings": {"word": "null"}})
    (task,) = tasks_in(tmp_path)
    assert task.series[0].method == "mine"
    assert task.runs[0].origin == "unknown"
    assert "--set 'word=\"null\"'" in task.runs[0].command
    assert task.series[0].hyper_parameters["word"] == "null"


def test_origin_is_that_of_the_run(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0], "locoprop-m")
    made(tmp_path / "b", [9.0, 5.0], "locoprop-m", settings={"lr": 1.0})
    (task,) = tasks_in(tmp_path)
    assert [run.origin for run in task.runs] == ["reference", "given"]
