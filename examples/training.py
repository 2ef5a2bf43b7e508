"""Train one model with one method: the task, the method, the training loop and its evaluation.

A task has a model, data and methods. A method makes an optimizer from a model and settings. At equal
seeds all methods have the same initial weights, batches and schedule: a warm-up over 5 % of the steps,
then a linear decay. `comparison.py` makes many runs.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torch_locoprop.study import atomic_files, machine

Settings = Mapping[str, Any]
Record = dict[str, Any]
Batches = Iterator[tuple[Tensor, Tensor]]

POINTS = 20  # evaluations in a run


@dataclass(frozen=True)
class Method:
    """An optimizer to compare.

    Args:
        build: makes the optimizer from a model and settings.
        settings: the settings that are used if no search was made.
        grids: settings that a search tries, beside `settings`: all combinations of each grid.
    """

    build: Callable[[nn.Module, Settings], Optimizer]
    settings: Settings
    grids: Sequence[Mapping[str, Sequence[Any]]]

    def trials(self) -> list[Settings]:
        """Return the settings of all trials of a search."""
        return [
            {**self.settings, **dict(zip(grid, choice, strict=True))}
            for grid in self.grids
            for choice in itertools.product(*grid.values())
        ]

    def at_edge(self, settings: Settings) -> list[str]:
        """Return the names of numbers that are the lowest or highest of three or more tried ones."""
        tried = {name: {trial[name] for trial in self.trials()} for name in self.settings}
        spans = {
            name: values
            for name, values in tried.items()
            if len(values) > 2 and not isinstance(settings[name], str)
        }
        return [name for name, span in spans.items() if settings[name] in (min(span), max(span))]


@dataclass(frozen=True)
class Task(ABC):
    """A model, its data, and the methods that train it.

    Args:
        source: the file or folder of the data. None: the task's default.
        bf16: compute forward passes under bfloat16 autocast.
    """

    source: Path | None
    bf16: bool = False
    name: ClassVar[str]
    methods: ClassVar[Mapping[str, Method]]
    shown: ClassVar[Sequence[str]]  # names of the results in the table, beside the training loss
    # Held-out parts that are evaluated during training; the others are evaluated at the end alone.
    followed: ClassVar[Collection[str]] = ("validation", "test")

    @property
    def description(self) -> Record:
        """The settings of the task that results depend on, as JSON values."""
        fields = {name: value for name, value in asdict(self).items() if name != "source"}
        known: Record = json.loads(json.dumps(fields))
        return known

    @abstractmethod
    def load(self, device: torch.device) -> Any:
        """Load the data to the device."""

    @abstractmethod
    def model(self, data: Any) -> nn.Module:
        """Make a model with new weights; its outputs `[..., classes]` are logits."""

    @abstractmethod
    def batches(self, data: Any, generator: torch.Generator) -> Batches:
        """Yield batches of inputs and labels, forever."""

    @abstractmethod
    def held_out(self, data: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Return inputs and labels of the parts "validation" and "test"."""


@dataclass(frozen=True)
class Run:
    """One training run, from new weights to the end of the schedule.

    Args:
        method: the name of the method.
        settings: settings of the method.
        seed: of the initial weights and the batches.
        steps: length of the training and of the schedule.
        folder: where the result is written.
    """

    method: str
    settings: Settings
    seed: int
    steps: int
    folder: Path

    @property
    def path(self) -> Path:
        """The file of the result."""
        words = [self.method, *(f"{name}={value}" for name, value in self.settings.items())]
        return self.folder / "-".join([*words, f"steps={self.steps}", f"seed={self.seed}.json"])


def schedule(optimizer: Optimizer, steps: int) -> LambdaLR:
    """Return a schedule: a linear warm-up over 5 % of the steps, then a linear decay to zero."""
    warm_up = math.ceil(0.05 * steps)
    rising = [(step + 1) / warm_up for step in range(warm_up)]
    after = max(steps - warm_up, 1)
    falling = [(steps - step) / after for step in range(warm_up, steps + 1)]
    return LambdaLR(optimizer, [*rising, *falling].__getitem__)


def shown(value: float | str) -> str:
    """Return the text of a setting for tables and messages."""
    return value if isinstance(value, str) else f"{value:g}"


class Training:
    """A model in training; `seconds` is the time spent in training steps."""

    def __init__(self, task: Task, run: Run, device: str) -> None:
        self.device = torch.device(device)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(run.seed)
        self.task, self.data = task, _data(task, device)
        self.model = task.model(self.data).to(self.device)
        self.optimizer = task.methods[run.method].build(self.model, run.settings)
        self.schedule = schedule(self.optimizer, run.steps)
        generator = torch.Generator(self.device).manual_seed(run.seed)
        self.batches = task.batches(self.data, generator)
        self.seconds = 0.0

    def advance(self, steps: int) -> Tensor:
        """Train for `steps` steps and return the mean of their losses."""
        self.model.train()
        total = torch.zeros((), device=self.device)
        started = self._now()
        for _ in range(steps):
            inputs, labels = next(self.batches)
            loss = self.loss(inputs, labels)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            total += loss.detach()
        self.seconds += self._now() - started
        return total / steps

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(inputs).flatten(0, -2), labels.flatten())

    def logits(self, inputs: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.task.bf16):
            outputs: Tensor = self.model(inputs)
        return outputs.float()

    @torch.no_grad()
    def evaluate(self, during_training: bool) -> dict[str, float]:
        """Return loss and accuracy on held-out data.

        Args:
            during_training: evaluate the parts that the task follows during training, else the others.
        """
        self.model.eval()
        found = {}
        for part, (inputs, labels) in self.task.held_out(self.data).items():
            if (part in self.task.followed) != during_training:
                continue
            chunks = zip(inputs.split(500), labels.split(500), strict=True)
            loss, right = torch.zeros(2, device=self.device, dtype=torch.float64)
            for x, y in chunks:
                logits, truth = self.logits(x).flatten(0, -2), y.flatten()
                loss += F.cross_entropy(logits, truth, reduction="sum")
                right += (logits.argmax(-1) == truth).sum()
            found[f"{part} loss"] = float(loss) / labels.numel()
            found[f"{part} accuracy"] = float(right) / labels.numel()
        return found

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@cache
def _data(task: Task, device: str) -> Any:
    """Return the data of a task; it is loaded once in each process."""
    return task.load(torch.device(device))


def perform(task: Task, run: Run, device: str, deadline: float = math.inf) -> Record | None:
    """Train a model, write the result to the run's file and return it.

    A run ends early, as diverged, when a loss is not finite. At the deadline, a time of `time.time()`,
    it is stopped: None is returned, and no file is written.
    """
    machine.forget_peak(torch.device(device))
    training = Training(task, run, device)
    ends = sorted({round(run.steps * point / POINTS) for point in range(POINTS + 1)} - {0})
    curve: list[Record] = []
    for begin, end in itertools.pairwise([0, *ends]):
        if time.time() > deadline:
            return None
        train_loss = float(training.advance(end - begin))
        point = {"train loss": train_loss, **training.evaluate(during_training=True)}
        if not all(map(math.isfinite, point.values())):
            curve.append({"step": end})
            break
        curve.append({"step": end, "seconds": training.seconds, **point})
    done, diverged = curve[-1]["step"], "train loss" not in curve[-1]
    final = {name: value for name, value in curve[-1].items() if name != "seconds"}
    if not diverged:
        final |= training.evaluate(during_training=False)
    record = {
        "task": task.description,
        "method": run.method,
        "settings": dict(run.settings),
        "seed": run.seed,
        "steps": run.steps,
        **machine.environment(device),
        "seconds": round(training.seconds, 3),
        "ms_per_step": round(1000 * training.seconds / done, 4),
        "memory_mib": round(machine.memory_mib(training.device), 1),
        "diverged": diverged,
        "final": _rounded(final),
        "curve": [_rounded(point) for point in curve],
    }
    write(run.path, record)
    return record


def _rounded(point: Record) -> Record:
    return {name: round(value, 6) for name, value in point.items()}


def write(path: Path, content: Record) -> None:
    atomic_files.write(path, json.dumps(content, indent=1) + "\n")


def finished(task: Task, run: Run) -> Record | None:
    """Return the result of a run from its file, or None if there is no file.

    Raises:
        SystemExit: the file is of a task with other settings.
    """
    if not run.path.exists():
        return None
    record: Record = json.loads(run.path.read_text())
    if record["task"] != task.description:
        raise SystemExit(
            f"{run.path} belongs to another task: {record['task']} instead of "
            f"{task.description}. Choose another folder with --out."
        )
    return record
