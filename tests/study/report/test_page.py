"""The page as a file: it loads nothing, escapes all text, and shows the reconstructions."""

import base64
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from study.report.made import data, made

from torch_locoprop.study import atomic_files
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset, DatasetError
from torch_locoprop.study.report import comparison, page
from torch_locoprop.study.report.comparison import Task
from torch_locoprop.study.report.gallery import Gallery, gallery
from torch_locoprop.study.report.runs import Skipped, find
from torch_locoprop.study.training.run_folder import RunFolder

ROUNDING = 0.51 / 255
EVIL = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def _found_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load", lambda name, data_dir=None, download=True: data())


def tasks_in(folder: Path) -> list[Task]:
    return comparison.tasks(find([folder])[0])


def page_of(folder: Path, title: str = "title") -> str:
    tasks = tasks_in(folder)
    return page.page(title, tasks, [Gallery((), ())] * len(tasks), [])


def content(text: str) -> Any:
    """Return the embedded data as a browser reads it, up to the first end of the element."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', text, re.S)
    assert found
    return json.loads(found[1])


def test_the_page_has_every_number_and_every_setting(tmp_path: Path) -> None:
    files = made(tmp_path / "a", [9.0, 4.0, 3.0], "locoprop-m")
    (task,) = content(page_of(tmp_path))["tasks"]
    (series,) = task["series"]
    rows = files.metrics()
    assert series["runs"][0]["train"] == [row.train_loss for row in rows]
    assert series["runs"][0]["test"] == [row.test_loss for row in rows]
    assert series["runs"][0]["seconds"] == [row.seconds for row in rows]
    config = files.config()
    assert config.settings.items() <= series["hyper_parameters"].items()
    assert series["hyper_parameters"]["weight_decay"] == config.weight_decay
    assert task["environments"][0]["is"]["machine"] == "m1"
    assert task["about"]["data"] == data().metadata


@pytest.mark.parametrize(("device", "shown"), [("cpu", None), ("cuda", 52.0)])
def test_memory_is_that_of_a_gpu(tmp_path: Path, device: str, shown: float | None) -> None:
    """On a CPU only the memory of the whole process is known, so it is left out."""
    made(tmp_path / "a", [9.0, 4.0, 3.0], "adam", device=device)
    (series,) = content(page_of(tmp_path))["tasks"][0]["series"]
    assert (series["memory"] and series["memory"]["mean"]) == shown


def test_text_of_runs_cannot_break_out(tmp_path: Path) -> None:
    evil = {"method": EVIL, "settings": {EVIL: EVIL}, "dataset": EVIL}
    made(tmp_path / "a", [9.0, 4.0], fields=evil, environment={EVIL: EVIL})
    tasks = tasks_in(tmp_path)
    skipped = [Skipped(Path(EVIL), EVIL)]
    text = page.page(EVIL, tasks, [Gallery((), (EVIL,))], skipped)
    assert content(text)["tasks"][0]["series"][0]["method"] == EVIL
    ours = text.replace(page.plotly(), "")
    assert "alert(1)</script>" not in ours
    assert ours.count("</script") == 3
    assert "<img" not in ours
    assert "<!--" not in ours


def test_placeholders_in_texts_stay_texts(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0])
    assert "<h1>{{data}}</h1>" in page_of(tmp_path, "{{data}}")


def test_nothing_is_fetched(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0])
    ours = page_of(tmp_path).replace(page.plotly(), "")
    assert not re.search(r"https?:|//\w+\.\w+/|@import|url\(|<link(?! rel=\"icon\")|\ssrc=", ours)
    assert "default-src 'none'" in ours
    policy = re.search(r'Security-Policy" content="([^"]*)"', ours)
    assert policy
    assert "connect-src" not in policy[1]
    assert "script-src 'sha256-" in policy[1]


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, float("nan")], diverged=True, fields={"weight_decay": float("inf")})
    (task,) = content(page_of(tmp_path))["tasks"]
    assert task["series"][0]["runs"][0]["train"] == [9.0, None]
    assert task["series"][0]["hyper_parameters"]["weight_decay"] is None


def test_more_environments_than_letters(tmp_path: Path) -> None:
    for index in range(28):
        made(tmp_path / str(index), [9.0, 4.0], seed=index, environment={"machine": index})
    (task,) = content(page_of(tmp_path))["tasks"]
    names = [each["name"] for each in task["environments"]]
    assert names[:2] == ["A", "B"]
    assert names[25:] == ["Z", "AA", "AB"]


# Reconstructions ------------------------------------------------------------------------------


def pixels(uri: str) -> torch.Tensor:
    prefix, encoded = uri.split(",")
    assert prefix == "data:image/png;base64"
    image = imread(io.BytesIO(base64.b64decode(encoded)), format="png")
    return 1 - torch.tensor(image[:, :, 0]).flatten()


def test_pictures_are_what_the_models_make_of_the_images(tmp_path: Path) -> None:
    files = made(tmp_path / "a", [9.0, 4.0], checkpoint=True, seed=3)
    made(tmp_path / "b", [9.0, 5.0], "sgd")
    (task,) = tasks_in(tmp_path)
    found = gallery(task, 5, None)
    original, adam = found.rows
    images = data().test[::2]
    assert found.missing == ("sgd: no checkpoint.pt.",)
    assert [original[0], adam[0], adam[2]] == ["original", "adam", "seed 3, epoch 1"]
    for tile, image in zip(original[3], images, strict=True):
        assert torch.allclose(pixels(tile), image, atol=ROUNDING)
    with torch.no_grad():
        made_of = torch.sigmoid(files.trained_model()(images))
    for tile, image in zip(adam[3], made_of, strict=True):
        assert torch.allclose(pixels(tile), image, atol=ROUNDING)


def test_labelled_images_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.tensor([2, 2, 0, 1, 1, 0, 0, 2, 1, 0])
    labelled = replace(data(), test_labels=labels)
    monkeypatch.setattr(datasets, "load", lambda *_, **__: labelled)
    made(tmp_path / "a", [9.0, 4.0], checkpoint=True)
    (row, _) = gallery(tasks_in(tmp_path)[0], 4, None).rows
    for tile, index in zip(row[3], [2, 3, 0, 5], strict=True):
        assert torch.allclose(pixels(tile), data().test[index], atol=ROUNDING)


def test_why_there_are_no_pictures_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "a", [9.0, 4.0])
    (task,) = tasks_in(tmp_path)
    assert "checkpoint.pt" in gallery(task, 5, None).missing[0]
    made(tmp_path / "b", [9.0, 5.0], checkpoint=True, seed=1)
    (task,) = tasks_in(tmp_path)
    assert gallery(task, 0, None) == Gallery((), ())
    other = Dataset("curves", data().train, data().test + 1, "other")
    monkeypatch.setattr(datasets, "load", lambda *_, **__: other)
    assert "--data-dir" in gallery(task, 5, None).missing[0]

    def missing(*_: Any, download: bool, **__: Any) -> Dataset:
        assert not download, "a report is no reason to download"
        raise DatasetError("gone")

    monkeypatch.setattr(datasets, "load", missing)
    assert gallery(task, 5, None).missing == ("gone",)


def test_many_series_without_a_checkpoint_take_one_line(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0], checkpoint=True)
    for lr in range(1, 6):
        made(tmp_path / f"{lr}", [9.0, 5.0], "sgd", settings={"lr": lr / 10})
    (task,) = tasks_in(tmp_path)
    assert gallery(task, 5, None).missing == ("5 of 6 series: no checkpoint.pt.",)


def test_images_that_no_folder_has_are_not_asked_for(tmp_path: Path) -> None:
    files = made(tmp_path / "a", [9.0, 4.0], checkpoint=True)
    files.begin({**files.description(), "data": datasets.some_curves(4, 1).metadata})
    assert gallery(tasks_in(tmp_path)[0], 5, None).missing == (
        "The runs used generated images (the first 5 generated), which are not stored.",
    )


def test_a_diverged_run_says_so_instead_of_black_images(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0, 3.0], checkpoint=True)
    files = made(tmp_path / "b", [9.0, 1e9], "sgd", epochs=2, diverged=True, checkpoint=True)
    checkpoint = files.checkpoint()
    assert checkpoint
    black = {name: torch.full_like(each, 1e9) for name, each in checkpoint.model.items()}
    files.write_checkpoint(replace(checkpoint, model=black))
    found = gallery(tasks_in(tmp_path)[0], 2, None)
    assert [row[0] for row in found.rows] == ["original", "adam", "sgd"]
    assert found.rows[2][2:] == ("diverged in epoch 1", [])
    assert not found.missing
    lost = made(tmp_path / "c", [9.0, 4.0, 5.0], "rmsprop", checkpoint=True)
    broken = {name: torch.full_like(each, torch.nan) for name, each in checkpoint.model.items()}
    lost.write_checkpoint(replace(checkpoint, model=broken))
    found = gallery(tasks_in(tmp_path)[0], 2, None)
    assert found.missing == ("rmsprop: its reconstructions are not finite.",)


def test_a_broken_checkpoint_costs_one_row(tmp_path: Path) -> None:
    made(tmp_path / "a", [9.0, 4.0], checkpoint=True)
    made(tmp_path / "b", [9.0, 5.0], "sgd", checkpoint=True)
    (tmp_path / "b" / "checkpoint.pt").write_bytes(b"nothing")
    found = gallery(tasks_in(tmp_path)[0], 2, None)
    assert [row[0] for row in found.rows] == ["original", "adam"]
    assert "cannot be read as a checkpoint" in found.missing[0]


def test_a_checkpoint_of_another_model_costs_one_row(tmp_path: Path) -> None:
    files = made(tmp_path / "a", [9.0, 4.0], checkpoint=True)
    other = made(tmp_path / "elsewhere" / "b", [9.0, 5.0], model="16-3", checkpoint=True)
    checkpoint = RunFolder(other.path).checkpoint()
    assert checkpoint
    files.write_checkpoint(checkpoint)
    (entry,) = gallery(comparison.tasks(find([files.path])[0])[0], 2, None).missing
    assert entry.startswith("adam: ")


def test_pixels_that_make_no_square_are_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = made(tmp_path / "a", [9.0, 4.0], checkpoint=True)
    flat = Dataset("curves", data().train[:, :12], data().test[:, :12], "flat")
    description = files.description()
    files.begin({**description, "data": flat.metadata})
    monkeypatch.setattr(datasets, "load", lambda *_, **__: flat)
    assert gallery(tasks_in(tmp_path)[0], 2, None).missing == (
        "Images of 12 pixels are not square.",
    )


# The file -------------------------------------------------------------------------------------


def test_the_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new folder" / "report.html"
    atomic_files.write(target, "first")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as error:
        atomic_files.write(target, "second")
    assert error.value.filename == str(target)
    assert target.read_text() == "first"
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]
