"""The status of a search while it runs, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_locoprop.study.training.config import RunConfig


@dataclass(frozen=True)
class Status:
    """The progress of a search.

    Args:
        finished: Trials finished by all processes.
        trials: Trials to finish.
        best: The lowest train loss so far.
        running: Trials that this process is training.
        epoch: The epoch of the running trials.
        epochs: The number of epochs of a trial.
    """

    finished: int
    trials: int
    best: float | None
    running: int
    epoch: int
    epochs: int


@dataclass(frozen=True)
class TuningResult:
    """The result of a search.

    Args:
        folder: The folder of the search.
        trials: All trials, as in ``trials.jsonl``.
        best: The best configuration, or None if no trial reached its last epoch.
    """

    folder: Path
    trials: tuple[dict[str, Any], ...]
    best: RunConfig | None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dictionary that JSON can store."""
        states = [trial["state"] for trial in self.trials]
        return {
            "folder": str(self.folder),
            "states": {state: states.count(state) for state in sorted(set(states))},
            "best": best_of(self.trials),
            "config": None if self.best is None else self.best.to_dict(),
        }


def best_of(trials: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the trial with the lowest train loss among those that reached the last epoch."""
    done = [trial for trial in trials if trial["state"] == "complete"]
    return min(done, key=lambda trial: trial["train_loss"], default=None)
