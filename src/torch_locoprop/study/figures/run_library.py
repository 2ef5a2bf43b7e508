"""The library of existing runs: find the run of a configuration in folders of runs.

Runs are matched by configuration and images. Device and precision have to match only if the user asked
for them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch_locoprop.study.figures.images import Images
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.training.population_run import without_numbers
from torch_locoprop.study.training.run_folder import TIMINGS, Metrics, RunFolder
from torch_locoprop.study.training.run_result import RunResult

GRAPH_CLOCK = "cuda-graphs.json"
"""The file in a folder of timings that `benchmarks.graph_clock` has written."""


@dataclass(frozen=True)
class Place:
    """The device and precision that the user asked for.

    Args:
        device: The device; None accepts runs of any device.
        precision: The precision; None accepts runs of any precision.
        default_device: The device of new runs if none was asked for.
    """

    device: str | None = None
    precision: str | None = None
    default_device: str = "cpu"

    def on(self, config: RunConfig) -> RunConfig:
        """Return the configuration with the device and precision of new runs."""
        return replace(
            config,
            device=self.device or self.default_device,
            precision=self.precision or "fp32",
        )

    def key(self, config: RunConfig) -> str:
        """Return a key that is equal for runs that can replace each other."""
        fields = config.to_dict()
        for name, asked in (("device", self.device), ("precision", self.precision)):
            fields[name] = fields[name] if asked else None
        return json.dumps(fields, sort_keys=True)


@dataclass(frozen=True)
class Found:
    """A run that was found, with its data and environment from `config.json`."""

    result: RunResult
    data: dict[str, str]
    environment: dict[str, Any]

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return self.result.config

    @property
    def metrics(self) -> tuple[Metrics, ...]:
        """The metrics of the run."""
        return self.result.metrics


@dataclass(frozen=True)
class GraphClock:
    """What a step costs with all work in one CUDA graph, by `benchmarks/graph_clock.py`.

    Args:
        milliseconds: of a step, by model and method.
        batch: images of a batch.
        machine: where it was measured.
    """

    milliseconds: Mapping[str, Mapping[str, float]]
    batch: int
    machine: str

    @classmethod
    def read(cls, path: Path) -> GraphClock:
        """Read the file that `benchmarks.graph_clock` has written.

        Raises:
            RunError: the file is not one of its files.
        """
        try:
            content = json.loads(path.read_text())
            milliseconds = {
                model: {name: float(row["ms"]) for name, row in rows.items() if "ms" in row}
                for model, rows in content["models"].items()
            }
            machine = f"{content['environment']['machine']}, {content['precision']}"
            return cls(milliseconds, int(content["batch"]), machine)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunError(f"{path} is not a file of benchmarks.graph_clock: {error}") from error

    def seconds(self, config: RunConfig, images: int) -> float | None:
        """Return the seconds of an epoch of a configuration; None if its step was not measured."""
        step = self.milliseconds.get(config.model, {}).get(config.method)
        alike = config.batch_size == self.batch and config.precision in ("fp32", "tf32")
        if step is None or not alike:
            return None
        return math.ceil(images / config.batch_size) * step / 1e3


class Library:
    """The runs in some folders and their subfolders; new runs go into the first folder."""

    def __init__(self, folders: Sequence[Path], images: Images, place: Place) -> None:
        self.folders, self.images, self.place = tuple(folders), images, place
        self._runs: dict[str, list[Found]] = {}
        for path in _run_folders(self.folders):
            self.add(path)

    def add(self, path: Path) -> None:
        """Add the run in a folder; ignore the folder if it has no valid run."""
        try:
            description = RunFolder(path).description()
            config = RunConfig.from_dict(description["config"])
            metrics = RunFolder(path).metrics()
        except (RunError, ValueError, TypeError, KeyError, OSError):
            return
        found = Found(
            RunResult(path, config, metrics), description["data"], description["environment"]
        )
        same = self._runs.setdefault(self._key(config, path), [])
        same[:] = [each for each in same if each.result.folder != path] + [found]

    def find(self, config: RunConfig) -> Found | None:
        """Return a finished run of the configuration, or None if there is none."""
        return next((each for each in self._like(config) if each.result.finished), None)

    def begun(self, config: RunConfig) -> bool:
        """Return True if there is a run of the configuration, finished or not."""
        return any(True for _ in self._like(config))

    def timings(self, config: RunConfig) -> list[Found]:
        """Return the finished runs that timed the configuration, for as many epochs or more."""
        key = timing_key(self.place.on(config), self.place) + TIMINGS
        finished = [each for each in self._of(key, config) if each.result.finished]
        return [each for each in finished if each.config.epochs >= config.epochs]

    def graph_clock(self) -> GraphClock | None:
        """Return the measured steps as CUDA graphs, from the first folder of timings that has them."""
        for root in self.folders:
            folder = root if root.name == TIMINGS else root / TIMINGS
            if (path := folder / GRAPH_CLOCK).is_file():
                return GraphClock.read(path)
        return None

    def folder_for(self, config: RunConfig) -> Path:
        """Return the folder for a run: that of its unfinished run, or a new one."""
        exact = self.place.on(config)
        for each in self._like(config):
            begun = not each.result.finished and each.config == exact
            if begun and each.result.folder.is_relative_to(self.folders[0]):
                return each.result.folder
        return self.folders[0] / self._name(exact)

    def timing_folder(self, config: RunConfig, machine: str) -> Path:
        """Return the folder for timing a configuration on a machine."""
        digest = hashlib.sha256(machine.encode()).hexdigest()[:6]
        return self.folders[0] / TIMINGS / f"{self._name(self.place.on(config))}-{digest}"

    def _name(self, config: RunConfig) -> str:
        return config.name(self.images.load(config.dataset).fingerprint)

    def _like(self, config: RunConfig) -> Iterator[Found]:
        return self._of(self.place.key(self.place.on(config)), config)

    def _of(self, key: str, config: RunConfig) -> Iterator[Found]:
        for each in self._runs.get(key, []):
            if self.images.is_of(config.dataset, each.data):
                yield each

    def _key(self, config: RunConfig, path: Path) -> str:
        if self._is_timing(path):
            return timing_key(config, self.place) + TIMINGS
        return self.place.key(config)

    def _is_timing(self, path: Path) -> bool:
        """Return True if a path is in a subfolder for timings of one of the library's folders."""
        return any(
            TIMINGS in (root.name, *path.relative_to(root).parts)
            for root in self.folders
            if path.is_relative_to(root)
        )


def timing_key(config: RunConfig, place: Place) -> str:
    """Return a key that is equal for runs whose epochs take the same time, whatever their number is.

    The numbers among the settings and the seed do not matter either.
    """
    return place.key(replace(without_numbers(config), epochs=1))


def _run_folders(roots: Sequence[Path]) -> Iterator[Path]:
    """Yield all folders with a `config.json`, in the order of their names."""
    for root in roots:
        for folder, inner, files in os.walk(root):
            inner.sort()
            if "config.json" in files:
                yield Path(folder)


def where_made(runs: Sequence[Found]) -> str:
    """Return the machines, precisions and versions of torch of some runs as text."""
    made: dict[tuple[str, str], set[str]] = {}
    for each in runs:
        machine = each.environment.get("machine", "unknown machine")
        torch = str(each.environment.get("torch", "?")).partition("+")[0]
        made.setdefault((machine, f"torch {torch}"), set()).add(each.config.precision)
    return "; ".join(
        ", ".join((machine, " and ".join(sorted(precisions)), torch))
        for (machine, torch), precisions in sorted(made.items())
    )


def environment_key(found: Found) -> str:
    """Return a key that is equal for runs whose seconds can be compared."""
    return clock_key(found.environment, found.config.device, found.config.precision)


def clock_key(environment: Mapping[str, Any], device: str, precision: str) -> str:
    """Return the key of an environment, a device and a precision for seconds.

    On a GPU the number of the host's threads and the version of Python do not count.
    """
    names = ("machine", "torch", "torch_locoprop") if device == "cuda" else tuple(environment)
    shown = {name: environment.get(name) for name in names}
    return json.dumps({**shown, "device": device, "precision": precision}, sort_keys=True)
