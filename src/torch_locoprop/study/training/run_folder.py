"""The folder of a run and its files.

    config.json      the configuration, data, environment and revision; written once, at the start
    metrics.jsonl    one line per epoch; epoch 0 is the untrained model
    checkpoint.pt    model, optimizer and all metrics; a resumed run starts from it

Every file is replaced in one atomic step. A checkpoint contains the metrics up to its epoch and is
written before `metrics.jsonl`, so a resumed run can always rewrite `metrics.jsonl`. It is written after
an epoch, or between two steps of an epoch when Ctrl-C or SIGTERM stops the run.
"""

from __future__ import annotations

import json
import math
import pickle
import shlex
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

# Errors that torch.load raises for broken files.
_UNREADABLE = (RuntimeError, OSError, EOFError, pickle.UnpicklingError, KeyError, TypeError)


TIMINGS = "timings"
"""The subfolder for runs without other work on the machine; only their seconds are used."""

POPULATION = "population"
"""The entry of an environment that counts the runs that trained together; a run alone has none.

The seconds of such a run are its share of the population's, and its memory is that of all members.
"""


@dataclass(frozen=True)
class Metrics:
    """The metrics after an epoch.

    Args:
        epoch: The epoch; 0 is the untrained model.
        train_loss: Mean loss of a training image.
        test_loss: Mean loss of a test image.
        seconds: Seconds of training so far, without evaluation.
        memory_mib: Peak memory so far in MiB.
        diverged: True if the run ended because its loss grew or was not finite.
    """

    epoch: int
    train_loss: float
    test_loss: float
    seconds: float
    memory_mib: float
    diverged: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can store, with None for losses not finite."""
        values = asdict(self)
        for name in ("train_loss", "test_loss"):
            values[name] = values[name] if math.isfinite(values[name]) else None
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Metrics:
        """Return the metrics that `to_dict` stored; None becomes NaN."""
        losses = {name: values[name] for name in ("train_loss", "test_loss")}
        return cls(**{**values, **{n: math.nan if v is None else v for n, v in losses.items()}})


class NoCheckpointError(RunError):
    """A run has epochs and no checkpoint to continue from; ``restart`` would begin at epoch 0."""


@dataclass(frozen=True)
class PartOfEpoch:
    """The part of an epoch that a run has trained when a signal stops it.

    Args:
        steps: Steps done in the epoch.
        seconds: Seconds of training in the epoch.
        refused: Steps of the epoch that every layer skipped because its solution was not finite.
        random: The states of the random number generators after these steps.
    """

    steps: int
    seconds: float
    refused: int
    random: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run: model, optimizer, metrics so far, and the part of the next epoch."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    metrics: tuple[Metrics, ...]
    part: PartOfEpoch | None = None

    @property
    def place(self) -> str:
        """The epoch and step that the run has reached."""
        step = f" and step {self.part.steps} of the next epoch" if self.part else ""
        return f"epoch {self.metrics[-1].epoch}{step}"


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @property
    def exists(self) -> bool:
        """True if the folder has a run."""
        return (self.path / "config.json").is_file()

    @property
    def leftovers(self) -> list[str]:
        """The files of a run whose `config.json` is missing."""
        names = ("checkpoint.pt", "metrics.jsonl")
        return [] if self.exists else [name for name in names if (self.path / name).is_file()]

    def check_described(self) -> None:
        """Raise a RunError if the folder has files of a run, but not the description of it."""
        if self.leftovers:
            raise RunError(
                f"{self.path} has {' and '.join(self.leftovers)} of a run, but its config.json is "
                "missing. Put it back, or choose another folder (--out)."
            )

    def description(self) -> dict[str, Any]:
        """Return the content of `config.json`: `config`, `data`, `environment` and `revision`.

        Raises:
            RunError: If the file is not the description of a run.
        """
        needed = dict.fromkeys(("config", "data"), dict)
        return read_description(self.path / "config.json", "run", needed)

    def config(self) -> RunConfig:
        """Return the configuration of the run."""
        return RunConfig.from_dict(self.description()["config"])

    def metrics(self) -> tuple[Metrics, ...]:
        """Return the metrics of all epochs so far.

        A half-written last line, which a crash of the machine may leave, is left out. A resumed run
        writes the line again.

        Raises:
            RunError: If another line is broken.
        """
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return ()
        rows = []
        for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
            try:
                rows.append(Metrics.from_dict(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if isinstance(error, json.JSONDecodeError) and not line.endswith("\n"):
                    break  # half of a JSON object is never valid JSON
                raise RunError(
                    f"Line {number} of {path} is not an epoch ({error}). Delete the file: a run with a "
                    "checkpoint writes it again with --resume."
                ) from error
        return tuple(rows)

    def checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint, on the CPU, or None if there is none.

        Raises:
            RunError: If the file is broken.
        """
        path = self.path / "checkpoint.pt"
        if not path.is_file():
            return None
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            rows = tuple(map(Metrics.from_dict, saved["metrics"]))
            part = PartOfEpoch(**saved["part"]) if "part" in saved else None
            return Checkpoint(saved["model"], saved["optimizer"], rows, part)
        except _UNREADABLE as error:
            raise NoCheckpointError(
                f"{path} cannot be read as a checkpoint. {self._how_to_restart}"
            ) from error

    def check_can_resume(self) -> None:
        """Raise a NoCheckpointError if the run has trained some epochs and has no checkpoint."""
        rows = self.metrics()
        if rows and not (self.path / "checkpoint.pt").is_file():
            raise NoCheckpointError(
                f"{self.path} has the metrics of epochs 0 to {rows[-1].epoch}, but checkpoint.pt, "
                f"from which they continue, is missing. Put it back. {self._how_to_restart}"
            )

    @property
    def _how_to_restart(self) -> str:
        words = shlex.join(["locoprop", "train", "--restart", "--out", str(self.path)])
        return f"To start again from epoch 0: {words}"

    def set_aside(self) -> None:
        """Rename metrics and checkpoint, so that the run starts again from epoch 0."""
        for name in ("checkpoint.pt", "metrics.jsonl"):
            path = self.path / name
            if path.is_file():
                path.replace(path.with_name(f"{name}.old"))

    def trained_model(self) -> nn.Sequential:
        """Return the model of the last checkpoint, on the CPU.

        Raises:
            RunError: If there is no checkpoint.
        """
        checkpoint = self.checkpoint()
        if checkpoint is None:
            raise RunError(f"{self.path} has no checkpoint yet.")
        model = self.config().build_model()
        model.load_state_dict(checkpoint.model)
        return model

    def begin(self, description: Mapping[str, Any]) -> None:
        """Write `config.json` with this description."""
        write(self.path / "config.json", json.dumps(description, indent=2) + "\n")

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace `checkpoint.pt`."""
        content = {
            "model": checkpoint.model,
            "optimizer": checkpoint.optimizer,
            "metrics": [row.to_dict() for row in checkpoint.metrics],
            **({"part": vars(checkpoint.part)} if checkpoint.part else {}),
        }
        replace(self.path / "checkpoint.pt", lambda file: torch.save(content, file))

    def write_metrics(self, metrics: Sequence[Metrics]) -> None:
        """Replace `metrics.jsonl`."""
        lines = (json.dumps(row.to_dict()) + "\n" for row in metrics)
        write(self.path / "metrics.jsonl", "".join(lines))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and lock it against other processes until the end of this context.

        Raises:
            RunError: If another process has locked it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "lock", "wb") as file:
            if not lock(file, wait=False):
                raise RunError(
                    f"Another process is running in {self.path}. Wait until it ends, or choose "
                    "another folder (--out)."
                )
            yield

    def check_same(self, description: Mapping[str, Any]) -> None:
        """Raise a RunError that names the differences unless the run has this config and data."""
        there, here = (_flat(each) for each in (self.description(), description))
        names = differing(there, here)
        if names:
            images = all(name.startswith("data ") for name in names)
            advice = (
                "Set --data-dir to the folder with its images, or choose" if images else "Choose"
            )
            text = differences(there, here, names)
            raise RunError(f"{self.path} has another run: {text}. {advice} another folder.")

    def other_environment(self, description: Mapping[str, Any]) -> str:
        """Return how the environment of the run differs from this one; empty if it does not."""
        alone = {"processes": 1}  # several processes are stored, and one is not
        there = {**alone, **self.description().get("environment", {})}
        here = {**alone, **description["environment"]}
        return ", ".join(
            f"{name} {there[name]} there and {here[name]} here"
            for name in here
            if name in there and there[name] != here[name]
        )


def _flat(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal for a run to be resumed, by name."""
    config, data = dict(description["config"]), description["data"]
    settings = config.pop("settings", {})
    return {**config, **settings, **{f"data {name}": value for name, value in data.items()}}
