"""A method is one record: a file dropped into the package adds it to every part of the study."""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_locoprop import study
from torch_locoprop.solvers import SOLVERS
from torch_locoprop.study import methods
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.equal_budgets import workers
from torch_locoprop.study.equal_budgets.study import Study, StudyDescription
from torch_locoprop.study.figures import catalog, costs, style
from torch_locoprop.study.figures.catalog import Scale, Series
from torch_locoprop.study.figures.protocol import PROTOCOL
from torch_locoprop.study.figures.quick import QUICK

SOURCE = """
import torch
from torch_locoprop.study.methods import (
    EqualBudgets, Method, Span, StepCost, TaskSettings, iterations, register
)

def build(model, settings):
    del settings["every"]
    return torch.optim.NAdam(model.parameters(), **settings)

register(
    Method(
        "nadam",
        build,
        {"lr": 2e-3, "every": 1},
        "untuned",
        label="NAdam",
        colour="#123456",
        marker="1",
        space={"lr": Span(1e-6, 1e-2)},
        packages=("a_package_that_is_missing",),
        cost=StepCost("m", "c", lambda d1, d2, b: 3, lambda d1, d2, b, T, k: 4 * k),
        compared=True,
        tasks={"deep": TaskSettings({"lr": 5e-4}, "the best of two rates")},
        quick={"lr": 7e-3},
        quick_tasks={"wide": {"lr": 8e-3}},
        equal_budgets=EqualBudgets(0, every=5, strict=True),
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


def line_in(figure: str, scale: Scale) -> Series:
    """Return the line of the dropped method in the first panel of a figure."""
    panel = catalog.loss_figure(figure, scale).panels[0]
    (found,) = (each for each in panel.series if each.config.method == "nadam")
    return found


@pytest.mark.usefixtures("_dropped")
def test_figures_have_its_settings_and_look() -> None:
    rates = {task: line_in(task, PROTOCOL).config.settings["lr"] for task in PROTOCOL.tasks}
    assert rates == {**dict.fromkeys(PROTOCOL.tasks, 2e-3), "deep": 5e-4}
    assert line_in("deep", PROTOCOL).origin == "the best of two rates"
    rates = {task: line_in(task, QUICK).config.settings["lr"] for task in QUICK.tasks}
    assert rates == {**dict.fromkeys(QUICK.tasks, 7e-3), "wide": 8e-3}
    line = line_in("standard", PROTOCOL)
    assert line.label == "NAdam"
    assert style.line_look(line.painted_as, line.variant)["color"] == "#123456"
    assert style.marker_look(line.painted_as)["marker"] == "1"


@pytest.mark.usefixtures("_dropped")
def test_the_table_of_costs_has_its_row() -> None:
    assert costs.method_names()[-1] == "nadam"
    assert costs.memory_formula("nadam", [(2, 2), (2, 2)], 7) == 2 * 3
    assert costs.computation_formula("nadam@5", [(2, 2)], 7, 10) == 4 * 5


@pytest.mark.usefixtures("_dropped")
def test_it_takes_part_in_the_study_of_equal_budgets(tmp_path: Path) -> None:
    assert StudyDescription().methods[0] == "nadam@5", "its place is the first"
    own = Study(tmp_path, StudyDescription(tasks=("standard",), quick=True))
    planned = own.plan("cpu", lambda config, images: 2.0 * config.settings.get("every", 1))[0]
    assert (planned.method, planned.left, planned.seconds) == ("nadam@5", 12 + 2 * 3, 10.0)
    trial = {"method": "nadam@5", "settings": {}, "seed": 0}
    assert workers.config_of(trial, {}, "cuda").precision == "fp32"
    assert workers.config_of({**trial, "method": "adam"}, {}, "cuda").precision == "tf32"
    assert workers.config_of(trial, {"precision": "tf32"}, "cuda").precision == "tf32"


def test_no_table_by_methods_is_outside_of_the_records() -> None:
    """The settings of the inner solvers, which share names with methods, are no such table."""
    names = set(methods.names()) - set(SOLVERS)
    assert {"kfac", "locoprop-m", "muon", "shampoo"} <= names
    root = Path(study.__file__).parent
    for path in root.rglob("*.py"):
        if path.relative_to(root).parts[0] in ("methods", "demo"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            keys = node.keys if isinstance(node, ast.Dict) else []
            literals = {key.value for key in keys if isinstance(key, ast.Constant)}
            assert not {str(key).partition("@")[0] for key in literals} & names, path
