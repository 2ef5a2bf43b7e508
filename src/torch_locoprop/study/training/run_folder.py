"""A run as a folder: what is in its files, and how they are written so that a kill harms nothing.

    config.json      the configuration, the data and the environment; written once, at the start
    metrics.jsonl    a line for every epoch, 0 is the untrained model
    checkpoint.pt    model, optimizer and all metrics after some epoch: a resumed run starts from it

Every file is replaced in one atomic step. The checkpoint is written before the metrics that go with
it and has those metrics in it, so whatever a kill leaves of `metrics.jsonl`, a resumed run rewrites.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_locoprop.study.atomic_files import lock, replace, write
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.description import (
    RunError,
    differences,
    differing,
    read_description,
)

# What torch.load raises, by the way in which a file is broken.
_UNREADABLE = (RuntimeError, OSError, EOFError, pickle.UnpicklingError, KeyError, TypeError)


TIMINGS = "timings"
"""The subfolder for runs that were alone on the machine: only their seconds count, not their losses."""


@dataclass(frozen=True)
class Metrics:
    """The state after an epoch. Seconds are of training alone; memory is the highest so far."""

    epoch: int
    train_loss: float
    test_loss: float
    seconds: float
    memory_mib: float
    diverged: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON knows them: None where a loss is not finite."""
        values = asdict(self)
        for name in ("train_loss", "test_loss"):
            values[name] = values[name] if math.isfinite(values[name]) else None
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Metrics:
        """Return what `to_dict` was made from; a loss that was not finite is NaN."""
        losses = {name: values[name] for name in ("train_loss", "test_loss")}
        return cls(**{**values, **{n: math.nan if v is None else v for n, v in losses.items()}})


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on: the order of the images depends on the epoch alone."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    metrics: tuple[Metrics, ...]


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether a run has begun here."""
        return (self.path / "config.json").is_file()

    def description(self) -> dict[str, Any]:
        """Return what `config.json` says: `config`, `data` and `environment`."""
        needed = dict.fromkeys(("config", "data"), dict)
        return read_description(self.path / "config.json", "run", needed)

    def config(self) -> RunConfig:
        """Return the configuration of the run that is here."""
        return RunConfig.from_dict(self.description()["config"])

    def metrics(self) -> tuple[Metrics, ...]:
        """Return the epochs so far."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return ()
        rows = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                rows.append(Metrics.from_dict(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RunError(
                    f"{path} has a line {number} that is not that of an epoch ({error}). Delete the "
                    "file: a run that has its checkpoint writes it again with --resume."
                ) from error
        return tuple(rows)

    def checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint, on the CPU, or None before the first one."""
        path = self.path / "checkpoint.pt"
        if not path.is_file():
            return None
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            rows = tuple(map(Metrics.from_dict, saved["metrics"]))
            return Checkpoint(saved["model"], saved["optimizer"], rows)
        except _UNREADABLE as error:
            raise RunError(
                f"{path} cannot be read as a checkpoint. Delete the folder to start again."
            ) from error

    def trained_model(self) -> nn.Sequential:
        """Return the model of the last checkpoint, on the CPU."""
        checkpoint = self.checkpoint()
        if checkpoint is None:
            raise RunError(f"{self.path} has no checkpoint yet.")
        model = self.config().build_model()
        model.load_state_dict(checkpoint.model)
        return model

    def begin(self, description: Mapping[str, Any]) -> None:
        """Write `config.json`."""
        write(self.path / "config.json", json.dumps(description, indent=2) + "\n")

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint."""
        content = {
            "model": checkpoint.model,
            "optimizer": checkpoint.optimizer,
            "metrics": [row.to_dict() for row in checkpoint.metrics],
        }
        replace(self.path / "checkpoint.pt", lambda file: torch.save(content, file))

    def write_metrics(self, metrics: Sequence[Metrics]) -> None:
        """Replace the metrics."""
        lines = (json.dumps(row.to_dict()) + "\n" for row in metrics)
        write(self.path / "metrics.jsonl", "".join(lines))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other processes from running in it; a kill frees it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "lock", "wb") as file:
            if not lock(file, wait=False):
                raise RunError(
                    f"Another process is running in {self.path}. Wait for its end, or choose "
                    "another folder (--out)."
                )
            yield

    def check_same(self, description: Mapping[str, Any]) -> None:
        """Raise, naming the differences, unless the run that is here has this config and data."""
        there, here = (_flat(each) for each in (self.description(), description))
        names = differing(there, here)
        if names:
            images = all(name.startswith("data ") for name in names)
            advice = "Give its images with --data-dir, or choose" if images else "Choose"
            told = differences(there, here, names)
            raise RunError(f"{self.path} has another run: {told}. {advice} another folder.")

    def other_environment(self, description: Mapping[str, Any]) -> str:
        """Say in what the run that is here was made elsewhere; nothing if in nothing."""
        there, here = self.description().get("environment", {}), description["environment"]
        return ", ".join(
            f"{name} {there[name]} there and {here[name]} here"
            for name in here
            if name in there and there[name] != here[name]
        )


def _flat(description: Mapping[str, Any]) -> dict[str, Any]:
    """What has to agree for a run to go on, by name."""
    config, data = dict(description["config"]), description["data"]
    settings = config.pop("settings", {})
    return {**config, **settings, **{f"data {name}": value for name, value in data.items()}}
