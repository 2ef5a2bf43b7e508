"""The figure of the demo: losses by epoch and by seconds, and reconstructed images."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from torch import Tensor

from torch_locoprop.study.data.curves import SIDE
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.figures import style
from torch_locoprop.study.methods import colour, label
from torch_locoprop.study.models.autoencoder import entropy
from torch_locoprop.study.training.run_folder import RunFolder
from torch_locoprop.study.training.run_result import RunResult, ranked

COLUMNS = 16
"""The largest number of test images shown."""


def verdict(results: Sequence[RunResult]) -> str:
    """Return who has the lowest train loss after all epochs, and at the end of the shortest run."""
    epochs = results[0].config.epochs
    best = ranked(results)[0]
    first = min(results, key=lambda each: each.metrics[-1].seconds)
    seconds = first.metrics[-1].seconds
    quick = min(results, key=lambda each: _loss_after(each, seconds))
    return (
        f"By the epoch {label(best.config.method)} is ahead: train loss "
        f"{best.metrics[-1].train_loss:.1f} after {epochs} epochs. "
        f"By the clock {label(quick.config.method)} is ahead: {_loss_after(quick, seconds):.1f} "
        f"after {seconds:.1f} s, when {label(first.config.method)} ends."
    )


def _loss_after(result: RunResult, seconds: float) -> float:
    """Return the train loss of the last epoch that had ended by then; infinity for a diverged run."""
    ended = [row.train_loss for row in result.metrics if row.seconds <= seconds]
    return math.inf if result.diverged else ended[-1]


def draw(path: Path, results: Sequence[RunResult], data: Dataset) -> None:
    """Write the figure as PNG; the models are read from the folders of the runs."""
    margins = ConstrainedLayoutEngine(rect=(0.01, 0.01, 0.98, 0.98))
    figure = Figure(figsize=(10, 7.5), layout=margins)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[1.2, 1]).flat
    _curves(above, results, floor=entropy(data.train))
    _gallery(below, results, data.test[:COLUMNS])
    figure.suptitle(verdict(results), fontsize=10, x=0.02, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _curves(figure: SubFigure, results: Sequence[RunResult], floor: float) -> None:
    by_epoch, by_seconds = figure.subplots(1, 2, sharey=True)
    for result in results:
        look = style.line_look(result.config.method, 0)
        losses = [row.train_loss for row in result.metrics]
        seconds = [row.seconds for row in result.metrics]
        by_epoch.plot(losses, label=f"{label(result.config.method)}: {losses[-1]:.1f}", **look)
        by_seconds.plot(seconds, losses, **look)
        by_seconds.plot(seconds[-1:], losses[-1:], "o", ms=5, color=look["color"])
    by_epoch.set(xlabel="epochs", ylabel="train loss per image", yscale="log")
    by_seconds.set(xlabel="seconds of training")
    by_epoch.legend(title="final train loss", frameon=False, alignment="left")
    _finish(by_epoch, "The same epochs", floor)
    _finish(by_seconds, "The same runs by the clock", floor)


def _finish(axes: Axes, title: str, floor: float) -> None:
    """Set the ticks and the frame, and mark the loss of a perfect reconstruction."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    style.finish(axes, title)
    axes.set_xlim(left=0)
    axes.axhline(floor, color=style.FAINT, lw=1, ls=(0, (4, 3)))
    axes.annotate(
        f"a perfect reconstruction: {floor:.1f}",
        (1, floor),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color=style.FAINT,
        fontsize=9,
    )


@torch.no_grad()
def _gallery(figure: SubFigure, results: Sequence[RunResult], originals: Tensor) -> None:
    """Draw the original images and the reconstructions of each model, one row each."""
    strips = [("original", style.INK, originals)]
    for result in results:
        model, method = RunFolder(result.folder).trained_model(), result.config.method
        strips.append((label(method), colour(method), model(originals).sigmoid()))
    rows = figure.subplots(len(strips), 1)
    rows[0].set_title("Test images and their reconstructions", **style.PANEL_TITLE)
    for axes, (name, ink, images) in zip(rows, strips, strict=True):
        tiles = images.reshape(-1, SIDE, SIDE).numpy()
        gap = np.full((len(tiles), SIDE, 1), 0.8, dtype=tiles.dtype)
        strip = np.concatenate(np.concatenate([1 - tiles, gap], axis=2), axis=1)[:, :-1]
        axes.imshow(strip, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_ylabel(name, color=ink, rotation=0, ha="right", va="center", labelpad=6)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color("#cccccc")
