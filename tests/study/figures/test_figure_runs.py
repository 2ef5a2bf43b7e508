"""Runs of a figure are found, finished and trained once, on any machine unless one is given."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small
import torch

from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset, DatasetError
from torch_locoprop.study.figures import catalog, images, run_jobs, timings
from torch_locoprop.study.figures.images import Images
from torch_locoprop.study.figures.missing_lines import Missing
from torch_locoprop.study.figures.run_library import Library, Place, clock_key, where_made
from torch_locoprop.study.training import runner
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.training.run_folder import RunFolder
from torch_locoprop.study.training.run_result import result_of


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods that were trained, in order; timings are marked."""
    names: list[str] = []

    def run(config: Any, folder: Path, **options: Any) -> Any:
        names.append(("timing " if "timings" in folder.parts else "") + config.method)
        return runner.run(config, folder, **options)

    monkeypatch.setattr(run_jobs, "run", run)
    return names


METHODS = ["rmsprop", "adam", "locoprop-s", "locoprop-m", "kfac@2"]


def test_missing_runs_are_run_once_and_then_reused(tmp_path: Path, executed: list[str]) -> None:
    (made,) = small.Making(small.order(tmp_path))("relu")
    assert executed == METHODS
    assert [path.suffix for path in made.files] == [".png", ".pdf", ".md"]
    assert all(path.stat().st_size > 10_000 for path in made.files[:2])
    assert len(made.runs) == len(METHODS)
    executed.clear()
    again = small.Making(small.order(tmp_path))
    assert again("relu")[0].runs == made.runs
    assert executed == []
    assert again.said == []


def test_figures_share_runs_and_timings_come_last(tmp_path: Path, executed: list[str]) -> None:
    making = small.Making(small.order(tmp_path))
    making("standard", "curves", "fashion-mnist")
    assert executed == METHODS + [f"timing {method}" for method in METHODS]
    executed.clear()
    small.Making(small.order(tmp_path))("standard")
    assert executed == []


def test_an_unfinished_run_goes_on_where_it_was_begun(tmp_path: Path, executed: list[str]) -> None:
    config = small.SCALE.series("relu", "adam").config

    def stop(row: Any) -> None:
        if row.epoch == 1:
            raise KeyboardInterrupt

    folder = tmp_path / "runs" / "somewhere" / "mine"
    data = small.IMAGES.load("curves")
    with pytest.raises(KeyboardInterrupt):
        runner.run(config, folder, data=data, on_epoch=stop, checkpoint_seconds=0)
    (made,) = small.Making(small.order(tmp_path))("relu")
    assert folder in made.runs
    assert result_of(folder).finished
    assert executed == METHODS


def test_only_existing_runs_nothing_and_names_what_is_missing(
    tmp_path: Path, executed: list[str]
) -> None:
    nothing = small.Making(small.order(tmp_path, only_existing=True))
    (made,) = nothing("relu")
    assert made.files == ()
    assert "none of its runs exists" in nothing.said[-1]
    config = small.SCALE.series("relu", "adam").config
    runner.run(config, tmp_path / "runs" / "adam", data=small.IMAGES.load("curves"))
    (made,) = small.Making(small.order(tmp_path, only_existing=True))("relu")
    assert len(made.files) == 3
    assert made.missing == ("RMSProp, LocoProp-S, LocoProp-M, K-FAC@2 (not run)",)
    assert executed == []


def test_a_line_with_fewer_seeds_names_the_others(tmp_path: Path) -> None:
    config = small.SCALE.series("relu", "adam").config
    runner.run(config, tmp_path / "runs" / "adam", data=small.IMAGES.load("curves"))
    making = small.Making(small.order(tmp_path, only_existing=True, seeds=(0, 1, 2)))
    (made,) = making("relu")
    assert "Adam (seeds 1, 2: not run)" in made.missing
    assert "Missing in relu: Adam (seeds 1, 2: not run)." in making.said


@pytest.mark.parametrize(("without", "left"), [("kfac", 0), ("kfac@2", 0), ("kfac@3", 1)])
def test_a_method_is_left_out_with_its_every_k_or_with_one(
    tmp_path: Path, without: str, left: int
) -> None:
    order = small.order(tmp_path, only_existing=True, without=(without,))
    (made,) = small.Making(order)("relu")
    assert str(made.missing).count("K-FAC@2") == left


def test_a_run_that_was_cut_off_is_called_that(tmp_path: Path) -> None:
    runs, data = tmp_path / "runs", small.IMAGES.load("curves")
    for method in ("adam", "rmsprop"):
        runner.run(small.SCALE.series("relu", method).config, runs / method, data=data)
    metrics = runs / "rmsprop" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    (made,) = small.Making(small.order(tmp_path, only_existing=True))("relu")
    assert made.runs == (runs / "adam",)
    assert "RMSProp (not finished)" in made.missing


def rewrite(folder: Path, part: str, **values: Any) -> None:
    description = RunFolder(folder).description()
    description[part].update(values)
    (folder / "config.json").write_text(json.dumps(description))


def test_device_and_precision_count_only_where_asked_for(tmp_path: Path) -> None:
    config = small.SCALE.series("relu", "adam").config
    folder = tmp_path / "deep" / "inside" / "adam"
    runner.run(config, folder, data=small.IMAGES.load("curves"))
    rewrite(folder, "config", device="cuda", precision="tf32")
    for place, found in (
        (Place(), True),
        (Place("cuda"), True),
        (Place("cuda", "tf32"), True),
        (Place("cuda", "fp32"), False),
        (Place("cpu"), False),
    ):
        assert (Library([tmp_path], small.IMAGES, place).find(config) is not None) == found, place
    library = Library([tmp_path], small.IMAGES, Place())
    assert library.find(replace(config, seed=1)) is None
    run = library.find(config)
    assert run is not None
    assert "tf32" in where_made([run])


def test_other_images_are_another_run(tmp_path: Path) -> None:
    config = small.SCALE.series("relu", "adam").config
    runner.run(config, tmp_path / "adam", data=small.IMAGES.load("curves"))
    assert Library([tmp_path], small.IMAGES, Place()).find(config)
    assert not Library([tmp_path], Images(counts=(41, 10)), Place()).find(config)


def test_without_its_files_a_data_set_is_known_by_its_published_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str, data_dir: Path | None = None, download: bool = True) -> Dataset:
        assert not download
        raise DatasetError("not found")

    monkeypatch.setattr(datasets, "load", load)
    images._loaded.cache_clear()
    published = {"name": "mnist", "source": images.PUBLISHED, "fingerprint": "1"}
    assert Images().is_of("mnist", published)
    assert not Images().is_of("fashion-mnist", published)
    assert not Images().is_of("mnist", {**published, "source": "elsewhere"})


def test_folders_that_are_no_runs_are_passed_over(tmp_path: Path) -> None:
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"config": {"x": 1}, "data": {}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    library = Library([tmp_path, tmp_path / "nowhere"], small.IMAGES, Place())
    assert library.find(small.SCALE.series("relu", "adam").config) is None


def test_several_processes_do_the_same(tmp_path: Path) -> None:
    asked = small.order(tmp_path, jobs=2, without=(*small.NEWER, "kfac@2", "locoprop-s"))
    making = small.Making(asked)
    (made,) = making("relu")
    assert len(made.runs) == 3
    assert any(line.startswith("3 of 3 runs: ") for line in making.said)
    alone = tmp_path / "alone"
    config = small.SCALE.series("relu", "adam").config
    runner.run(config, alone, data=small.IMAGES.load("curves"))
    there = next(path for path in made.runs if "adam" in path.name)
    assert result_of(there).metrics[-1].train_loss == pytest.approx(
        result_of(alone).metrics[-1].train_loss
    )


def test_a_process_that_is_killed_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    job = run_jobs.Job(small.SCALE.series("relu", "adam").config, tmp_path / "run", "adam")
    with pytest.raises(RunError, match="fewer --jobs"):
        run_jobs.together([job], small.Deadly(), 2, lambda outcome: None)


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, ImportError])
def test_a_run_that_fails_is_named_and_the_others_are_drawn(
    failure: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: Any, folder: Path, **options: Any) -> Any:
        if config.method == "adam":
            raise failure("out of memory\nand a long story")
        return runner.run(config, folder, **options)

    monkeypatch.setattr(run_jobs, "run", run)
    making = small.Making(small.order(tmp_path))
    (made,) = making("relu")
    assert [text.endswith("failed: out of memory") for text in making.maker.failures] == [True]
    assert made.missing == ("Adam (failed: out of memory)",)
    assert len(made.runs) == len(METHODS) - 1


def test_a_peer_without_its_package_is_left_out_but_its_run_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executed: list[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    making = small.Making(small.order(tmp_path, without=("muon",)))
    (made,) = making("relu")
    assert "soap" not in executed
    assert 'SOAP (needs pip install "torch-locoprop[peers]")' in made.missing
    # A run from where the package was: as any other run, only with another method's name on it.
    adam = next(path for path in made.runs if "adam" in path.name)
    config = small.SCALE.series("relu", "soap").config
    rewrite(adam, "config", **config.to_dict())
    (made,) = small.Making(small.order(tmp_path, without=("muon", "adam")))("relu")
    assert adam in made.runs
    assert made.missing == ()


# Timings --------------------------------------------------------------------------------------


def test_a_timing_covers_whole_periods_of_the_preconditioner() -> None:
    def epochs(method: str, images: int, batch_size: int) -> int:
        config = replace(small.SCALE.series("standard", method).config, batch_size=batch_size)
        return timings.timing_config(config, images).epochs - 1

    assert epochs("adam", 60_000, 1000) == 2
    assert epochs("kfac@10", 60_000, 1000) == 2
    assert epochs("kfac@100", 60_000, 1000) == 5  # 300 steps, 3 renewals
    assert epochs("shampoo@7", 60_000, 1000) == 7
    assert epochs("kfac@100", 60_000, 100) == 2


def test_seconds_leave_out_the_first_epoch_and_come_from_one_machine(tmp_path: Path) -> None:
    asked = small.order(tmp_path, without=(*small.NEWER, "kfac@2"))
    making = small.Making(asked)
    making("standard")
    folders = sorted((tmp_path / "runs" / "timings").iterdir())
    assert len(folders) == 4
    for number, folder in enumerate(folders):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for row, seconds in zip(rows, (0.0, 50.0, 51.0 + number, 53.0 + number), strict=True):
            row["seconds"] = seconds
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    panel = catalog.loss_figure("standard", small.SCALE).panels[1]
    series = [each for each in panel.series if each.config.method not in asked.without]
    wanted = [timings.timing_config(each.config, 40) for each in series]

    def clock() -> timings.Clock:
        return timings.timed(Library(asked.folders, asked.images, asked.place), wanted, None)

    assert sorted(clock().seconds.values()) == [1.5, 2.0, 2.5, 3.0]
    assert clock().left_out == ()
    elsewhere = folders[0].rename(folders[0].with_name("another"))
    rewrite(elsewhere, "environment", machine="another")
    assert sorted(clock().seconds.values()) == [2.0, 2.5, 3.0]
    assert len(clock().left_out) == 1
    # Drawn from what exists, the line is named; asked for, it is timed again here.
    existing = small.Making(replace(asked, only_existing=True))
    assert "(not timed)" in existing("standard")[0].missing[0]
    again = small.Making(asked)
    assert again("standard")[0].missing == ()
    assert any(line.startswith("Timing 1 methods") for line in again.said)


def test_seconds_of_one_gpu_are_compared_whatever_the_threads_of_the_host() -> None:
    here = {"machine": "NVIDIA H200", "torch": "2.11.0", "threads": 1, "python": "3.12.3"}
    there = {**here, "threads": 16, "python": "3.12.4"}
    for changed, device, same in (
        (there, "cuda", True),
        (there, "cpu", False),
        ({**here, "machine": "another"}, "cuda", False),
        ({**here, "torch": "2.13.0"}, "cuda", False),
    ):
        keys = {clock_key(each, device, "fp32") for each in (here, changed)}
        assert (len(keys) == 1) is same
    assert clock_key(here, "cuda", "fp32") != clock_key(here, "cuda", "tf32")


def test_a_folder_above_the_runs_may_have_any_name(tmp_path: Path, executed: list[str]) -> None:
    asked = small.order(tmp_path / "timings" / "mine")
    (made,) = small.Making(asked)("relu")
    assert len(made.runs) == len(METHODS)
    executed.clear()
    small.Making(asked)("relu")
    assert executed == []


def test_what_is_missing_is_told_in_few_words() -> None:
    missing = Missing()
    for task in ("wide", "deep"):
        missing.note(task, "SOAP", "no package")
        missing.note(task, "SOAP", "no package")
    missing.note("deep", "Adam", "not run")
    missing.note("deep", "SGD", "not run")
    assert missing.phrases({"wide", "deep"}) == ("SOAP (no package)", "deep: Adam, SGD (not run)")
