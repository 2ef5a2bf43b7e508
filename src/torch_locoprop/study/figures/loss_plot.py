"""Plots of losses by epoch or by seconds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import CARETUP
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from torch_locoprop.study.figures import loss_lines, style
from torch_locoprop.study.figures.catalog import Loss, LossFigure, Panel
from torch_locoprop.study.figures.loss_frame import Frame, exits, frame_of
from torch_locoprop.study.figures.loss_lines import Drawn, Floats, Look

COLUMNS = 3
"""The largest number of panels in a row."""

MARKS = 6
"""The number of markers on a line; those of different lines are staggered."""


def draw(
    figure: LossFigure,
    lines: Sequence[Sequence[Drawn]],
    title: str,
    subtitle: str,
    footer: Sequence[str] = (),
) -> Figure:
    """Return the picture.

    Args:
        figure: The figure.
        lines: The lines of each panel.
        title: The title.
        subtitle: The text below the title.
        footer: The lines below the panels.
    """
    grid_like = len(figure.panels) > 2
    columns = min(len(figure.panels), COLUMNS)
    rows = math.ceil(len(figure.panels) / columns)
    size = (4.1 * columns, 4.4 * rows + 0.9) if grid_like else (4.3 * columns + 3.0, 4.9)
    picture = style.new_figure(*size, title, subtitle)
    losses = tuple(dict.fromkeys(panel.loss for panel in figure.panels))
    grid = picture.subplots(rows, columns, squeeze=False)
    if all(panel.by == "epoch" for panel in figure.panels):  # seconds may differ where losses agree
        lines = [loss_lines.merged(drawn) for drawn in lines]
    looks: list[Look] = []
    for panel, drawn, axes in zip(figure.panels, lines, grid.flat, strict=True):
        frame = frame_of(drawn, panel.loss, small=grid_like)
        if grid_like or not looks:
            looks = loss_lines.looks(drawn, panel.loss, frame.bounds if frame else None)
        _panel(axes, panel, drawn, looks, frame)
        style.finish(axes, panel.title, small=grid_like)
        if grid_like:
            _legend_below(axes, drawn, looks, panel.loss)
    if not grid_like:
        _legend_beside(lines[0], looks, losses, list(grid.flat))
    style.add_footer(picture, footer)
    return picture


def _legend_below(axes: Axes, lines: Sequence[Drawn], looks: Sequence[Look], loss: Loss) -> None:
    axes.legend(
        handles=_handles(lines, looks, (loss,), [axes]),
        title=_legend_title(lines, (loss,)),
        loc="upper left",
        bbox_to_anchor=(-0.08, -0.16),
        ncol=2,
        frameon=False,
        fontsize=7.5,
        title_fontsize=7.5,
        alignment="left",
        handlelength=2.8,
        columnspacing=1.0,
    )


def _legend_beside(
    lines: Sequence[Drawn], looks: Sequence[Look], losses: Sequence[Loss], panels: Sequence[Axes]
) -> None:
    panels[-1].legend(
        handles=_handles(lines, looks, losses, panels),
        title=_legend_title(lines, losses),
        loc="upper left",
        bbox_to_anchor=(1.02, 1.03),
        frameon=False,
        fontsize=8.5,
        title_fontsize=8.5,
        alignment="left",
        handlelength=3,
    )


def _legend_title(lines: Sequence[Drawn], losses: Sequence[Loss]) -> str:
    """Return which loss the numbers are, such as `train loss at epoch 100`."""
    kinds = " / ".join(loss.removesuffix("_loss") for loss in losses)
    epochs = {line.series.config.epochs for line in lines}
    return (
        f"{kinds} loss at epoch {epochs.pop()}" if len(epochs) == 1 else f"{kinds} loss at the end"
    )


def _panel(
    axes: Axes, panel: Panel, lines: Sequence[Drawn], looks: Sequence[Look], frame: Frame | None
) -> None:
    if frame:
        axes.set_ylim(*frame.bounds)
    if frame and frame.logarithmic:
        axes.set_yscale("log")
        _logarithmic(axes.yaxis, (1, 1.5, 2, 3, 4, 5, 6, 8))
    scale = ", log scale" if frame and frame.logarithmic else ""
    axes.set_ylabel(panel.loss.replace("_", " ") + scale)
    axes.set_xlabel("epoch" if panel.by == "epoch" else "seconds of training")
    for at, (line, look) in enumerate(zip(lines, looks, strict=True)):
        _line(axes, panel, line, look, at / len(lines))
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
    if frame and axes.lines:
        _name_above(axes, panel, lines, looks, frame)


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


def _name_above(
    axes: Axes, panel: Panel, lines: Sequence[Drawn], looks: Sequence[Look], frame: Frame
) -> None:
    """Name the lines that end above the frame, at its upper right."""
    above = [
        (line, look)
        for line, look in zip(lines, looks, strict=True)
        if line.final(panel.loss) > frame.high and (panel.by == "epoch" or line.seconds is not None)
    ]
    for row, (line, look) in enumerate(above):
        end = "diverged" if line.diverged else _number(line.final(panel.loss))
        axes.annotate(
            f"{line.series.label}: {end} ↑",
            (1, 1),
            xycoords="axes fraction",
            xytext=(-2, -5 - 11 * row),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=7.5,
            color=look["color"],
            bbox={"facecolor": "white", "alpha": 0.8, "pad": 0.8, "lw": 0},
        )


def _line(axes: Axes, panel: Panel, line: Drawn, look: Look, stagger: float) -> None:
    """Draw a line with markers, and mark where it is above the frame.

    Args:
        axes: The panel, with its range of losses.
        panel: What it shows.
        line: The line.
        look: Its colour and dashes.
        stagger: The position of the first marker, from 0 to 1 in units of their distance.
    """
    losses = line.losses(panel.loss)
    x = np.arange(losses.shape[1], dtype=np.float64)
    if panel.by == "seconds":
        if line.seconds is None:
            return
        x = x * line.seconds
        x, losses = x[1:], losses[:, 1:]  # a logarithmic axis has no zero
    mean, top = losses.mean(axis=0), axes.get_ylim()[1]
    marks = _marked(x if panel.by == "epoch" else np.log(x), mean, top, stagger)
    axes.plot(x, mean, **look, **style.marker_look(line.series.painted_as), markevery=marks)
    edge = {"color": look["color"], "ls": "none", "clip_on": False, "zorder": 3}
    above = exits(mean, top)
    if line.diverged:
        end = min(mean[-1], top) if np.isfinite(mean[-1]) else top
        axes.plot(x[-1:], [end], style.DIVERGED, ms=7, **edge)
        above = above[:-1]
    if above:
        axes.plot(x[above], np.full(len(above), top), marker=CARETUP, ms=6, **edge)
    if len(losses) > 1:
        axes.fill_between(
            x, losses.min(axis=0), losses.max(axis=0), color=look["color"], alpha=0.18, lw=0
        )


def _marked(x: Floats, losses: Floats, top: float, stagger: float) -> list[int]:
    """Return the points with a marker: evenly spaced where the line is visible, and its end.

    A marker that would lie on that of the end is left out.
    """
    with np.errstate(invalid="ignore"):
        visible = np.flatnonzero(losses <= top)
    if not visible.size:
        return []
    first, last = x[visible[0]], x[visible[-1]]
    wanted = first + (last - first) * (np.arange(MARKS) + stagger) / MARKS
    apart = wanted[last - wanted >= (last - first) / (2 * MARKS)]
    nearest = {int(visible[np.abs(x[visible] - each).argmin()]) for each in apart}
    return sorted(nearest | {int(visible[-1])})


def _handles(
    lines: Sequence[Drawn], looks: Sequence[Look], losses: Sequence[Loss], panels: Sequence[Axes]
) -> list[Line2D]:
    """Return the entries of the legend by final loss, with diverged lines last."""
    handles = []
    ranked = sorted(zip(lines, looks, strict=True), key=lambda each: each[0].final(losses[0]))
    for line, look in ranked:
        text = f"{line.series.label}: {_final_text(line, losses, panels)}"
        marks: dict[str, Any] = style.marker_look(line.series.painted_as)
        handles.append(Line2D([], [], label=text, **look, **marks))
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
