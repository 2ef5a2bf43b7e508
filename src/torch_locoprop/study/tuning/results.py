"""Where a search stands, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_locoprop.study.training.config import RunConfig


@dataclass(frozen=True)
class Status:
    """Where a search stands, for a display of progress."""

    finished: int
    trials: int
    best: float | None  # train loss
    running: int  # in this process
    epoch: int
    epochs: int


@dataclass(frozen=True)
class TuningResult:
    """A search and what came of it: all trials as JSON knows them, and the best configuration."""

    folder: Path
    trials: tuple[dict[str, Any], ...]
    best: RunConfig | None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON knows it."""
        states = [trial["state"] for trial in self.trials]
        return {
            "folder": str(self.folder),
            "states": {state: states.count(state) for state in sorted(set(states))},
            "best": best_of(self.trials),
            "config": None if self.best is None else self.best.to_dict(),
        }


def best_of(trials: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the trial with the lowest train loss among those that came to the end."""
    done = [trial for trial in trials if trial["state"] == "complete"]
    return min(done, key=lambda trial: trial["train_loss"], default=None)
