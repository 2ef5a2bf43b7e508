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
from torch_locoprop.study.machine import revision
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
        revision: The revision of the code; by default that of git.
    """

    device: str = "cpu"
    jobs: int = 1
    together: int = 1
    deadline: float = math.inf
    revision: str = field(default_factory=revision)


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

    def begin(self) -> None:
        """Store what the study consists of, so that it can be continued."""
        content = json.dumps(self.description.to_dict(), indent=1) + "\n"
        write(self.folder / "study.json", content)

    def run(
        self,
        how: How | str = "cpu",
        say: workers.Say = lambda text: None,
        watch: workers.Watch = lambda trial, row: None,
        on_trials: Callable[[], None] = lambda: None,
    ) -> int:
        """Train all trials that are left, and write the tables.

        Tasks and methods are taken in their order. With several processes, one that is free takes the
        next job even if other methods or tasks have not ended yet.

        Args:
            how: How the trials are trained, or the device.
            say: Called with messages about trials that were not trained.
            watch: Called with the metrics of each epoch of a trial that is trained alone.
            on_trials: Called whenever trials have ended.

        Returns:
            The number of populations or runs that failed.
        """
        how = How(how) if isinstance(how, str) else how
        self.begin()
        jobs = _Jobs(self, how)

        def on_end() -> None:
            self._write_tables()
            on_trials()

        if how.jobs == 1:
            failed = workers.in_process(jobs.next, say, watch, on_end)
        else:
            failed = workers.in_processes(jobs.next, how.jobs, how.deadline, say, on_end)
        self._write_tables()
        return failed

    def _write_tables(self) -> None:
        """Write the tables of what has ended so far, and remove the runs of finished tasks."""
        for task in self.tasks:
            results = task.results()
            if results:
                write(task.folder / "table.md", summary.table(task))
            if not any(task.left(method, results) for method in task.methods):
                shutil.rmtree(task.folder / "running", ignore_errors=True)
        outcomes = {task.name: summary.summary(task) for task in self.tasks}
        if profile := reached_losses.profile_table(outcomes):
            write(self.folder / "profile.md", profile)

    def work(self, task: TaskStudy, stage: str, how: How) -> workers.Work:
        """Return what a process needs to train trials of a stage."""
        search = SearchImages(self.images, self.description.budget.held_out)
        return workers.Work(
            task.task,
            how.device,
            task.results_file,
            search if stage == SEARCH else self.images,
            task.folder / "running",
            how.together,
            second="held_out" if stage == SEARCH else "test",
            deadline=how.deadline,
            revision=how.revision,
        )


class _Jobs:
    """The jobs of a study in their order: by tasks, then by methods, each trial once."""

    def __init__(self, study: Study, how: How) -> None:
        self._study, self._how = study, how
        self._given: dict[str, list[Trial]] = {task.name: [] for task in study.tasks}
        self._waiting: list[tuple[workers.Job, workers.Work]] = []

    def next(self) -> tuple[workers.Job, workers.Work] | None:
        """Return the next job that can be trained now; None if there is none."""
        for task in self._study.tasks:
            given = self._given[task.name]
            new = [trial for trial in task.next_trials() if is_pending(trial, given)]
            given += new
            for stage in (SEARCH, FINAL):
                own = [trial for trial in new if trial["stage"] == stage]
                work = self._study.work(task, stage, self._how)
                jobs = workers.jobs_of(own, task.task, self._how.device, self._how.together)
                self._waiting += [(job, work) for job in jobs]
            self._waiting.sort(key=self._place)
            if self._waiting:
                return self._waiting.pop(0)
        return None

    def _place(self, waiting: tuple[workers.Job, workers.Work]) -> tuple[int, int]:
        """Return where a job is in the order of tasks and methods."""
        job, work = waiting
        files = [task.results_file for task in self._study.tasks]
        methods = self._study.description.methods
        return files.index(work.results), methods.index(job[0]["method"])


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
