"""A study of several tasks in one folder: all trials of all methods, until none is left.

    from torch_locoprop.study.equal_budgets.study import Study, StudyDescription

    study = Study("studies/first", StudyDescription(tasks=("standard",), quick=True))
    study.run("cpu")

The folder has `study.json`, which describes the study, and a subfolder for each task.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch_locoprop.paper.names import unknown
from torch_locoprop.study import methods
from torch_locoprop.study.atomic_files import write
from torch_locoprop.study.equal_budgets import plan, reached_losses, summary, workers
from torch_locoprop.study.equal_budgets.task_study import (
    FINAL,
    SEARCH,
    Budget,
    SearchImages,
    TaskStudy,
)
from torch_locoprop.study.equal_budgets.trials import Trial, is_pending
from torch_locoprop.study.figures.catalog import Scale
from torch_locoprop.study.figures.images import Images
from torch_locoprop.study.figures.protocol import PROTOCOL
from torch_locoprop.study.figures.quick import QUICK
from torch_locoprop.study.methods import in_equal_budgets
from torch_locoprop.study.training.description import RunError, read_description

TASKS = ("standard", "deep", "wide", "batch-100", "relu", "fashion-mnist", "curves")
"""All tasks, the most important ones first."""


@dataclass(frozen=True)
class StudyDescription:
    """The content of a study: its tasks and methods, and the budget of each method.

    Args:
        tasks: Names of tasks (`TASKS`).
        methods: The methods, by default those whose records take part.
        budget: What every method gets on every task.
        quick: Generated images and small models instead of the protocol of the paper.
        epochs: Epochs of every run; None for those of the tasks.

    Raises:
        ValueError: If a task or a method is unknown.
    """

    tasks: tuple[str, ...] = TASKS
    methods: tuple[str, ...] = field(default_factory=in_equal_budgets)
    budget: Budget = field(default_factory=lambda: Budget(12))
    quick: bool = False
    epochs: int | None = None

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise ValueError(unknown("task", task, TASKS))
        for method in self.methods:
            methods.get(method)

    @property
    def scale(self) -> Scale:
        """The tasks of the figures to which the names refer."""
        return QUICK if self.quick else PROTOCOL

    def task(self, name: str) -> dict[str, Any]:
        """Return the fields of a `RunConfig` for a task, without those of a method."""
        own = {} if self.epochs is None else {"epochs": self.epochs}
        usual = {"model": "standard", "transfer": "tanh", "epochs": 100, "batch_size": 1000}
        return {**usual, **self.scale.tasks[name], **own}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can store."""
        return {**asdict(self), "budget": self.budget.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StudyDescription:
        """Return the description that `to_dict` stored."""
        own = {each.name: values[each.name] for each in fields(cls)}
        budget = {**own["budget"], "seeds": tuple(own["budget"]["seeds"])}
        lists = {name: tuple(own[name]) for name in ("tasks", "methods")}
        return cls(**{**own, **lists, "budget": Budget(**budget)})

    def extended(self, tasks: tuple[str, ...], names: tuple[str, ...]) -> StudyDescription:
        """Return the description with more tasks and methods."""
        return replace(
            self,
            tasks=tuple(dict.fromkeys((*self.tasks, *tasks))),
            methods=tuple(dict.fromkeys((*self.methods, *names))),
        )


@dataclass(frozen=True)
class How:
    """The way in which trials are trained: device, processes, populations and deadline.

    Args:
        device: ``cpu`` or ``cuda``.
        jobs: Processes at a time.
        together: Trials that train together as a population; alone, they have checkpoints.
        deadline: The time, as ``time.time()``, at which to stop.
    """

    device: str = "cpu"
    jobs: int = 1
    together: int = 1
    deadline: float = math.inf


class Study:
    """A study in a folder.

    Args:
        folder: The folder.
        description: What the study consists of.
        data_dir: A folder with data sets.
    """

    def __init__(
        self, folder: Path | str, description: StudyDescription, data_dir: Path | None = None
    ) -> None:
        self.folder, self.description = Path(folder), description
        self.images = Images(data_dir, description.scale.images)
        self.tasks = [
            TaskStudy(
                name,
                self.folder / name,
                description.task(name),
                description.methods,
                description.budget,
            )
            for name in description.tasks
        ]

    def plan(self, device: str, estimate: plan.Estimate | None = None) -> list[plan.Planned]:
        """Return what is left of the study, and how long it takes.

        Args:
            device: The device on which it continues.
            estimate: The seconds of a run of a method without a finished trial; measured by default.
        """
        estimate = estimate or plan.seconds_of_run
        return [
            each
            for task in self.tasks
            for each in plan.plan_of(
                task, device, self.images.count(task.task["dataset"]), estimate
            )
        ]

    def run(
        self,
        how: How | str = "cpu",
        say: workers.Say = lambda text: None,
        watch: workers.Watch = lambda trial, row: None,
        on_trials: Callable[[TaskStudy], None] = lambda task: None,
    ) -> int:
        """Train all trials that are left, task by task, and write the tables.

        Args:
            how: How the trials are trained, or the device.
            say: Called with messages about trials that were not trained.
            watch: Called with the metrics of each epoch of a trial that is trained alone.
            on_trials: Called with the task whenever some of its trials have ended.

        Returns:
            The number of populations or runs that failed.
        """
        how = How(how) if isinstance(how, str) else how
        content = json.dumps(self.description.to_dict(), indent=1) + "\n"
        write(self.folder / "study.json", content)
        failed = 0
        for task in self.tasks:
            failed += self._run_task(task, how, say, watch, on_trials)
            write(task.folder / "table.md", summary.table(task))
        profile = reached_losses.profile_table(
            {task.name: summary.summary(task) for task in self.tasks}
        )
        if profile:
            write(self.folder / "profile.md", profile)
        return failed

    def _run_task(
        self,
        task: TaskStudy,
        how: How,
        say: workers.Say,
        watch: workers.Watch,
        on_trials: Callable[[TaskStudy], None],
    ) -> int:
        """Train the trials of a task until none is left, or none of the rest can be trained."""
        tried: list[Trial] = []
        failed = 0
        while trials := [trial for trial in task.next_trials() if is_pending(trial, tried)]:
            tried += trials
            for stage in (SEARCH, FINAL):
                own = [trial for trial in trials if trial["stage"] == stage]
                for jobs in self._portions(task, own, how):
                    work = self._work(task, stage, how)
                    if how.jobs == 1:
                        failed += workers.in_process(jobs, task.task, how.device, work, say, watch)
                    else:
                        failed += workers.in_processes(
                            jobs, task.task, how.device, how.jobs, work, say
                        )
                    on_trials(task)
        if not any(task.left(method, task.results()) for method in task.methods):
            shutil.rmtree(task.folder / "running", ignore_errors=True)
        return failed

    def _portions(self, task: TaskStudy, trials: list[Trial], how: How) -> list[list[workers.Job]]:
        """Return the jobs one by one for this process, or all at once for several processes."""
        jobs = workers.jobs_of(trials, task.task, how.device, how.together)
        return [[job] for job in jobs] if how.jobs == 1 else [jobs] if jobs else []

    def _work(self, task: TaskStudy, stage: str, how: How) -> workers.Work:
        search = SearchImages(self.images, self.description.budget.held_out)
        return workers.Work(
            task.results_file,
            search if stage == SEARCH else self.images,
            runs=task.folder / "running",
            second="held_out" if stage == SEARCH else "test",
            deadline=how.deadline,
            revision=workers.revision(),
        )


def stored(folder: Path) -> StudyDescription | None:
    """Return the description of the study in a folder, or None if there is none.

    Raises:
        RunError: If the file is not the description of a study.
    """
    path = folder / "study.json"
    if not path.is_file():
        return None
    needed = {"tasks": list, "methods": list, "budget": dict, "quick": bool, "epochs": object}
    content = read_description(path, "study", needed)
    try:
        return StudyDescription.from_dict(content)
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path} is not the description of a study ({error}).") from error
