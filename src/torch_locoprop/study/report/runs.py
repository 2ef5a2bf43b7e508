"""Runs for the report: found in folders and checked, each finished, interrupted or diverged.

Runs of methods that are not registered are shown too. A folder that cannot be read is skipped and
reported with the reason.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.training.run_folder import POPULATION, TIMINGS, Metrics, RunFolder
from torch_locoprop.study.training.run_result import RunResult

FINISHED, INTERRUPTED, DIVERGED = "finished", "interrupted", "diverged"

NEEDED: dict[str, type] = {
    **{"method": str, "settings": dict, "dataset": str, "model": str, "transfer": str},
    **{"batch_size": int, "epochs": int, "seed": int},
}
"""The fields that a configuration must have, with their types."""


class Skipped(NamedTuple):
    """A folder of a run that cannot be read, and the reason."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class Run:
    """The content of a run's folder; `metrics` has at least one epoch.

    A run that was trained in a population has NaN for seconds and memory.
    """

    folder: Path
    config: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]
    metrics: tuple[Metrics, ...]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config["seed"])

    @property
    def last(self) -> Metrics:
        """The metrics of the last epoch so far."""
        return self.metrics[-1]

    @property
    def state(self) -> str:
        """`finished`, `interrupted` (or still running), or `diverged`."""
        if self.last.diverged or not math.isfinite(self.last.train_loss):
            return DIVERGED
        return FINISHED if self.last.epoch >= self.config["epochs"] else INTERRUPTED

    @property
    def origin(self) -> str:
        """The source of the settings; `unknown` if the method is not registered."""
        try:
            return RunResult(self.folder, RunConfig.from_dict(self.config), self.metrics).origin
        except ValueError:
            return "unknown"

    @property
    def command(self) -> str:
        """The command that repeats this run, with all settings."""
        words = ["locoprop", "train"]
        for name in (field.name for field in fields(RunConfig)):
            if name == "settings":
                for key, value in self.config["settings"].items():
                    words += ["--set", f"{key}={_as_option(value)}"]
            elif name in self.config:
                words += [f"--{name.replace('_', '-')}", str(self.config[name])]
        return shlex.join(words)


def find(folders: Iterable[Path]) -> tuple[list[Run], list[Skipped]]:
    """Return all runs in the folders and their subfolders, and the folders that cannot be read.

    Subfolders for timings are not searched, unless such a folder is given itself.
    """
    return _read(_run_folders(folders))


def find_timings(folders: Iterable[Path]) -> list[Run]:
    """Return all timings in the folders and their subfolders; ignore what cannot be read."""
    tops = (
        Path(place)
        for top in folders
        for place, _, _ in os.walk(top)
        if Path(place).name == TIMINGS
    )
    return _read(_run_folders(tops))[0]


def _read(folders: Iterable[Path]) -> tuple[list[Run], list[Skipped]]:
    runs, skipped, seen = [], [], set()
    for folder in folders:
        if folder.resolve() in seen:
            continue
        seen.add(folder.resolve())
        try:
            runs.append(read(folder))
        except (RunError, ValueError, OSError) as error:
            skipped.append(Skipped(folder, str(error)))
    return runs, skipped


def read(folder: Path) -> Run:
    """Return the run in a folder.

    Raises:
        RunError: If the folder has no valid run.
    """
    files = RunFolder(folder)
    description = files.description()
    config, data = description["config"], description["data"]
    environment = description.get("environment", {})
    if not isinstance(environment, dict):
        raise RunError(f"environment in config.json is {environment!r}, which is not an object.")
    for name, kind in NEEDED.items():
        value = config.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RunError(
                f"{name} in config.json is {value!r}, which is not of type {kind.__name__}."
            )
    metrics = files.metrics()
    if not metrics:
        raise RunError("metrics.jsonl is empty: not even the untrained model was evaluated.")
    for index, row in enumerate(metrics):
        numbers = (row.train_loss, row.test_loss, row.seconds, row.memory_mib)
        known = all(isinstance(number, int | float) for number in numbers)
        if row.epoch != index or not known or not all(map(math.isfinite, numbers[2:])):
            raise RunError(f"line {index + 1} of metrics.jsonl is not epoch {index}.")
    if POPULATION in environment:  # these numbers say nothing about a run alone
        metrics = tuple(replace(row, seconds=math.nan, memory_mib=math.nan) for row in metrics)
    return Run(folder, config, data, environment, metrics)


def _run_folders(folders: Iterable[Path]) -> Iterator[Path]:
    for top in folders:
        for place, inner, files in os.walk(top):
            # Timings have only a few epochs and must not appear in a ranking.
            inner[:] = sorted(name for name in inner if name != TIMINGS)
            if {"config.json", "metrics.jsonl"} <= set(files):
                yield Path(place)


def _as_option(value: Any) -> str:
    """Return a setting in the format of `--set`: JSON, or a plain word unless it is valid JSON."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value)
