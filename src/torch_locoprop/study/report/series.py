"""A series: the runs of one configuration that differ in nothing but their seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch_locoprop.study.methods import colour
from torch_locoprop.study.report.runs import DIVERGED, FINISHED, UNFINISHED, Run
from torch_locoprop.study.training.run_folder import Metrics

Number = Callable[[Metrics], float]
"""A number of an epoch."""

LOSSES: dict[str, Number] = {
    "train": lambda row: row.train_loss,
    "test": lambda row: row.test_loss,
}

TASK = ("dataset", "model", "transfer", "batch_size", "epochs")
"""What runs have to share to be compared, besides the images themselves."""


class Spread(NamedTuple):
    """Finite values of so many runs."""

    mean: float
    low: float
    high: float
    number: int


def spread(values: Iterable[float]) -> Spread | None:
    """Return the mean and the extremes of those numbers that are finite, if any is."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    return Spread(sum(finite) / len(finite), min(finite), max(finite), len(finite))


@dataclass(frozen=True)
class Series:
    """Runs of one configuration, by seed, and what they are called among the others."""

    label: str
    dash: int  # which line of its colour it is; 0 is solid
    runs: tuple[Run, ...]

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.runs[0].config["method"])

    @cached_property
    def hyper_parameters(self) -> dict[str, Any]:
        """All of the configuration that is neither the task nor the seed."""
        config = self.runs[0].config
        own = {name: config[name] for name in config if name not in (*TASK, *_NAMED)}
        return {**config["settings"], **own}

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        """The runs whose last epoch is the result: those that finished, or else those under way."""
        for state in (FINISHED, UNFINISHED):
            runs = tuple(run for run in self.runs if run.state == state)
            if runs:
                return runs
        return ()

    def last(self, number: Number) -> Spread | None:
        """Return this number of the last epoch of the runs that count."""
        return spread(number(run.last) for run in self.counted)

    @property
    def final(self) -> float:
        """The train loss by which series are ranked."""
        result = self.last(LOSSES["train"])
        return math.inf if result is None else result.mean

    @property
    def state(self) -> str:
        """The worst of the runs' states: a ranking has no place for a series with a failure."""
        states = {run.state for run in self.runs}
        return next(state for state in (DIVERGED, UNFINISHED, FINISHED) if state in states)

    @property
    def remark(self) -> str:
        """What there is to say of the runs that did not finish."""
        bad = [run for run in self.runs if run.state == self.state]
        if self.state == FINISHED:
            return ""
        if len(self.runs) > 1:
            return f"{len(bad)} of {len(self.runs)} {self.state}"
        last = bad[0].last.epoch
        if self.state == DIVERGED:
            return f"diverged in epoch {last}"
        return f"at epoch {last} of {bad[0].config['epochs']}"

    def curve(self, number: Number) -> list[Spread | None]:
        """Return mean and extremes after each epoch, of the runs that got there."""
        length = max(len(run.metrics) for run in self.runs)
        return [
            spread(number(run.metrics[epoch]) for run in self.runs if epoch < len(run.metrics))
            for epoch in range(length)
        ]

    @property
    def colour(self) -> str:
        """The method's colour."""
        return colour(self.method)


_NAMED = ("method", "settings", "seed")
