"""The performance profile of `defaults` as a picture.

For each method, the share of the tasks in which its loss is at most τ times the lowest loss of all
methods, over τ. A curve that starts higher is the best in more tasks; one that reaches the top sooner
is never far from the best.
"""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.default_methods import OURS
from benchmarks.default_table import Comparison
from torch_locoprop.study.figures import style

TITLES = {"steps": "At equal steps", "time": "At the time at which Adam() ends"}

WIDEST = 4.0
"""The largest τ that is drawn."""

COLOURS = {
    "adam()": ("#8a8a8a", "--"),
    "adamw()": ("#c9a227", "--"),
    "adam": ("#5a5a5a", "-"),
    "adamw": ("#b07d00", "-"),
    "muon": ("#3d8b37", "-"),
    "adam-wide": ("#5a5a5a", ":"),
    "muon-wide": ("#3d8b37", ":"),
    "soap": ("#7b4fa3", "-"),
}

OURS_COLOURS = ("#c2185b", "#1f77b4", "#ff7f0e", "#17becf", "#e377c2")


def shares(losses: list[list[float]], method: int) -> tuple[list[float], list[float]]:
    """Return the steps of a method's curve: the τ at which its share of the tasks rises.

    Args:
        losses: for each task, the loss of each method.
        method: index of the method.

    Returns:
        The values of τ in ascending order, and the share of the tasks from each of them on.
    """
    ratios = []
    for row in losses:
        best = min(loss for loss in row if not math.isnan(loss))
        ratio = row[method] / best if math.isfinite(row[method]) else math.inf
        ratios.append(ratio)
    taus = sorted(ratio for ratio in ratios if math.isfinite(ratio))
    return taus, [(place + 1) / len(losses) for place in range(len(taus))]


def draw(comparison: Comparison) -> Figure:
    """Return a profile for equal steps, and one for equal time if times count."""
    measures = ["steps", *(["time"] if comparison.timed and comparison.has_adam else [])]
    count = len(comparison.seeds)
    figure = style.new_figure(
        5.2 * len(measures),
        4.6,
        "No settings against tuned rates",
        f"{len(comparison.tasks)} small tasks, constant rates, {count} seed{'s' * (count > 1)}",
    )
    panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for measure, axes in zip(measures, panels, strict=True):
        _panel(axes, comparison, measure)
        style.finish(axes, TITLES[measure])
    panels[0].set_ylabel("share of the tasks within τ")
    panels[-1].legend(loc="lower right", fontsize=8, frameon=False)
    return figure


def _panel(axes: Axes, comparison: Comparison, measure: str) -> None:
    losses = comparison.losses(measure)
    own = cycle(OURS_COLOURS)
    for index, row in enumerate(comparison.rows):
        taus, heights = shares(losses, index)
        ours = row.method == OURS
        colour, line = (next(own), "-") if ours else COLOURS[row.key]
        axes.step(
            [1.0, *taus, max(WIDEST, *taus, 1.0)],
            [0.0, *heights, heights[-1] if heights else 0.0],
            where="post",
            color=colour,
            linestyle=line,
            linewidth=2.6 if ours else 1.5,
            label=row.label,
            zorder=3 if ours else 2,
        )
    axes.set_xscale("log")
    axes.set_xlim(1, WIDEST)
    axes.set_xticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
    axes.minorticks_off()
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("τ: training loss relative to the lowest of all methods")


def save(comparison: Comparison, path: Path) -> list[Path]:
    """Write the figure as PNG and PDF, and return both paths."""
    return style.save(draw(comparison), path.parent, path.stem)
