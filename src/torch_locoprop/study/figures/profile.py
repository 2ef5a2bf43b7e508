"""The performance profile: on which share of the tasks a method ends within a factor of the best.

A method with an interval of renewal, such as K-FAC, has the best of its @k on each task, by train loss.
Methods and tasks are compared only where all of them have runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from torch_locoprop.study.figures import style
from torch_locoprop.study.figures.captions import on_data
from torch_locoprop.study.figures.catalog import Loss, entry_of
from torch_locoprop.study.figures.figure_request import MadeFigure
from torch_locoprop.study.figures.loss_figures import Maker
from torch_locoprop.study.figures.loss_lines import Drawn
from torch_locoprop.study.figures.run_library import where_made
from torch_locoprop.study.methods import label

NAME = "profile"
LOSSES: tuple[Loss, ...] = ("train_loss", "test_loss")
APART = 0.007
"""The distance between lines of equal shares, which would hide each other."""

PERCENT = (0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Ticks of the axis of distances from the lowest loss."""

Lines = Mapping[str, Mapping[str, Drawn]]
"""The line of each method on each task."""


@dataclass(frozen=True)
class Compared:
    """The tasks and methods of a profile: every method has a run on every task."""

    tasks: tuple[str, ...]
    methods: tuple[str, ...]


def best_lines(lines: Sequence[Drawn]) -> dict[str, Drawn]:
    """Return the line of each method, with the lowest final train loss among its @k."""
    found: dict[str, Drawn] = {}
    for line in lines:
        base = line.series.config.method.partition("@")[0]
        if base not in found or line.final("train_loss") < found[base].final("train_loss"):
            found[base] = line
    return found


def compared(lines: Lines) -> Compared:
    """Return the tasks and methods with the most runs among those that have no gap."""
    best = Compared((), ())
    for number in range(len(lines), 0, -1):
        for tasks in combinations(lines, number):
            shared = tuple(name for name in lines[tasks[0]] if all(name in lines[t] for t in tasks))
            if len(tasks) * len(shared) > len(best.tasks) * len(best.methods):
                best = Compared(tasks, shared)
    return best


def ratios(lines: Lines, over: Compared, loss: Loss) -> dict[str, list[float]]:
    """Return each method's final loss on each task, divided by the lowest; infinite if it diverged.

    The lowest is that of all methods on the task, also of those that the profile leaves out.
    """
    lowest = [min(line.final(loss) for line in lines[task].values()) for task in over.tasks]
    return {
        name: [
            lines[task][name].final(loss) / low if math.isfinite(low) else math.inf
            for task, low in zip(over.tasks, lowest, strict=True)
        ]
        for name in over.methods
    }


def share(values: Sequence[float], factor: float) -> float:
    """Return the share of the values that are at most a factor."""
    return sum(value <= factor for value in values) / len(values)


def make_profile(maker: Maker) -> MadeFigure:
    """Draw the profile over all tasks, and write its caption with the ratios."""
    drawn = maker.tasks()
    lines = {task: best_lines(each) for task, each in drawn.items()}
    over = compared(lines)
    if len(over.methods) < 2:
        maker.say(f"{NAME}: no two methods have runs on a task, so it is not drawn.")
        return MadeFigure(NAME, ())
    request = maker.request
    runs = [run for task in over.tasks for name in over.methods for run in lines[task][name].runs]
    title = on_data(entry_of(NAME).title, runs)
    made = [where_made(runs), f"Made by: `{request.command_for(NAME)}`"]
    note = f"{request.scale.note}; " if request.scale.note else ""
    left_out = [f"without {', '.join(missing)}"] if (missing := _missing(lines, over)) else []
    tasks = f"{note}{len(over.tasks)} tasks: {', '.join(over.tasks)}"
    subtitle = "; ".join([tasks, *left_out])
    picture = draw(lines, over, title, subtitle, made if request.provenance else ())
    files = style.save(picture, request.out, NAME)
    files.append(style.save_caption(caption(lines, over, title, made), request.out, NAME))
    return MadeFigure(NAME, tuple(files), tuple(dict.fromkeys(run.result.folder for run in runs)))


def caption(lines: Lines, over: Compared, title: str, made: Sequence[str]) -> str:
    """Return the caption in Markdown: the ratios, what is left out, and the provenance."""
    parts = [
        f"# {title}",
        "Final losses divided by the lowest of all methods on the task. @k: the best k of each task, "
        "by train loss. Lines of equal shares are drawn a little apart. Where the settings come from "
        "is in the captions of the tasks' own figures.",
    ]
    for loss in LOSSES:
        table = [["method", *over.tasks], ["---", *["---:"] * len(over.tasks)]]
        for name, values in _ranked(ratios(lines, over, loss)):
            table.append([_name(name, lines), *(f"{value:.3f}" for value in values)])
        rows = "\n".join("| " + " | ".join(row) + " |" for row in table)
        parts += [f"## {loss.replace('_', ' ').capitalize()}", rows]
    missing = _missing(lines, over)
    if missing:
        parts.append(f"Left out, as some runs are missing: {', '.join(missing)}.")
    return "\n\n".join([*parts, *made]) + "\n"


def draw(
    lines: Lines, over: Compared, title: str, subtitle: str, footer: Sequence[str] = ()
) -> Figure:
    """Return the picture: a panel for train losses and one for test losses."""
    picture = style.new_figure(11.6, 4.9, title, subtitle)
    panels = picture.subplots(1, 2, sharey=True)
    for axes, loss in zip(panels, LOSSES, strict=True):
        _panel(axes, ratios(lines, over, loss))
        axes.set_xlabel(f"{loss.replace('_', ' ')} at the end, above the lowest")
        style.finish(axes, f"{loss.replace('_', ' ').capitalize()}")
    panels[0].set_ylabel("share of tasks (lines drawn a little apart)")
    panels[0].yaxis.label.set(color=style.INK, fontsize=9.5)
    by_name = {str(line.get_label()): line for line in panels[1].lines}
    for name, line in by_name.items():
        line.set_label(_name(name, lines))
    panels[1].legend(
        loc="upper left",
        bbox_to_anchor=(1.02, 1.03),
        frameon=False,
        fontsize=8.5,
        title="by mean train ratio",
        title_fontsize=8.5,
        alignment="left",
        handlelength=3,
        handles=[by_name[name] for name, _ in _ranked(ratios(lines, over, LOSSES[0]))],
    )
    style.add_footer(picture, footer)
    return picture


def _panel(axes: Axes, values: Mapping[str, Sequence[float]]) -> None:
    """Draw the share of tasks by the distance from the lowest loss in percent, on a log scale."""
    finite = [value for each in values.values() for value in each if math.isfinite(value)]
    end = 1.3 * max(*(100 * (value - 1) for value in finite), 1.0)
    for at, (name, each) in enumerate(values.items()):
        steps = sorted(value for value in each if math.isfinite(value))
        above = [0.0, *(100 * (value - 1) for value in steps), end]
        shares = [share(each, factor) for factor in (1.0, *steps, math.inf)]
        shares[-1] = shares[-2]  # infinite ratios are never within a factor
        look = {**style.line_look(name, 0), **style.marker_look(name)}
        marks = list(range(1, len(above) - 1))
        apart = APART * (at - (len(values) - 1) / 2)
        shown = [value + apart for value in shares]
        axes.step(above, shown, where="post", label=name, markevery=marks, **look)
    axes.set_xscale("symlog", linthresh=PERCENT[1], linscale=0.4)
    axes.set(xlim=(-0.06, end), ylim=(-0.03, 1.05))
    axes.set_xticks([each for each in PERCENT if each <= end])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))


def _missing(lines: Lines, over: Compared) -> list[str]:
    """Return the tasks and methods that are left out because some of their runs are missing."""
    methods = {name for each in lines.values() for name in each} - set(over.methods)
    return [*(task for task in lines if task not in over.tasks), *sorted(map(label, methods))]


def _name(method: str, lines: Lines) -> str:
    """Return the label of a method, with @k if it has one on some task."""
    at = any(method in each and "@" in each[method].series.config.method for each in lines.values())
    return f"{label(method)}@k" if at else label(method)


def _ranked(values: Mapping[str, Sequence[float]]) -> list[tuple[str, Sequence[float]]]:
    """Return the methods by their mean ratio, the lowest first."""
    return sorted(values.items(), key=lambda each: float(np.mean(each[1])))
