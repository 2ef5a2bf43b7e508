"""The figure of the demo: losses by epoch and by time, and reconstructed images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from torch import Tensor

from torch_locoprop.study.contest import METHODS
from torch_locoprop.study.curves import SIDE
from torch_locoprop.study.training import Run

INK, FAINT = "#222222", "#8c8c8c"
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 11, "fontweight": "bold", "color": INK}
COLOURS = {method.name: method.colour for method in METHODS} | {"original": INK}


def draw(path: Path, runs: Mapping[str, Run], floor: float, pictures: Mapping[str, Tensor]) -> None:
    """Write the figure as a PNG.

    `floor` is the lowest loss that any model can have; `pictures` holds the "original" images and
    each method's reconstructions of them, `[columns, pixels]` in [0, 1], a row of the figure each.
    """
    margins = ConstrainedLayoutEngine(rect=(0.01, 0.01, 0.98, 0.98))
    figure = Figure(figsize=(10, 7.5), layout=margins)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[1.2, 1]).flat
    _curves(above, runs, floor)
    _gallery(below, pictures)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _curves(figure: SubFigure, runs: Mapping[str, Run], floor: float) -> None:
    by_epoch, by_seconds = figure.subplots(1, 2, sharey=True)
    for name, run in runs.items():
        label = f"{name}: {run.train_loss[-1]:.1f}"
        by_epoch.plot(run.train_loss, color=COLOURS[name], lw=2, label=label)
        by_seconds.plot(run.seconds, run.train_loss, color=COLOURS[name], lw=2)
        by_seconds.plot(run.seconds[-1:], run.train_loss[-1:], "o", ms=5, color=COLOURS[name])
    by_epoch.set(xlabel="epochs", ylabel="train loss per image")
    by_seconds.set(xlabel="seconds of training")
    by_epoch.set_title("The same epochs", **TITLE)
    by_seconds.set_title("The same runs by the clock", **TITLE)
    by_epoch.legend(title="final train loss", frameon=False, alignment="left")
    for axes in (by_epoch, by_seconds):
        _finish(axes, floor)


def _finish(axes: Axes, floor: float) -> None:
    """Set scales, ticks and frame, and mark the floor."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(colors=INK, which="both", length=3)
    axes.grid(axis="y", color="#e6e6e6", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    axes.axhline(floor, color=FAINT, lw=1, ls=(0, (4, 3)))
    axes.annotate(
        f"a perfect reconstruction: {floor:.1f}",
        (1, floor),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color=FAINT,
        fontsize=9,
    )


def _gallery(figure: SubFigure, pictures: Mapping[str, Tensor]) -> None:
    """Draw each entry as one strip of images with its name to the left."""
    rows = figure.subplots(len(pictures), 1)
    rows[0].set_title("Test images and their reconstructions", **TITLE)
    for axes, (name, images) in zip(rows, pictures.items(), strict=True):
        tiles = images.reshape(-1, SIDE, SIDE).numpy()
        gap = np.full((len(tiles), SIDE, 1), 0.8, dtype=tiles.dtype)
        strip = np.concatenate(np.concatenate([1 - tiles, gap], axis=2), axis=1)[:, :-1]
        axes.imshow(strip, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_ylabel(name, color=COLOURS[name], rotation=0, ha="right", va="center", labelpad=6)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color("#cccccc")
