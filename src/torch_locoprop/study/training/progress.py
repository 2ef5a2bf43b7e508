"""Progress of training in a terminal: a bar, or a line for each epoch where there is no terminal.

Progress of a download is in ``torch_locoprop.study.cli.shared``; tables of results are in
``torch_locoprop.study.cli.tables``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from torch_locoprop.study.training.run_folder import Metrics

Watch = Callable[[Metrics], None]
"""Called with the metrics of each epoch."""

Show = Callable[[int, int, str], None]
"""Called with the number done, the total, and a text."""


@contextmanager
def bar(console: Console, name: str) -> Iterator[Show]:
    """Show a progress bar; yields the function that moves it."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=None, now="")
        yield lambda done, total, now: progress.update(task, completed=done, total=total, now=now)


@contextmanager
def watching(console: Console, name: str, epochs: int, *, quiet: bool) -> Iterator[Watch]:
    """Show the epochs of a run; yields the function to call with the metrics of each epoch."""
    if quiet:
        yield lambda row: None
    elif console.is_terminal:
        with bar(console, name) as show:
            yield lambda row: show(row.epoch, epochs, _losses(row))
    else:
        yield lambda row: console.print(
            f"{name}  epoch {row.epoch}/{epochs}  {_losses(row)}  {row.seconds:.1f} s",
            soft_wrap=True,
        )


def _losses(row: Metrics) -> str:
    return f"train {row.train_loss:.2f}  test {row.test_loss:.2f}"
