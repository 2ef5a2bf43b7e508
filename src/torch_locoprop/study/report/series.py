"""A series: the runs of one configuration at different seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch_locoprop.study.methods import colour
from torch_locoprop.study.report.runs import DIVERGED, FINISHED, INTERRUPTED, Run
from torch_locoprop.study.training.run_folder import Metrics

Number = Callable[[Metrics], float]
"""Takes the metrics of an epoch and returns a number."""

LOSSES: dict[str, Number] = {
    "train": lambda row: row.train_loss,
    "test": lambda row: row.test_loss,
}

TASK = ("dataset", "model", "transfer", "batch_size", "epochs")
"""The fields that must be equal for runs to be compared, besides the images."""


class Spread(NamedTuple):
    """The mean, lowest and highest of the finite values, and their number."""

    mean: float
    low: float
    high: float
    number: int


def spread(values: Iterable[float]) -> Spread | None:
    """Return mean and extremes of the finite values, or None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    return Spread(sum(finite) / len(finite), min(finite), max(finite), len(finite))


@dataclass(frozen=True)
class Series:
    """The runs of one configuration.

    Args:
        label: The label, unique within the task.
        dash: The index among the series of the same colour; 0 is a solid line.
        runs: The runs in the order of their seeds.
    """

    label: str
    dash: int
    runs: tuple[Run, ...]

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.runs[0].config["method"])

    @cached_property
    def hyper_parameters(self) -> dict[str, Any]:
        """The settings and other fields of the configuration, without the task and the seed."""
        config = self.runs[0].config
        own = {name: config[name] for name in config if name not in (*TASK, *_NAMED)}
        return {**config["settings"], **own}

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        """The runs whose metrics count, one for each seed: finished ones, or else interrupted ones.

        Of several finished runs of a seed the first counts, of interrupted ones the longest.
        """
        for state in (FINISHED, INTERRUPTED):
            by_seed: dict[int, Run] = {}
            for run in sorted(self.runs, key=lambda run: (run.seed, -run.last.epoch)):
                if run.state == state:
                    by_seed.setdefault(run.seed, run)
            if by_seed:
                return tuple(by_seed.values())
        return ()

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the runs that count, or of all runs if none counts; each seed once."""
        return tuple(sorted({run.seed for run in self.counted or self.runs}))

    @cached_property
    def repeated(self) -> int:
        """The number of finished runs that repeat a seed and do not count."""
        finished = [run.seed for run in self.runs if run.state == FINISHED]
        return len(finished) - len(set(finished))

    def last(self, number: Number) -> Spread | None:
        """Return the spread of a number at the last epoch of the runs that count."""
        return spread(number(run.last) for run in self.counted)

    @property
    def final(self) -> float:
        """The mean final train loss, by which series are ranked."""
        result = self.last(LOSSES["train"])
        return math.inf if result is None else result.mean

    @property
    def state(self) -> str:
        """`diverged` if a run diverged, else `finished` if one finished; finished series are ranked."""
        states = {run.state for run in self.runs}
        return next(state for state in (DIVERGED, FINISHED, INTERRUPTED) if state in states)

    @property
    def remark(self) -> str:
        """A remark about runs that did not finish; empty if all did."""
        bad = DIVERGED if self.state == DIVERGED else INTERRUPTED
        runs = [run for run in self.runs if run.state == bad]
        if not runs:
            return ""
        if len(self.runs) > 1:
            return f"{len(runs)} of {len(self.runs)} runs {bad}"
        epoch = runs[0].last.epoch
        of = f"at epoch {epoch} of {runs[0].config['epochs']}"
        return f"diverged in epoch {epoch}" if bad == DIVERGED else f"interrupted {of}"

    def curve(self, number: Number) -> list[Spread | None]:
        """Return the spread of a number after each epoch, over the runs that count and reached it.

        If no run counts, all of them make the curve.
        """
        runs = self.counted or self.runs
        length = max(len(run.metrics) for run in runs)
        return [
            spread(number(run.metrics[epoch]) for run in runs if epoch < len(run.metrics))
            for epoch in range(length)
        ]

    @property
    def colour(self) -> str:
        """The colour of the method."""
        return colour(self.method)


_NAMED = ("method", "settings", "seed")
