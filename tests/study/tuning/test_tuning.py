"""A search: its results and files, its continuation, and its errors."""

import errno
import json
import math
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import tiny
import torch
from torch import nn

from torch_locoprop import baselines
from torch_locoprop.study import methods
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.training.population_run import train_together
from torch_locoprop.study.training.run_folder import Metrics, RunFolder
from torch_locoprop.study.training.runner import run
from torch_locoprop.study.tuning import campaign, spaces
from torch_locoprop.study.tuning import search as search_module
from torch_locoprop.study.tuning.campaign import Status, TuningResult
from torch_locoprop.study.tuning.journal import Journal
from torch_locoprop.study.tuning.journal_file import JournalFile
from torch_locoprop.study.tuning.locks import FileLocks
from torch_locoprop.study.tuning.search import first_pruned

DATA = tiny.data()
RANGES = {"lr": "1e-4:3e-1"}


def search(folder: Path, base: RunConfig | None = None, **options: Any) -> TuningResult:
    base = base or tiny.config("adam")
    space = spaces.of(methods.get(base.method), ranges=options.pop("ranges", RANGES))
    options = {"trials": 6, "population": 4, "data": DATA, **options}
    return campaign.tune(base, space, folder, **options)


def settings(result: TuningResult) -> list[dict[str, Any]]:
    return [trial["settings"] for trial in result.trials]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


class StopError(Exception):
    pass


def stopping(when: Callable[[Status], bool]) -> Callable[[Status], None]:
    def watch(status: Status) -> None:
        if when(status):
            raise StopError

    return watch


# What a search finds --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["adam", "locoprop-m"])
def test_a_trial_is_the_run_with_its_settings(method: str, tmp_path: Path) -> None:
    base = tiny.config(method, seed=2)
    result = search(tmp_path / "tuning", base, trials=3)
    for trial in result.trials:
        config = replace(base, settings={**base.settings, **trial["settings"]})
        last = run(config, tmp_path / str(trial["number"]), data=DATA).metrics[-1]
        assert trial["train_loss"] == pytest.approx(last.train_loss, rel=1e-4)
        assert trial["test_loss"] == pytest.approx(last.test_loss, rel=1e-4)
        assert trial["epoch"] == 4
        assert trial["seconds"] > 0


def test_the_best_is_the_lowest_and_a_configuration(tmp_path: Path) -> None:
    result = search(tmp_path, trials=6)
    losses = [trial["train_loss"] for trial in result.trials]
    best = result.to_dict()["best"]
    assert best["train_loss"] == min(losses) < max(losses)
    assert result.best is not None
    assert result.best.settings == {**methods.get("adam").settings, **best["settings"]}
    assert RunConfig.from_dict(json.loads((tmp_path / "best.json").read_text())) == result.best
    assert rows(tmp_path) == list(result.trials)
    assert result.to_dict()["states"] == {"complete": 6}
    assert {path.name for path in tmp_path.iterdir()} == {
        *("tuning.json", "journal.log", "trials.jsonl", "best.json", "lock", "workers")
    }
    assert list((tmp_path / "workers").iterdir()) == []


def test_settings_are_drawn_inside_the_space(tmp_path: Path) -> None:
    ranges = {
        **{"lr": "1e-3:1e-2", "momentum": "0.8:0.99", "gamma": "1,2"},
        **{"local_steps": "1:3", "solver": "sgd,rmsprop"},
    }
    result = search(tmp_path, tiny.config("locoprop-s"), ranges=ranges, trials=12)
    found = settings(result)
    for own in found:
        assert 1e-3 <= own["lr"] <= 1e-2
        assert 0.8 <= own["momentum"] <= 0.99
        assert own["gamma"] in (1.0, 2.0)
        assert own["local_steps"] in (1, 2, 3)
    for name in ("gamma", "solver"):
        assert len({own[name] for own in found}) == 2
    assert len({own["lr"] for own in found}) == 12


@pytest.mark.parametrize(
    ("sampler", "kind"),
    [("tpe", optuna.samplers.TPESampler), ("gp", optuna.samplers.GPSampler)],
)
def test_each_sampler_is_what_its_name_says(
    sampler: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[type] = []
    ask = optuna.Study.ask

    def seen(study: optuna.Study, *given: Any) -> optuna.Trial:
        asked.append(type(study.sampler))
        return ask(study, *given)

    monkeypatch.setattr(optuna.Study, "ask", seen)
    search(tmp_path, trials=2, sampler=sampler)
    # A new trial is drawn in a copy of the search, then taken from the queue.
    assert asked == [kind, optuna.samplers.RandomSampler] * 2


def test_the_folder_of_a_run_is_not_that_of_a_search(tmp_path: Path) -> None:
    run(tiny.config(), tmp_path, data=tiny.data())
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(RunError, match="is the folder of a run"):
        search(tmp_path, trials=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("sampler", campaign.SAMPLERS)
def test_a_sampler_learns(sampler: str, tmp_path: Path) -> None:
    """Later trials avoid the lower half of the space, which learns nothing."""
    base = tiny.config("adam", epochs=2)
    result = search(
        tmp_path, base, sampler=sampler, trials=24, population=2, ranges={"lr": "1e-7:1e-1"}
    )
    rates = [math.log10(own["lr"]) for own in settings(result)]
    assert sum(rates[14:]) / 10 > sum(rates[:10]) / 10 + 0.5


def test_a_search_repeats_and_another_seed_is_another(tmp_path: Path) -> None:
    one, again, other = (
        search(tmp_path / name, tiny.config("adam", seed=seed), trials=12)
        for name, seed in (("one", 0), ("again", 0), ("other", 1))
    )
    assert settings(one) == settings(again)
    assert settings(one)[0] != settings(other)[0]


def test_runs_one_by_one_are_in_folders_without_checkpoints(tmp_path: Path) -> None:
    result = search(tmp_path, tiny.config("kfac@2"), trials=2)
    for number, trial in enumerate(result.trials):
        files = RunFolder(tmp_path / "trials" / f"{number:04d}")
        assert files.config().settings["lr"] == trial["settings"]["lr"]
        assert files.config().method == "kfac@2"
        assert files.metrics()[-1].train_loss == trial["train_loss"]
        assert not (files.path / "checkpoint.pt").exists()


@pytest.mark.usefixtures("own_methods")
def test_a_method_of_ones_own(tmp_path: Path) -> None:
    """Its trials are single runs; a matrix that cannot be factored ends a trial, not the search."""

    class Mine(baselines.SGD):
        def step(self, closure: Any = None) -> Any:
            if self.defaults["lr"] > 1e-2:
                raise torch.linalg.LinAlgError("singular")
            warnings.warn("not finite", stacklevel=1)
            return super().step(closure)

    def build(model: nn.Module, own: Any) -> Mine:
        return Mine(model.parameters(), **own)

    methods.register(methods.Method("mine", build, {"lr": 0.1}, "untuned"))
    result = search(tmp_path, tiny.config("mine"), trials=8)
    for trial in result.trials:
        high = trial["settings"]["lr"] > 1e-2
        assert trial["state"] == ("diverged" if high else "complete")
    assert len({trial["state"] for trial in result.trials}) == 2


def test_diverged_trials_are_marked_and_never_the_best(tmp_path: Path) -> None:
    base = tiny.config("sgd", warmup_epochs=0)
    result = search(tmp_path / "some", base, ranges={"lr": "1e-3:1e6"}, trials=12)
    states = result.to_dict()["states"]
    assert states["diverged"] > 2
    assert states["complete"] > 2
    assert result.to_dict()["best"]["state"] == "complete"
    result = search(tmp_path / "all", base, ranges={"lr": "1e7:1e9"}, trials=3)
    assert result.best is None
    assert result.to_dict()["best"] is None
    assert not (tmp_path / "all" / "best.json").exists()


# Pruning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["adam", "muon"])
def test_bad_trials_end_early(method: str, tmp_path: Path) -> None:
    base = tiny.config(method, epochs=12, warmup_epochs=3)
    options = {"ranges": {"lr": "1e-6:1e-1"}, "trials": 30, "population": 3}
    result = search(tmp_path / "pruned", base, **options)
    pruned = [trial for trial in result.trials if trial["state"] == "pruned"]
    assert len(pruned) >= 3
    assert all(first_pruned(base) <= trial["epoch"] < 12 for trial in pruned)
    assert all(trial["number"] >= 10 for trial in pruned)
    complete = sorted(t["train_loss"] for t in result.trials if t["state"] == "complete")
    for trial in pruned:
        assert trial["train_loss"] > complete[len(complete) // 2]
    some = {**options, "trials": pruned[0]["number"] + 1}
    whole = search(tmp_path / "whole", base, pruning=False, **some)
    assert set(whole.to_dict()["states"]) == {"complete"}
    assert settings(whole)[:10] == settings(result)[:10]


def test_the_warm_up_does_not_prune() -> None:
    assert first_pruned(RunConfig("adam")) == 15
    assert first_pruned(RunConfig("adam", epochs=4)) == 3
    assert first_pruned(RunConfig("adam", epochs=40, warmup_epochs=0)) == 4


# Going on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["adam", "muon"])
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(method: str, tmp_path: Path) -> None:
    base = tiny.config(method)
    whole = search(tmp_path / "whole", base, trials=14, population=3)
    for finished, epoch in ((0, 0), (3, 2), (6, 4), (9, 1)):
        with pytest.raises(StopError):
            search(
                tmp_path / "part",
                base,
                trials=14,
                population=3,
                watch=stopping(lambda s, f=finished, e=epoch: s.finished >= f and s.epoch == e),
            )
        assert list((tmp_path / "part" / "workers").iterdir()) == []
    part = search(tmp_path / "part", base, trials=14, population=3)
    for mine, other in zip(part.trials, whole.trials, strict=True):
        assert mine["settings"] == other["settings"]
        assert mine["train_loss"] == other["train_loss"]


def rounding_by_size(configs: Any, data: Any, on_epoch: Any) -> None:
    """Train a population whose losses depend on its size, as rounding does, but more clearly."""

    def shifted(rows: dict[int, Metrics]) -> Any:
        shift = 1 + 1e-3 * len(rows)
        return on_epoch({m: replace(r, train_loss=shift * r.train_loss) for m, r in rows.items()})

    train_together(configs, data, shifted)


@pytest.mark.parametrize("seed", range(2))
def test_an_end_after_any_write_changes_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a population some trials have results, others have been drawn or not yet."""
    monkeypatch.setattr(search_module, "train_together", rounding_by_size)
    base = tiny.config("adam", epochs=8, warmup_epochs=1)
    options: dict[str, Any] = {"trials": 20, "population": 3, "ranges": {"lr": "1e-3:1e2"}}
    whole = search(tmp_path / "whole", base, **options).trials
    assert {"complete", "pruned"} <= {trial["state"] for trial in whole}
    moments, left = random.Random(seed), [0]
    write = JournalFile.append_logs

    def some_writes(self: JournalFile, logs: list[dict[str, Any]]) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StopError
        write(self, logs)

    monkeypatch.setattr(JournalFile, "append_logs", some_writes)
    ends = 0
    while True:
        left[0] = moments.randint(1, 60)
        try:
            part = search(tmp_path / "part", base, **options).trials
            break
        except StopError:
            ends += 1
    assert ends > 3
    for mine, other in zip(part, whole, strict=True):
        assert mine == {**other, "seconds": mine["seconds"]}


def test_a_finished_search_does_nothing_and_more_trials_are_added(tmp_path: Path) -> None:
    first = search(tmp_path, trials=5)
    seen: list[Status] = []
    assert search(tmp_path, trials=5, watch=seen.append).trials == first.trials
    assert [(s.finished, s.trials, s.running) for s in seen] == [(5, 5, 0)]
    more = search(tmp_path, trials=8)
    assert more.trials[:5] == first.trials
    assert len(more.trials) == 8
    assert search(tmp_path, trials=2).trials == more.trials


def test_a_run_that_ended_unnoticed_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "tell", lambda *_: stopping(lambda _: True)(None))  # type: ignore[arg-type]
        with pytest.raises(StopError):
            search(tmp_path, tiny.config("muon"), trials=1)
    before = (tmp_path / "trials/0000/metrics.jsonl").read_text()
    result = search(tmp_path, tiny.config("muon"), trials=1)
    assert (tmp_path / "trials/0000/metrics.jsonl").read_text() == before
    assert result.trials[0]["train_loss"] == json.loads(before.splitlines()[-1])["train_loss"]


def test_the_display_is_told(tmp_path: Path) -> None:
    seen: list[Status] = []
    search(tmp_path, trials=6, population=4, watch=seen.append)
    assert [s.running for s in seen if s.running] == [4] * 5 + [2] * 5
    assert [s.epoch for s in seen if s.running] == [0, 1, 2, 3, 4] * 2
    assert [s.finished for s in seen if not s.running] == [0, 4, 6]
    assert seen[0].best is None
    assert seen[-1].best == min(row["train_loss"] for row in rows(tmp_path))


# The folder and its files ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        (tiny.config("adam", seed=1), {}, "seed is 0 there and 1 here"),
        (tiny.config("sgd"), {}, "method is 'adam' there and 'sgd' here"),
        (None, {"ranges": {"lr": "1e-3:1"}}, "the range of lr is"),
        (None, {"sampler": "gp"}, "sampler is 'tpe' there and 'gp' here"),
        (None, {"data": replace(DATA, test=DATA.test[:5])}, "data fingerprint is"),
    ],
)
def test_a_folder_has_one_search(
    base: RunConfig | None, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    search(tmp_path, trials=1)
    before = (tmp_path / "journal.log").read_bytes()
    with pytest.raises(RunError, match=f"has another search: .*{message}.*Choose another folder"):
        search(tmp_path, base, **options)
    assert (tmp_path / "journal.log").read_bytes() == before


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"config": {}}'])
def test_a_broken_description_is_told(content: str, tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_text(content)
    with pytest.raises(RunError, match=r"tuning.json is not the description of a search"):
        search(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "Invalid trials=0"),
        ({"population": 0}, "Invalid population=0"),
        ({"sampler": "cma"}, "Unknown sampler 'cma'"),
        ({"base": tiny.config("adam", model="13-2")}, "first width must be 12"),
        ({"base": tiny.config(), "ranges": {"solver": "adam,adem"}}, "Unknown solver 'adem'"),
        ({"base": tiny.config(), "ranges": {"local_steps": "0,3"}}, "Invalid local_steps=0"),
    ],
)
def test_what_cannot_be_searched_is_told_before_the_folder_is_made(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        search(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_too_large_a_population_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("torch_locoprop.study.tuning.search.train_together", full)
    with pytest.raises(RunError, match=r"4 trials at a time .* smaller --population"):
        search(tmp_path)


def test_half_a_line_is_cut_off(tmp_path: Path) -> None:
    """A kill in the middle of a write leaves an incomplete line of any length."""
    first = search(tmp_path, trials=2)
    path = tmp_path / "journal.log"
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start + 1, len(whole), 7):
        path.write_bytes(whole[:end])
        assert JournalFile(path).read_logs(0) == [json.loads(x) for x in whole[:start].splitlines()]
        assert path.read_bytes() == whole[:start]
    second = search(tmp_path, trials=2)
    assert settings(first) == settings(second)
    assert [t["train_loss"] for t in first.trials] == [t["train_loss"] for t in second.trials]


def test_optuna_reads_the_journal_itself(tmp_path: Path) -> None:
    result = search(tmp_path, trials=3)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal.log"))
    (study,) = optuna.get_all_study_summaries(optuna.storages.JournalStorage(backend))
    assert study.n_trials == 3
    assert study.best_trial is not None
    assert study.best_trial.value == result.to_dict()["best"]["train_loss"]


def test_a_broken_journal_is_told(tmp_path: Path) -> None:
    search(tmp_path, trials=1)
    path = tmp_path / "journal.log"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "nonsense\n", *lines[3:]]))
    with pytest.raises(RunError, match=r"Line 3 of .*journal.log is not an entry"):
        search(tmp_path, trials=1)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write of the journal fails once, half written; the search continues each time."""
    search(tmp_path / "whole", trials=2, population=2)
    entries = len((tmp_path / "whole" / "journal.log").read_text().splitlines())
    for number in range(entries):
        folder = tmp_path / str(number)
        writes = iter(range(entries))

        def fsync(
            file: int, journal: Path = folder / "journal.log", last: int = number, at: Any = writes
        ) -> None:
            ours = journal.exists() and os.path.samestat(os.fstat(file), journal.stat())
            if ours and next(at) == last:
                os.truncate(file, os.fstat(file).st_size - 5)
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(OSError, match=r"No space left on device.*journal.log"):
                search(folder, trials=2, population=2)
        result = search(folder, trials=2, population=2)
        assert result.to_dict()["states"] == {"complete": 2}
        assert len({own["lr"] for own in settings(result)}) == 2


def test_optuna_is_quiet_and_left_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = optuna.logging.get_verbosity()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for sampler in campaign.SAMPLERS:
            search(tmp_path / sampler, trials=12, sampler=sampler)
    assert [str(each.message) for each in seen] == []
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == before


def test_a_worker_is_alive_as_long_as_it_lives(tmp_path: Path) -> None:
    files = FileLocks(tmp_path)
    with files.worker() as name:
        assert files.is_alive(name)
    assert not files.is_alive(name)
    (tmp_path / "workers" / "killed").touch()
    assert not files.is_alive("killed")
    assert not (tmp_path / "workers" / "killed").exists()


def test_a_worker_forgets_the_dead_and_nobody_else(tmp_path: Path) -> None:
    files = FileLocks(tmp_path)
    with files.worker() as first:
        (tmp_path / "workers" / "killed before its first trial").touch()
        with files.worker() as second:
            assert files.is_alive(first)
            left = {path.name for path in (tmp_path / "workers").iterdir()}
            assert left == {first, second}
