"""Plots of losses by epoch or by seconds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from torch_locoprop.study.figures import style
from torch_locoprop.study.figures.catalog import Loss, LossFigure, Panel, Series
from torch_locoprop.study.figures.run_library import Found

COLUMNS = 3
"""The largest number of panels in a row."""

LOGARITHMIC = 2.25
"""A panel whose highest and lowest loss have at least this ratio gets a logarithmic scale."""

Floats = npt.NDArray[np.float64]


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


def draw(
    figure: LossFigure, lines: Sequence[Sequence[Drawn]], subtitle: str, footer: Sequence[str]
) -> Figure:
    """Return the picture.

    Args:
        figure: The figure.
        lines: The lines of each panel.
        subtitle: The text below the title.
        footer: The lines below the panels.
    """
    grid_like = len(figure.panels) > 2
    columns = min(len(figure.panels), COLUMNS)
    rows = math.ceil(len(figure.panels) / columns)
    size = (4.1 * columns, 4.4 * rows + 0.9) if grid_like else (4.3 * columns + 3.0, 4.9)
    picture = style.new_figure(*size, figure.entry.title, subtitle)
    losses = tuple(dict.fromkeys(panel.loss for panel in figure.panels))
    grid = picture.subplots(rows, columns, squeeze=False)
    for panel, drawn, axes in zip(figure.panels, lines, grid.flat, strict=True):
        _panel(axes, panel, drawn)
        if grid_like:
            _legend_below(axes, drawn, panel.loss)
    if not grid_like:
        _legend_beside(lines[0], losses, list(grid.flat))
    style.add_footer(picture, footer)
    return picture


def _legend_below(axes: Axes, lines: Sequence[Drawn], loss: Loss) -> None:
    axes.legend(
        handles=_handles(lines, (loss,), [axes]),
        loc="upper left",
        bbox_to_anchor=(-0.08, -0.16),
        ncol=2,
        frameon=False,
        fontsize=7.5,
        handlelength=2.4,
        columnspacing=1.0,
    )


def _legend_beside(lines: Sequence[Drawn], losses: Sequence[Loss], panels: Sequence[Axes]) -> None:
    kinds = " / ".join(loss.removesuffix("_loss") for loss in losses)
    panels[-1].legend(
        handles=_handles(lines, losses, panels),
        title=f"final loss: {kinds}",
        loc="upper left",
        bbox_to_anchor=(1.02, 1.03),
        frameon=False,
        fontsize=8.5,
        title_fontsize=8.5,
        alignment="left",
        handlelength=2.6,
    )


def _panel(axes: Axes, panel: Panel, lines: Sequence[Drawn]) -> None:
    for line in lines:
        _line(axes, panel, line)
    _limit(axes, [line.losses(panel.loss) for line in lines if not line.diverged])
    scale = ", log scale" if axes.get_yscale() == "log" else ""
    axes.set_ylabel(panel.loss.replace("_", " ") + scale)
    axes.set_xlabel("epoch" if panel.by == "epoch" else "seconds of training")
    if not axes.lines:
        axes.set(xticks=[], yticks=[])
        text = "not run yet" if panel.by == "epoch" else "not timed yet"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=style.FAINT)
    elif panel.by == "epoch":
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    else:
        axes.set_xscale("log")
        _logarithmic(axes.xaxis, (1, 2, 5))
        _from_the_first_visible(axes)
        _name_untimed(axes, lines)
    style.finish(axes, panel.title)


def _logarithmic(axis: Axis, ticks: Sequence[float]) -> None:
    axis.set_major_locator(LogLocator(subs=ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _from_the_first_visible(axes: Axes) -> None:
    """Start the axis where the first line enters the visible range."""
    top = axes.get_ylim()[1]
    seen = [
        np.asarray(line.get_xdata())[np.asarray(line.get_ydata()) <= top] for line in axes.lines
    ]
    first = min((float(x.min()) for x in seen if x.size), default=None)
    if first is not None:
        axes.set_xlim(left=0.7 * first)


def _name_untimed(axes: Axes, lines: Sequence[Drawn]) -> None:
    """Name lines of the legend that the panel lacks because they were not timed."""
    names = [line.series.label for line in lines if line.seconds is None]
    if names:
        text = textwrap.fill(f"not timed: {', '.join(names)}", 26)
        axes.text(0.03, 0.03, text, transform=axes.transAxes, fontsize=8, color=style.FAINT)


def _line(axes: Axes, panel: Panel, line: Drawn) -> None:
    losses = line.losses(panel.loss)
    x = np.arange(losses.shape[1], dtype=np.float64)
    if panel.by == "seconds":
        if line.seconds is None:
            return
        x = x * line.seconds
        x, losses = x[1:], losses[:, 1:]  # a logarithmic axis has no zero
    look = style.line_look(line.series.painted_as, line.series.variant)
    axes.plot(x, losses.mean(axis=0), **look)
    axes.plot(
        x[-1:], losses.mean(axis=0)[-1:], "X" if line.diverged else "o", ms=4, color=look["color"]
    )
    if len(losses) > 1:
        axes.fill_between(
            x, losses.min(axis=0), losses.max(axis=0), color=look["color"], alpha=0.18, lw=0
        )


def _limit(axes: Axes, losses: Sequence[Floats]) -> None:
    """Set the range of losses: from the lowest to the median after a tenth of the epochs.

    With a larger range, the differences at the end could not be seen. Lines above the range are marked
    in the legend. The scale is logarithmic if even this range is wide.
    """
    finite = [each for each in losses if np.isfinite(each).all() and each.shape[1] > 1]
    if not finite:
        return
    low = min(float(each.min()) for each in finite)
    early = float(np.median([each[:, max(1, each.shape[1] // 10)].mean() for each in finite]))
    late = float(np.median([each[:, -1].mean() for each in finite]))
    span = max(early - low, 1.5 * (late - low), 1e-3 * abs(low))
    top = low + 1.05 * span
    if low > 0 and top / low >= LOGARITHMIC:
        axes.set_yscale("log")
        axes.set_ylim(low / (top / low) ** 0.04, top)
        _logarithmic(axes.yaxis, (1, 1.5, 2, 3, 4, 5, 6, 8))
    else:
        axes.set_ylim(low - 0.04 * span, top)


def _handles(
    lines: Sequence[Drawn], losses: Sequence[Loss], panels: Sequence[Axes]
) -> list[Line2D]:
    """Return the entries of the legend by final loss, with diverged lines last."""
    handles = []
    for line in sorted(lines, key=lambda each: each.final(losses[0])):
        look = style.line_look(line.series.painted_as, line.series.variant)
        text = _final_text(line, losses, panels)
        handles.append(Line2D([], [], label=f"{line.series.label}: {text}", **look))
    return handles


def _final_text(line: Drawn, losses: Sequence[Loss], panels: Sequence[Axes]) -> str:
    """Return the final losses, with an arrow if above the range, and the number of diverged runs."""
    if line.diverged:
        return "diverged"
    numbers = []
    for loss, axes in zip(losses, panels, strict=False):
        above = line.final(loss) > axes.get_ylim()[1]
        numbers.append(_number(line.final(loss)) + (" ↑" if above else ""))
    lost = len(line.runs) - len(line.settled)
    return " / ".join(numbers) + (f" ({lost} of {len(line.runs)} diverged)" if lost else "")


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"
