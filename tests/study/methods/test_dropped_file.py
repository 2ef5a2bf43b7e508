"""A file that is dropped into the package is a method of the study."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_locoprop.study import methods
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset

SOURCE = """
import torch
from torch_locoprop.study.methods import Method, Span, register

def build(model, settings):
    return torch.optim.NAdam(model.parameters(), **settings)

register(
    Method(
        "nadam",
        build,
        {"lr": 2e-3},
        "untuned",
        label="NAdam",
        colour="#123456",
        space={"lr": Span(1e-6, 1e-2)},
        packages=("a_package_that_is_missing",),
    )
)
"""
NAME = f"{methods.__name__}.dropped"


@pytest.fixture
def _dropped(own_methods: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "dropped.py").write_text(SOURCE)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    methods.import_all()
    yield
    del sys.modules[NAME]
    del methods.dropped  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_dropped")
def test_its_record_is_found(run: Any) -> None:
    assert (methods.label("nadam"), methods.colour("nadam")) == ("NAdam", "#123456")
    (listed,) = json.loads(run("methods", "nadam", "--json")[1])
    assert listed["space"] == {"lr": {"log": [1e-6, 1e-2]}}
    assert listed["missing"] == "needs the package a_package_that_is_missing"


@pytest.mark.usefixtures("_dropped")
def test_it_is_compared_with_others(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.rand(60, 12, generator=torch.Generator().manual_seed(1))
    data = Dataset("curves", images[:40], images[40:], "made for tests")
    monkeypatch.setattr(datasets, "load", lambda *_, **__: data)
    monkeypatch.chdir(tmp_path)
    task = ["--model", "12-8-3", "--epochs", "2", "--batch-size", "20", "--device", "cpu"]
    code, out, _ = run("compare", "nadam", "adam", *task, "--json", "--quiet")
    assert code == 0
    assert {each["config"]["method"] for each in json.loads(out)} == {"nadam", "adam"}
