"""The figure and the table of `benchmarks.growth`, from the content of its JSON file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.step_table import table
from torch_locoprop.study.figures import style
from torch_locoprop.study.figures.costs import BASELINE
from torch_locoprop.study.methods import colour, label

METHODS = ("locoprop-m", "locoprop-s")
WIDTHS = (3.6, 1.6)
"""The first line is wider, as the second one covers it where they coincide."""
VARIED = {
    "batch": "batch b",
    "width": "width d",
    "depth": "depth, layers",
    "T": "local iterations T",
}
MEASURES = {"step_ms": ("operations", "time, ms"), "peak_mib": ("numbers", "memory, MiB")}
"""For each measured quantity: the key of its formula in a point, and its name with its unit."""


class Value(NamedTuple):
    """The cost of a method beyond BackProp's at one size.

    Args:
        at: the varied number: batch size, width, depth or T.
        measured: measured cost; None if it was left out.
        formula: cost by Table 1, scaled to equal the measurement at the base size.
    """

    at: int
    measured: float | None
    formula: float


def values(content: dict[str, Any], method: str, varied: str, measure: str) -> Iterator[Value]:
    """Yield the values of a method along the range of one number, the smallest first.

    Args:
        content: content of the JSON file.
        method: `locoprop-m` or `locoprop-s`.
        varied: a key of `VARIED`.
        measure: a key of `MEASURES`.
    """
    formula, _ = MEASURES[measure]
    base = content["base"]
    points = {(p["method"], *p["size"].values()): p for p in content["points"]}

    def beyond(size: dict[str, int]) -> float | None:
        ours, plain = (points[name, *size.values()][measure] for name in (method, BASELINE))
        return None if ours is None or plain is None else ours - plain

    at_base = beyond(base)
    assert at_base is not None
    scale = at_base / points[method, *base.values()][formula]
    for value in sorted({*content["ranges"][varied], base[varied]}):
        size = {**base, varied: value}
        yield Value(value, beyond(size), scale * points[method, *size.values()][formula])


def markdown(content: dict[str, Any]) -> str:
    """Return the Markdown table of all values, measured and by formula."""
    head = ["", *(f"{label(m)}, {w}" for m in METHODS for w in ("ms", "Table 1", "MiB", "Table 1"))]
    cells = []
    for varied in VARIED:
        columns = [values(content, m, varied, measure) for m in METHODS for measure in MEASURES]
        for row in zip(*columns, strict=True):
            numbers = [
                text for value in row for text in (_text(value.measured), _text(value.formula))
            ]
            cells.append([f"{varied} = {row[0].at:,}", *numbers])
    about = f"Cost beyond BackProp's. One number is varied at a time; base size: {_base(content)}."
    return f"{about}\n\n{table(head, cells)}"


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _base(content: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in content["base"].items())


def draw(content: dict[str, Any]) -> Figure:
    """Return the figure: time in the upper row, memory in the lower, a column for each number."""
    where = content["environment"]
    figure = style.new_figure(
        12.6,
        6.4,
        "Cost of a LocoProp step beyond BackProp's",
        f"measured (solid) and Table 1, scaled to the base size (dashed); base: {_base(content)}; "
        f"{where['machine']}, {content['precision']}",
    )
    panels = figure.subplots(len(MEASURES), len(VARIED), sharey="row")
    for row, measure in zip(panels, MEASURES, strict=True):
        for axes, varied in zip(row, VARIED, strict=True):
            _panel(axes, content, varied, measure)
        row[0].set_ylabel(f"{MEASURES[measure][1]} beyond BackProp")
    panels[0][0].legend(frameon=False, fontsize=9, labelcolor="linecolor")
    notes = [
        "Every layer is width × width. Table 1: time Σ b·T·d₁·d₂, memory Σ d₁·d₂ + b·(d₁ + d₂); "
        "LocoProp-S uses XᵀX where that needs fewer operations."
    ]
    if any(point["step_ms"] is None for point in content["points"]):
        notes.append("Sizes without a mark were not measured: they would have taken too long.")
    style.add_footer(figure, notes)
    return figure


def _panel(axes: Axes, content: dict[str, Any], varied: str, measure: str) -> None:
    for method, width in zip(METHODS, WIDTHS, strict=True):
        line = list(values(content, method, varied, measure))
        seen = [(v.at, v.measured) for v in line if v.measured is not None and v.measured > 0]
        paint = colour(method)
        mark: dict[str, Any] = {**style.marker_look(method), "ms": 2.5 + 1.5 * width}
        axes.plot(*zip(*seen, strict=True), color=paint, lw=width, label=label(method), **mark)
        formulas = [v.formula for v in line]
        axes.plot([v.at for v in line], formulas, "--", color=paint, lw=0.6 * width)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator([value.at for value in line]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(VARIED[varied])
    style.finish(axes, f"{MEASURES[measure][1].partition(',')[0].capitalize()} by {varied}")


def save(content: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """Write the figure as PNG and PDF, and return both paths."""
    return style.save(draw(content), folder, name)
