"""The style of all figures: sizes, colours, lines, frames, titles, footers, and their files."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torch_locoprop.study import atomic_files
from torch_locoprop.study.methods import colour, marker

INK, FAINT, GRID = "#222222", "#6f6f6f", "#e6e6e6"
PANEL_TITLE: dict[str, Any] = {"loc": "left", "fontsize": 10.5, "fontweight": "bold", "color": INK}
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
"""The dashes of a method's variants: the first, such as @1, is solid; then @10, @100."""

OVER: tuple[Any, ...] = ((0, (3, 3)), (0, (1.4, 2.4)), (0, (5, 2.5, 1.4, 2.5)))
"""The dashes of lines that lie on another line, which shows in the gaps."""

ITERATIONS = {
    "T = 1": ("#767676", "s"),
    "T = 5": ("#1b7f4d", "^"),
    "T = 10": ("#0b5fa5", "o"),
    "T = 50": ("#c8401a", "D"),
}
"""The colours and markers of numbers of local iterations, where these are compared."""

DIVERGED = "X"
"""The marker of a run that diverged."""

FONTS: dict[Any, int] = {"pdf.fonttype": 42, "ps.fonttype": 42}
"""TrueType fonts in PDF files: publishers refuse matplotlib's default, type 3."""

DPI = 160


def new_figure(width: float, height: float, title: str, subtitle: str = "") -> Figure:
    """Return an empty figure with its title at the top left."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    # The empty second line leaves space for the subtitle, which is smaller.
    figure.suptitle(
        f"{title}\n " if subtitle else title, x=0.012, ha="left", fontsize=13, color=INK
    )
    figure.text(0.012, 1 - 0.34 / height, subtitle, va="top", fontsize=9.5, color=FAINT)
    return figure


def add_footer(figure: Figure, lines: Sequence[str]) -> None:
    """Write small lines below the panels, wrapped to the width of the figure."""
    if not lines:
        return
    columns = int(figure.get_figwidth() * 17)
    wrapped = [part for line in lines for part in textwrap.wrap(line, columns)]
    figure.supxlabel(
        "\n".join(wrapped), x=0.012, ha="left", fontsize=7, color=FAINT, linespacing=1.4
    )


def line_look(painted_as: str, variant: int) -> dict[str, Any]:
    """Return the colour and dashes of a line; variants of a method differ in dashes."""
    paint = ITERATIONS[painted_as][0] if painted_as in ITERATIONS else colour(painted_as)
    return {"color": paint, "ls": DASHES[min(variant, len(DASHES) - 1)], "lw": 1.9}


def marker_look(painted_as: str) -> dict[str, Any]:
    """Return the marker on a line, which distinguishes methods in grey and to the colour-blind."""
    shape = ITERATIONS[painted_as][1] if painted_as in ITERATIONS else marker(painted_as)
    drawn_by_strokes = shape in "|_+x1234"
    edge = {"mew": 1.6} if drawn_by_strokes else {"mew": 0.7, "mec": "white"}
    return {"marker": shape, "ms": 8.5 if shape in "*1234+" else 6, **edge}


def finish(axes: Axes, title: str, *, small: bool = False) -> None:
    """Set the title, frame and grid of a panel; the title is `small` where panels are narrow."""
    axes.set_title(title, **{**PANEL_TITLE, **({"fontsize": 9.5} if small else {})})
    axes.tick_params(colors=INK, which="both", length=3, labelsize=8.5)
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.label.set(color=INK, fontsize=9.5)
    axes.yaxis.label.set(color=INK, fontsize=9.5)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write the figure as PNG and PDF and return their paths."""
    paths = []
    for kind in ("png", "pdf"):
        content = io.BytesIO()
        # Without the date, equal figures have equal bytes.
        metadata = {"CreationDate": None} if kind == "pdf" else None
        with matplotlib.rc_context(FONTS):
            figure.savefig(content, format=kind, dpi=DPI, metadata=metadata)
        paths.append(folder / f"{name}.{kind}")
        atomic_files.write(paths[-1], content.getvalue())
    return paths


def save_caption(text: str, folder: Path, name: str) -> Path:
    """Write the caption of a figure as Markdown and return its path."""
    path = folder / f"{name}.md"
    atomic_files.write(path, text)
    return path
