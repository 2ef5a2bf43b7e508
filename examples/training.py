"""A task, its methods, and one run: the ordinary training loop, evaluated now and then.

A task says what its model, its data and its methods are; a method makes an optimizer of a model and
settings. All methods have the same initial weights, batches and schedule at equal seeds: a warm-up
over 5 % of the steps and a linear decay to almost nothing. Many runs are in ``comparison.py``.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torch_locoprop.study.data import safe_files
from torch_locoprop.study.training import machine

Settings = Mapping[str, Any]
Record = dict[str, Any]
Batches = Iterator[tuple[Tensor, Tensor]]

POINTS = 20  # of a curve: how often a run is evaluated


@dataclass(frozen=True)
class Method:
    """How to make an optimizer of a model, with which settings, and which ones a search tries."""

    build: Callable[[nn.Module, Settings], Optimizer]
    settings: Settings  # where no search has found better ones
    grids: Sequence[Mapping[str, Sequence[Any]]]  # of some settings; all combinations in each

    def trials(self) -> list[Settings]:
        """All settings of the grids."""
        return [
            {**self.settings, **dict(zip(grid, choice, strict=True))}
            for grid in self.grids
            for choice in itertools.product(*grid.values())
        ]

    def at_edge(self, settings: Settings) -> list[str]:
        """Which numbers are the lowest or highest of three or more that were tried."""
        tried = {name: {trial[name] for trial in self.trials()} for name in self.settings}
        spans = {
            name: values
            for name, values in tried.items()
            if len(values) > 2 and not isinstance(settings[name], str)
        }
        return [name for name, span in spans.items() if settings[name] in (min(span), max(span))]


@dataclass(frozen=True)
class Task(ABC):
    """A model, its data, and the methods that train it."""

    source: Path | None  # where the data is
    bf16: bool = False  # forward passes in autocast
    name: ClassVar[str]
    methods: ClassVar[Mapping[str, Method]]
    shown: ClassVar[Sequence[str]]  # in the table

    @property
    def description(self) -> Record:
        """What results depend on, as JSON knows it."""
        fields = {name: value for name, value in asdict(self).items() if name != "source"}
        known: Record = json.loads(json.dumps(fields))
        return known

    @abstractmethod
    def load(self, device: torch.device) -> Any:
        """The data, on the device."""

    @abstractmethod
    def model(self, data: Any) -> nn.Module:
        """A model with new weights; its outputs ``[..., classes]`` are logits."""

    @abstractmethod
    def batches(self, data: Any, generator: torch.Generator) -> Batches:
        """Batches without end."""

    @abstractmethod
    def held_out(self, data: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Inputs and labels by the name of the part: "validation" and "test"."""


@dataclass(frozen=True)
class Run:
    """One training from new weights to the end of the schedule, and where its result goes."""

    method: str
    settings: Settings
    seed: int
    steps: int
    folder: Path

    @property
    def path(self) -> Path:
        words = [self.method, *(f"{name}={value}" for name, value in self.settings.items())]
        return self.folder / "-".join([*words, f"steps={self.steps}", f"seed={self.seed}.json"])


def schedule(optimizer: Optimizer, steps: int) -> LambdaLR:
    """A rising rate in the first 5 % of the steps, then one that falls to almost nothing."""
    warm_up = math.ceil(0.05 * steps)
    rising = [(step + 1) / warm_up for step in range(warm_up)]
    after = max(steps - warm_up, 1)
    falling = [(steps - step) / after for step in range(warm_up, steps + 1)]
    return LambdaLR(optimizer, [*rising, *falling].__getitem__)


def shown(value: float | str) -> str:
    """A setting, for people to read."""
    return value if isinstance(value, str) else f"{value:g}"


class Training:
    """The ordinary loop, and a clock that runs while it does."""

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
        """Train for so many steps; the mean of their losses."""
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
    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on all held-out data."""
        self.model.eval()
        found = {}
        for part, (inputs, labels) in self.task.held_out(self.data).items():
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
    """The data of a task, loaded once in a process."""
    return task.load(torch.device(device))


def perform(task: Task, run: Run, device: str) -> Record:
    """Train, write what came of it, and return it; a run whose loss is no number ends there."""
    machine.forget_peak(torch.device(device))
    training = Training(task, run, device)
    ends = sorted({round(run.steps * point / POINTS) for point in range(POINTS + 1)} - {0})
    curve: list[Record] = []
    for begin, end in itertools.pairwise([0, *ends]):
        train_loss = float(training.advance(end - begin))
        curve.append({"step": end, "train loss": train_loss, **training.evaluate()})
        if not all(map(math.isfinite, curve[-1].values())):
            curve[-1] = {"step": end}
            break
    done = curve[-1]["step"]
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
        "diverged": "train loss" not in curve[-1],
        "final": curve[-1],
        "curve": curve,
    }
    write(run.path, record)
    return record


def write(path: Path, content: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    safe_files.replace(path, lambda file: file.write(text.encode()))


def finished(task: Task, run: Run) -> Record | None:
    """What is written of a run, if it is."""
    if not run.path.exists():
        return None
    record: Record = json.loads(run.path.read_text())
    if record["task"] != task.description:
        raise SystemExit(
            f"{run.path} is of another task, {record['task']}, than {task.description}. "
            "Choose another folder with --out."
        )
    return record
