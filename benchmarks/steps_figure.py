"""The figure of `benchmarks.steps`: milliseconds of a step, from the content of its JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.contestants import FLOOR
from torch_locoprop.study.figures import style
from torch_locoprop.study.methods import colour

Row = dict[str, Any]


def draw(content: dict[str, Any]) -> Figure:
    """Return the figure: a panel for each model, with the fastest method at the top."""
    models, where = content["models"], content["environment"]
    rows = max(map(len, models.values()))
    found = [row for own in models.values() for row in own]
    figure = style.new_figure(
        4.2 + 3.6 * len(models),
        1.6 + 0.3 * rows,
        "One whole training step: forward, backward and optimizer",
        f"milliseconds, batches of {content['batch']}, T = {content['local_steps']}; "
        f"{where['machine']}, PyTorch {where['torch']}, {content['precision']}",
    )
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, (model, own) in zip(panels, models.items(), strict=True):
        _panel(axes, model, [row for row in own if _times(row)])
    notes = []
    if any(row["graph_ms"] is not None for row in found):
        notes.append("Rings: a plain loop. Discs: the whole step as one CUDA graph.")
    if any(row["key"] == FLOOR for row in found):
        notes.append("Matrix products: those of a LocoProp-M step alone.")
    style.add_footer(figure, notes)
    return figure


def save(content: dict[str, Any], path: Path) -> list[Path]:
    """Write the figure as PNG and PDF, and return both paths."""
    return style.save(draw(content), path.parent, path.stem)


def _times(row: Row) -> list[float]:
    return [ms for ms in (row["graph_ms"], row["loop_ms"]) if ms is not None]


def _best(row: Row) -> float:
    return min(_times(row))


def _panel(axes: Axes, model: str, rows: list[Row]) -> None:
    rows = sorted(rows, key=_best, reverse=True)
    for place, row in enumerate(rows):
        paint = _colour(row["key"])
        times = _times(row)
        axes.plot(times, [place] * len(times), color=paint, lw=1.4)
        for ms, face in ((row["graph_ms"], paint), (row["loop_ms"], "white")):
            if ms is not None:
                axes.plot(ms, place, "o", color=paint, mfc=face, ms=6.5, mew=1.6)
                side, away = ("right", -7) if ms < max(times) else ("left", 7)
                axes.annotate(
                    f"{ms:.3g}", (ms, place), (away, 0), textcoords="offset points", ha=side,
                    va="center", fontsize=8, color=style.INK,
                )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_xscale("log")
    axes.set_xlim(min(map(_best, rows)) / 2, 2 * max(max(_times(row)) for row in rows))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    style.finish(axes, model)


def _colour(key: str) -> str:
    return style.FAINT if key == FLOOR else colour(key.removesuffix("-eager").removesuffix("-bf16"))
