"""The table of costs as a picture, as Markdown, and as a file of measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from torch_locoprop.study import atomic_files
from torch_locoprop.study.figures import style
from torch_locoprop.study.figures.costs import BASELINE, Cost, row_of
from torch_locoprop.study.methods import colour, label

HEAD = (
    "method",
    "memory: formula",
    "MiB",
    "measured MiB",
    "computation: formula",
    "Gflop",
    "measured ms",
    "step ms",
)
"""Formulas, their values, measurements beyond BackProp, and the time of a whole step."""

WIDTHS = (0.12, 0.18, 0.07, 0.10, 0.27, 0.08, 0.10, 0.08)
NUMBER = 4
"""Bytes of a float32."""


def rows(costs: Sequence[Cost]) -> list[list[str]]:
    """Return the cells of the table, one row per method."""
    base = next(cost for cost in costs if cost.method == BASELINE)
    return [_row(cost, base) for cost in costs]


def _row(cost: Cost, base: Cost) -> list[str]:
    formulas = row_of(cost.method)
    numbers = ["–"] * 4
    if cost.method != BASELINE:
        numbers = [
            f"{cost.numbers * NUMBER / 2**20:,.1f}",
            f"{cost.peak_mib - base.peak_mib:,.1f}",
            f"{2 * cost.operations / 1e9:,.3g}",
            _more(cost.step_ms - base.step_ms),
        ]
    memory, measured_memory, computation, measured_time = numbers
    name = "BackProp (SGD)" if cost.method == BASELINE else label(cost.method)
    return [
        *(name, formulas.memory, memory, measured_memory),
        *(formulas.computation, computation, measured_time, f"{cost.step_ms:,.3g}"),
    ]


def _more(milliseconds: float) -> str:
    """Return the time beyond BackProp's; a negative difference is noise."""
    return "≈ 0" if milliseconds < 0 else f"{milliseconds:,.3g}"


def markdown(costs: Sequence[Cost], notes: Sequence[str]) -> str:
    """Return the table as Markdown, with the notes below it."""
    rule = ["---" if "formula" in name or name == "method" else "---:" for name in HEAD]
    table = "\n".join("| " + " | ".join(line) + " |" for line in [HEAD, rule, *rows(costs)])
    return table + "\n\n" + "\n".join(notes) + "\n"


def draw(costs: Sequence[Cost], title: str, subtitle: str, notes: Sequence[str]) -> Figure:
    """Return the table as a picture."""
    cells = rows(costs)
    figure = style.new_figure(11.6, 1.5 + 0.3 * len(cells), title, subtitle)
    axes = figure.subplots()
    axes.set_axis_off()
    table = axes.table(
        cellText=cells,
        colLabels=HEAD,
        colWidths=WIDTHS,
        loc="center",
        cellLoc="right",
        colLoc="right",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(8.5)
    table.scale(1, 1.55)
    for (row, column), cell in table.get_celld().items():
        cell.set(edgecolor=style.GRID, lw=0.8)
        cell.visible_edges = "B"
        cell.get_text().set_color(style.INK)
        if HEAD[column] == "method" or "formula" in HEAD[column]:
            cell.get_text().set_horizontalalignment("left")
        if row == 0:
            cell.get_text().set(fontweight="bold")
        elif column == 0:
            cell.get_text().set(color=colour(costs[row - 1].method), fontweight="bold")
    style.add_footer(figure, notes)
    return figure


def store(path: Path, costs: Sequence[Cost], about: dict[str, Any]) -> None:
    """Write the measurements and their description to a file."""
    content = {**about, "costs": [asdict(cost) for cost in costs]}
    atomic_files.write(path, json.dumps(content, indent=1) + "\n")


def stored(path: Path) -> tuple[list[Cost], dict[str, Any]] | None:
    """Return the measurements in a file and their description, or None if it has none."""
    try:
        content = json.loads(path.read_text())
        return [Cost(**cost) for cost in content.pop("costs")], content
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
