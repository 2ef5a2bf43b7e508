"""A run and its metrics so far, as read from its folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_locoprop.study import methods
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import Metrics, RunFolder


@dataclass(frozen=True)
class RunResult:
    """A run, finished or not.

    Args:
        folder: The folder of the run.
        config: The configuration of the run.
        metrics: The metrics after each epoch so far; epoch 0 is the untrained model.
    """

    folder: Path
    config: RunConfig
    metrics: tuple[Metrics, ...]

    @property
    def diverged(self) -> bool:
        """True if the run ended early because its loss grew instead of falling."""
        return bool(self.metrics) and self.metrics[-1].diverged

    @property
    def finished(self) -> bool:
        """True if the run has reached its last epoch, or diverged."""
        return len(self.metrics) == self.config.epochs + 1 or self.diverged

    @property
    def origin(self) -> str:
        """The source of the settings: that of the method's defaults, or ``given``."""
        method = methods.get(self.config.method)
        return method.source if self.config.settings == method.settings else "given"

    @property
    def summary(self) -> str:
        """The last metrics in one sentence; the run must have an epoch."""
        last, method = self.metrics[-1], self.config.method
        if last.diverged:
            return f"{method} diverged in epoch {last.epoch}: {self.folder}"
        epochs = "1 epoch" if last.epoch == 1 else f"{last.epoch} epochs"
        return (
            f"{method}: train loss {last.train_loss:.3f}, test loss {last.test_loss:.3f} "
            f"after {epochs} in {last.seconds:.1f} s of training: {self.folder}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the run and its last metrics as a dictionary that JSON can store."""
        last = self.metrics[-1].to_dict() if self.metrics else {}
        files = RunFolder(self.folder)
        return {
            "folder": str(self.folder),
            "finished": self.finished,
            **last,
            "settings_from": self.origin,
            "config": self.config.to_dict(),
            "data": files.description()["data"] if files.exists else None,
        }


def result_of(folder: Path | str) -> RunResult:
    """Return the run in a folder, finished or not."""
    files = RunFolder(Path(folder))
    return RunResult(files.path, files.config(), files.metrics())


def ranked(results: Iterable[RunResult]) -> list[RunResult]:
    """Return the runs by their last train loss, the lowest first and diverged runs last."""
    return sorted(results, key=lambda result: (result.diverged, result.metrics[-1].train_loss))
