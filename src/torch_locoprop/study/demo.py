"""The demo: four optimizers train the same small deep autoencoder, side by side.

    python -m torch_locoprop.study.demo

LocoProp-M and LocoProp-S take ten local iterations a step. RMSProp and Adam are TensorFlow's, as in the
paper; `contest.py` has all settings and how they were found.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from torch_locoprop.study.autoencoder import entropy
from torch_locoprop.study.contest import EPOCHS, IMAGES, METHODS, contest_task
from torch_locoprop.study.demo_figure import draw
from torch_locoprop.study.training import Run, train

COLUMNS = 16
"""Test images shown in the figure."""

DESCRIPTION = """\
Train one deep autoencoder with four optimizers, from the same weights and on the same batches
of curve images, and compare them by epoch and by time. LocoProp solves a small convex problem in
every layer after each backward pass; RMSProp and Adam take the gradient as it is. Prints a table
and writes a figure with the loss curves and reconstructed test images.
"""

EPILOG = """\
examples:
  %(prog)s               the full demo, one to two minutes on two CPU cores
  %(prog)s --epochs 5    a quick look
  %(prog)s --seed 1      does the order hold on other images and weights?

All four were tuned by the same random search at the default --epochs and --images; far from
these, none of them is tuned.
"""

Watch = Callable[[str], Callable[[Run], None]]


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> dict[str, Run]:
    """Run the demo with these command-line arguments and return each method's record by name."""
    options = _parser().parse_args(arguments)
    console = console or Console(highlight=False)
    task = contest_task(images=options.images, epochs=options.epochs, seed=options.seed)
    widths = "–".join(map(str, task.sizes))
    console.print(
        f"{len(task.train)} images of curves, {len(task.test)} more to test on. "
        f"Autoencoder {widths} and back, tanh. "
        f"{task.epochs} epochs of batches of {task.batch_size}."
    )
    runs: dict[str, Run] = {}
    pictures: dict[str, Tensor] = {"original": task.test[:COLUMNS]}
    with _progress(console, task.epochs) as watch:
        for method in METHODS:
            model, runs[method.name] = train(task, method.settings, watch(method.name))
            with torch.no_grad():
                pictures[method.name] = model(pictures["original"]).sigmoid()
    console.print(_table(runs))
    draw(options.out, runs, floor=entropy(task.train), pictures=pictures)
    console.print(f"Figure: {options.out}")
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_locoprop.study.demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--epochs",
        type=int,
        default=EPOCHS,
        metavar="N",
        help="passes over the images (default: %(default)s)",
    )
    add(
        "--images",
        type=int,
        default=IMAGES,
        metavar="N",
        help="images to train on (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of images, weights and batches (default: %(default)s)",
    )
    add(
        "--out",
        type=Path,
        default=Path("runs/demo.png"),
        metavar="PNG",
        help="the figure (default: %(default)s)",
    )
    return parser


@contextmanager
def _progress(console: Console, epochs: int) -> Iterator[Watch]:
    """Give a function from a method's name to the callback that shows its epochs as they end.

    On a terminal that is a bar for each method; elsewhere, a line now and then.
    """
    if not console.is_terminal:
        yield lambda name: lambda run: _print_line(console, name, run, epochs)
        return
    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:>6.1f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:

        def watch(name: str) -> Callable[[Run], None]:
            bar = progress.add_task(name, total=epochs, loss=float("nan"))
            return lambda run: progress.update(bar, advance=1, loss=run.train_loss[-1])

        yield watch


def _print_line(console: Console, name: str, run: Run, epochs: int) -> None:
    epoch = len(run.train_loss) - 1
    if epoch % 5 == 0 or epoch == epochs:
        console.print(
            f"{name:<11} epoch {epoch:>3}/{epochs}  "
            f"loss {run.train_loss[-1]:7.2f}  {run.seconds[-1]:5.1f} s"
        )


def _table(runs: Mapping[str, Run]) -> Table:
    """Return the results, and when each method was as good as BackProp's best is in the end."""
    backprop = [method.name for method in METHODS if method.kind["optimizer"] != "locoprop"]
    rival = min(backprop, key=lambda name: runs[name].train_loss[-1])
    mark = runs[rival].train_loss[-1]
    table = Table("method")
    for heading in ("train loss", "test loss", "seconds", f"reaches {rival}'s {mark:.1f}"):
        table.add_column(heading, justify="right")
    for name, run in runs.items():
        epoch = next((n for n, loss in enumerate(run.train_loss) if loss <= mark), None)
        passed = "–" if epoch is None else f"epoch {epoch}, {run.seconds[epoch]:.1f} s"
        table.add_row(
            name,
            f"{run.train_loss[-1]:.1f}",
            f"{run.test_loss[-1]:.1f}",
            f"{run.seconds[-1]:.1f}",
            passed,
        )
    return table


if __name__ == "__main__":
    main()
