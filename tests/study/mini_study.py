"""A study in miniature: few generated curves, small models, a second for all its trials."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_locoprop.study.equal_budgets import study
from torch_locoprop.study.equal_budgets.study import Study, StudyDescription
from torch_locoprop.study.equal_budgets.task_study import Budget
from torch_locoprop.study.figures.quick import QUICK

TASK = {"dataset": "curves", "model": "784-6-3", "batch_size": 30, "warmup_epochs": 1}

SMALL = replace(
    QUICK,
    tasks={"standard": {**TASK, "epochs": 2}, "relu": {**TASK, "epochs": 2, "transfer": "relu"}},
    images=(120, 30),
)

METHODS = ("adam", "muon")


def use_small_tasks() -> None:
    """Make the tasks of ``--quick`` smaller; in processes of their own, which nothing undoes."""
    study.QUICK = SMALL


def description(trials: int = 3, **given: Any) -> StudyDescription:
    usual = {"tasks": ("standard",), "methods": METHODS, "quick": True}
    return StudyDescription(budget=Budget(trials, (0, 1)), **{**usual, **given})


def run_to_the_end(folder: str, started: Any) -> None:
    """The work of one process that may be killed."""
    import torch

    use_small_tasks()
    torch.set_num_threads(1)
    started.set()
    Study(Path(folder), description(epochs=20)).run("cpu")
