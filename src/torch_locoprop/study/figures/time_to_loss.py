"""The figure of times to fixed train losses: a panel for each timed task, a row for each method.

The steps to a loss are those of a whole run, in its own schedule, and the loss is known at the end of
every epoch. Seconds are these epochs times the seconds of an epoch: once with every step as a CUDA
graph (`run_library.GraphClock`), and once as the study runs the method (`timings.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from torch_locoprop.study.figures import style, timings
from torch_locoprop.study.figures.captions import how_timed, on_data
from torch_locoprop.study.figures.catalog import TIMED, entry_of
from torch_locoprop.study.figures.figure_request import MadeFigure
from torch_locoprop.study.figures.loss_figures import Maker
from torch_locoprop.study.figures.loss_lines import Drawn
from torch_locoprop.study.figures.run_library import Found, GraphClock, where_made
from torch_locoprop.study.methods import colour

NAME = "time-to-loss"
SHAPES = ("o", "s", "^", "D", "v", "P")
"""The markers of the targets."""

APART = 0.22
"""The distance of a method's seeds, in rows."""

PLAIN = {"facecolor": "white", "pad": 0.5, "lw": 0}
WORDS = 0.25
"""The room for words at the right of the last point, as a share of the points' range."""


@dataclass(frozen=True)
class Reached:
    """When one method reached the targets on one task.

    Args:
        line: The runs of the method.
        epochs: For each run and target the first epoch at whose end the train loss was at most the
            target, or None if it never was.
        steps_per_epoch: Steps of an epoch.
        as_graph: Seconds of an epoch whose steps are CUDA graphs; None if they are not known.
        eager: Seconds of an epoch as the study runs the method, if its steps are launched eagerly.
    """

    line: Drawn
    epochs: Mapping[int, tuple[int | None, ...]]
    steps_per_epoch: int
    as_graph: float | None
    eager: float | None

    def seconds(self, target: int, *, eager: bool = False) -> list[float | None]:
        """Return the seconds of each run to a target, by its position, with steps of one kind."""
        each = self.eager if eager else self.as_graph
        found = (reached[target] for reached in self.epochs.values())
        return [None if at is None or each is None else at * each for at in found]

    @property
    def kinds(self) -> list[bool]:
        """The kinds of steps whose seconds are known, CUDA graphs first; True is eager."""
        return [eager for eager, each in ((False, self.as_graph), (True, self.eager)) if each]

    def steps(self, target: int) -> list[int | None]:
        """Return the steps of each run to a target, by its position."""
        found = (reached[target] for reached in self.epochs.values())
        return [None if at is None else at * self.steps_per_epoch for at in found]


def first_epoch(run: Found, target: float) -> int | None:
    """Return the first epoch at whose end the train loss was at most the target."""
    return next((row.epoch for row in run.metrics if row.train_loss <= target), None)


def reached(
    line: Drawn, targets: Sequence[float], images: int, clock: GraphClock | None = None
) -> Reached:
    """Return when each run of a line reached the targets.

    Args:
        line: The runs of a method, with their seconds in the study.
        targets: The train losses.
        images: The number of training images.
        clock: The times of steps as CUDA graphs; without one, those of methods that replay them.
    """
    epochs = {
        run.config.seed: tuple(first_epoch(run, target) for target in targets) for run in line.runs
    }
    config = line.runs[0].config
    replayed = timings.replays_cuda_graphs(config)
    recorded = clock.seconds(config, images) if clock and config.device == "cuda" else None
    as_graph = recorded or (line.seconds if replayed else None)
    eager = None if replayed else line.seconds
    return Reached(line, epochs, math.ceil(images / config.batch_size), as_graph, eager)


def ordered(tasks: Mapping[str, Sequence[Reached]]) -> list[str]:
    """Return the labels of all methods, the soonest first.

    Methods are compared by their mean seconds to the highest target on the first task, then on the next
    ones. Methods without such seconds come last.
    """
    labels = list(dict.fromkeys(each.line.series.label for rows in tasks.values() for each in rows))
    keys = {label: _soonness(label, tasks) for label in labels}
    return sorted(labels, key=lambda label: keys[label])


def _soonness(label: str, tasks: Mapping[str, Sequence[Reached]]) -> list[float]:
    """Return the mean seconds to the highest target on each task, infinite where there are none."""
    found = []
    for rows in tasks.values():
        own = [each for each in rows if each.line.series.label == label]
        times = [
            time
            for each in own
            for kind in each.kinds[:1]
            for time in each.seconds(0, eager=kind)
            if time is not None
        ]
        found.append(mean(times) if times else math.inf)
    return found


def make_time_to_loss(maker: Maker) -> MadeFigure:
    """Draw the times to the targets of the scale, and write the caption with a table for each task."""
    request = maker.request
    timed, targets = maker.timed(TIMED), request.scale.targets
    clock = maker.library.graph_clock()
    for each in timed.missing:
        maker.say(f"Missing in {NAME}: {each}.")
    tasks = {
        task: [
            reached(line, targets, request.images.count(line.series.config.dataset), clock)
            for line in lines
        ]
        for task, lines in timed.lines.items()
        if lines
    }
    drawn = [each.line for rows in tasks.values() for each in rows]
    runs = [run for line in drawn for run in line.runs]
    if not timed.machine or not runs:
        maker.say(f"{NAME}: no run has a timing, so it is not drawn.")
        return MadeFigure(NAME, (), (), timed.missing)
    title = on_data(entry_of(NAME).title, runs)
    footer = [where_made(runs), how_timed(drawn, timed.machine)]
    if clock is not None:
        footer.append(
            f"CUDA graphs: every step with its updates, on {clock.machine}, without evaluations "
            f"(`benchmarks.graph_clock`)."
        )
    if timed.missing:
        footer.append(f"Missing: {'; '.join(timed.missing)}.")
    footer.append(f"Made by: `{request.command_for(NAME)}`")
    note = request.scale.note
    shown = footer if request.provenance else ()
    files = style.save(draw(tasks, targets, title, note, shown), request.out, NAME)
    text = caption(tasks, targets, title, note, footer)
    files.append(style.save_caption(text, request.out, NAME))
    folders = tuple(dict.fromkeys(run.result.folder for run in runs))
    return MadeFigure(NAME, tuple(files), folders, timed.missing)


def caption(
    tasks: Mapping[str, Sequence[Reached]],
    targets: Sequence[float],
    title: str,
    note: str,
    footer: Sequence[str],
) -> str:
    """Return the caption in Markdown: what is drawn, the steps and seconds, the provenance."""
    parts = [
        f"# {title}",
        f"{f'{note.capitalize()}. ' if note else ''}Seconds until the train loss is at most "
        f"{_listed(targets)}, a point for each seed; filled with every step as a CUDA graph, open as "
        "the study runs the method, if it launches every step anew. The steps are those of whole runs "
        "in their own schedule, and losses are known at the end of every epoch. Methods are in the "
        "order of their seconds on the first task.",
    ]
    for task, rows in tasks.items():
        parts += [f"## {entry_of(task).heading}", _table(rows, targets)]
    spread = any("±" in part for part in parts)
    parts += ["±: the standard deviation over the seeds."] if spread else []
    return "\n\n".join([*parts, *footer]) + "\n"


def _table(rows: Sequence[Reached], targets: Sequence[float]) -> str:
    """Return the steps to each target, and the seconds as CUDA graphs and eagerly."""
    head = ["method", "seeds"]
    for target in targets:
        head += [f"steps to {target:g}", "seconds", "eager"]
    labels = ordered({"": rows})
    lines = [head, ["---", "---", *["---:"] * (3 * len(targets))]]
    for each in sorted(rows, key=lambda each: labels.index(each.line.series.label)):
        cells = [each.line.series.label, ", ".join(map(str, each.epochs))]
        for at in range(len(targets)):
            cells.append(_spread(each.steps(at), 0))
            for eager in (False, True):
                known = eager in each.kinds
                cells.append(_spread(each.seconds(at, eager=eager), 1) if known else "")
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _spread(values: Sequence[float | None], digits: int) -> str:
    """Return the mean and standard deviation, or how many of the runs have a value."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    text = f"{mean(known):.{digits}f}"
    if len(known) > 1:
        text += f" ± {stdev(known):.{digits}f}"
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)} seeds)"


def draw(
    tasks: Mapping[str, Sequence[Reached]],
    targets: Sequence[float],
    title: str,
    subtitle: str,
    footer: Sequence[str] = (),
) -> Figure:
    """Return the picture: a panel for each task, whose rows are all methods.

    Args:
        tasks: When the methods of each task reached the targets.
        targets: The train losses.
        title: The title.
        subtitle: The text below the title.
        footer: The lines below the panels.
    """
    labels = ordered(tasks)
    size = (3.9 * len(tasks) + 2.6, 0.3 * len(labels) + 1.9)
    picture = style.new_figure(*size, title, subtitle)
    panels = picture.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for axes, (task, rows) in zip(panels, tasks.items(), strict=True):
        _panel(axes, {each.line.series.label: each for each in rows}, labels, targets)
        style.finish(axes, entry_of(task).heading)
        axes.grid(axis="x", color=style.GRID, lw=0.8)
    panels[0].set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.4, -0.6))
    panels[-1].legend(
        handles=_handles(targets),
        title="train loss of at most",
        loc="upper left",
        bbox_to_anchor=(1.02, 1.03),
        frameon=False,
        fontsize=8.5,
        title_fontsize=8.5,
        alignment="left",
    )
    style.add_footer(picture, footer)
    return picture


def _handles(targets: Sequence[float]) -> list[Line2D]:
    """Return the entries of the legend: the targets, and what filled and open points are."""
    entries = [
        (f"{target:g}", shape, style.INK) for target, shape in zip(targets, SHAPES, strict=False)
    ]
    entries += [("filled: as a CUDA graph", "", style.INK), ("open: run eagerly", "", "white")]
    return [
        Line2D([], [], ls="none", marker=shape, ms=6.5, mec=style.INK, mfc=face, label=text)
        for text, shape, face in entries
    ]


def _panel(
    axes: Axes, rows: Mapping[str, Reached], labels: Sequence[str], targets: Sequence[float]
) -> None:
    """Draw the points of each method, and say in words what has none."""
    axes.set_xscale("log")
    axes.set_xlabel("seconds of training")
    for at, label in enumerate(labels):
        last = _points(axes, at, rows[label], targets) if label in rows else None
        _say(axes, at, last, _remark(rows.get(label), len(targets)))
    if not axes.lines:
        axes.set(xticks=[], xlim=(1, 10))
        return
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** WORDS)
    axes.xaxis.set_major_locator(LogLocator(subs=_ticks(axes)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _ticks(axes: Axes) -> tuple[int, ...]:
    """Return the ticks of a decade: fewer where the panel has more decades."""
    low, high = axes.get_xlim()
    return (1, 2, 3, 5) if high < 20 * low else (1, 2, 5) if high < 300 * low else (1,)


def _points(axes: Axes, row: int, own: Reached, targets: Sequence[float]) -> float | None:
    """Draw a point for each seed and target; return the longest time, or None without any."""
    method, seeds, last = own.line.series.painted_as, len(own.epochs), None
    paint = colour(method)
    for eager in own.kinds:
        look: dict[str, Any] = {"mec": paint, "mfc": "white" if eager else paint, "mew": 1.1}
        times = [own.seconds(at, eager=eager) for at in range(len(targets))]
        for seed in range(seeds):
            y = row + APART * (seed - (seeds - 1) / 2)
            known = [(time[seed], shape) for time, shape in zip(times, SHAPES, strict=False)]
            points = [(x, shape) for x, shape in known if x is not None]
            axes.plot([x for x, _ in points], [y] * len(points), color=paint, lw=0.9)
            for x, shape in points:
                axes.plot([x], [y], ls="none", marker=shape, ms=4.6, **look)
            last = max([x for x, _ in points] + ([] if last is None else [last]), default=None)
    return last


def _remark(own: Reached | None, targets: int) -> str:
    """Return why a method lacks points, or an empty string if it has all."""
    if own is None:
        return "not run"
    if own.line.diverged:
        return "diverged"
    reached = [at is not None for epochs in own.epochs.values() for at in epochs[:targets]]
    if any(reached) and not own.kinds:
        return "not timed"
    if all(reached):
        return ""
    return f"ends at {own.line.final('train_loss'):.2f}"


def _say(axes: Axes, row: int, after: float | None, text: str) -> None:
    """Write small words into a row: after its last point, or at the left of an empty one."""
    look: dict[str, Any] = {"fontsize": 7.5, "color": style.FAINT, "va": "center", "bbox": PLAIN}
    if not text:
        return
    if after is None:
        axes.text(0.02, row, text, transform=axes.get_yaxis_transform(), **look)
        return
    beside = ScaledTranslation(7 / 72, 0, axes.figure.dpi_scale_trans)
    axes.text(after, row, text, transform=axes.transData + beside, **look)


def _listed(values: Iterable[float]) -> str:
    *others, last = [f"{value:g}" for value in values]
    return f"{', '.join(others)} or {last}" if others else last
