"""The demo: four optimizers train the same small deep autoencoder, side by side.

    python -m torch_locoprop.study.demo

LocoProp-M and LocoProp-S run ten local iterations a step. RMSProp and Adam are the same class with one local
iteration, which is BackProp: `contest.py` has all settings and how they were found.
"""

import argparse
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from torch_locoprop.study.autoencoder import entropy
from torch_locoprop.study.contest import EPOCHS, IMAGES, METHODS, contest_task
from torch_locoprop.study.figures import draw
from torch_locoprop.study.training import Run, Task, train

COLUMNS = 16
"""Test images shown in the figure."""

HELP = """\
Train one deep autoencoder with four optimizers, from the same weights and on the same batches of curve images, and
compare them by epoch and by time. LocoProp solves a small convex problem in every layer after each backward pass;
RMSProp and Adam take the gradient as it is. Writes a figure with the loss curves and reconstructed test images.
"""

EPILOG = """\
examples:
  python -m torch_locoprop.study.demo                       the full demo, about two minutes on two CPU cores
  python -m torch_locoprop.study.demo --epochs 3            a quick look
  python -m torch_locoprop.study.demo --seed 1              other images, weights and batches: does the order hold?

The settings of all four were found by the same random search at the default --epochs and --images; at values far from
these none of them is tuned.
"""


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> dict[str, Run]:
    """Run the demo with these command-line arguments; return the record of each method by name."""
    options = _parser().parse_args(arguments)
    console = console or Console()
    task = contest_task(images=options.images, epochs=options.epochs, seed=options.seed)
    console.print(
        f"{len(task.train)} curves to train on, {len(task.test)} to test on; autoencoder "
        f"{'–'.join(map(str, task.sizes))} and back; {task.epochs} epochs of batches of {task.batch_size}."
    )
    originals = task.test[:COLUMNS]
    runs: dict[str, Run] = {}
    pictures: dict[str, Tensor] = {"original": originals}
    with _progress(console, task) as watch:
        for method in METHODS:
            model, runs[method.name] = train(task, method.settings, watch(method.name))
            with torch.no_grad():
                pictures[method.name] = model(originals).sigmoid()
    console.print(_table(runs))
    draw(options.out, runs, floor=entropy(task.train), pictures=pictures)
    console.print(f"Figure: {options.out}")
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_locoprop.study.demo",
        description=HELP,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    count = _at_least(1)
    parser.add_argument(
        "--epochs", type=count, default=EPOCHS, metavar="N", help=f"passes over the images (default: {EPOCHS})"
    )
    parser.add_argument(
        "--images", type=_at_least(4), default=IMAGES, metavar="N",
        help=f"images to train on; a quarter as many others are the test set (default: {IMAGES})",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of images, weights and batches; the same seed repeats a run exactly (default: 0)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo.png"), metavar="PNG", help="where the figure goes (default: runs/demo.png)"
    )
    return parser
