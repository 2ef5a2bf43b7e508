"""The lines of a plot of losses: their numbers, and how lines that coincide are told apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_locoprop.study.figures import style
from torch_locoprop.study.figures.catalog import Loss, Series
from torch_locoprop.study.figures.run_library import Found

Floats = npt.NDArray[np.float64]
Look = Mapping[str, Any]

CLOSE = 0.012
"""Lines that are closer than this share of the height of the frame cannot be seen apart."""

MOSTLY = 0.6
"""The share of the visible epochs on which two lines must be close to count as one on the other."""


@dataclass(frozen=True)
class Drawn:
    """A line with its runs, one per seed, and its seconds per epoch if they are known."""

    series: Series
    runs: tuple[Found, ...]
    seconds: float | None = None

    @property
    def settled(self) -> tuple[Found, ...]:
        """The runs that did not diverge, or all runs if all diverged."""
        return tuple(run for run in self.runs if not run.result.diverged) or self.runs

    @property
    def diverged(self) -> bool:
        """True if all runs diverged."""
        return all(run.result.diverged for run in self.runs)

    def losses(self, loss: Loss) -> Floats:
        """Return the losses `[seeds, epochs + 1]`, up to the last epoch of the shortest run."""
        rows = [[getattr(row, loss) for row in run.metrics] for run in self.settled]
        shortest = min(map(len, rows))
        return np.array([row[:shortest] for row in rows])

    def final(self, loss: Loss) -> float:
        """Return the mean of the last losses; infinite if all runs diverged."""
        return math.inf if self.diverged else float(self.losses(loss)[:, -1].mean())


def merged(lines: Sequence[Drawn]) -> list[Drawn]:
    """Return the lines with those of identical losses as one, under all of their labels."""
    found: list[Drawn] = []
    for line in lines:
        same = next((at for at, other in enumerate(found) if _identical(line, other)), None)
        if same is None:
            found.append(line)
            continue
        series = found[same].series
        both = replace(series, label=f"{series.label} and\n{line.series.label}")
        found[same] = replace(found[same], series=both)
    return found


def _identical(one: Drawn, other: Drawn) -> bool:
    losses: tuple[Loss, ...] = ("train_loss", "test_loss")
    return all(np.array_equal(one.losses(loss), other.losses(loss)) for loss in losses)


def looks(lines: Sequence[Drawn], loss: Loss, bounds: tuple[float, float] | None) -> list[Look]:
    """Return the colour and dashes of each line; a line that lies on another gets gaps.

    Args:
        lines: The lines, in the order in which they are drawn.
        loss: The loss that is drawn.
        bounds: The lowest and highest visible loss, or None if nothing is drawn.
    """
    found: list[Look] = []
    for at, line in enumerate(lines):
        look = style.line_look(line.series.painted_as, line.series.variant)
        close = [
            its["ls"]
            for other, its in zip(lines[:at], found, strict=True)
            if bounds and _coincide(line, other, loss, bounds)
        ]
        # A solid line would hide all that it lies on, also those that have gaps.
        own = [] if close and look["ls"] == "-" else [look["ls"]]
        free = (dashes for dashes in (*own, *style.OVER) if dashes not in close)
        look["ls"] = next(free, style.OVER[-1] if close else look["ls"])
        found.append(look)
    return found


def _coincide(one: Drawn, other: Drawn, loss: Loss, bounds: tuple[float, float]) -> bool:
    """Return True if two lines cannot be seen apart on most epochs on which both are visible."""
    first, second = (each.losses(loss).mean(axis=0) for each in (one, other))
    length = min(len(first), len(second))
    first, second = first[:length], second[:length]
    low, high = bounds
    with np.errstate(invalid="ignore"):
        visible = (np.maximum(first, second) <= high) & (np.minimum(first, second) >= low)
    if not visible.any():
        return False
    close = np.abs(first - second)[visible] < CLOSE * (high - low)
    return float(close.mean()) >= MOSTLY
