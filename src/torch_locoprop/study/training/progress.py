"""Progress of training in a terminal: a bar, or a line for each epoch where there is no terminal.

Both show how much time is left. Progress of a download is in ``torch_locoprop.study.cli.shared``;
tables of results are in ``torch_locoprop.study.cli.tables``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

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


class Show(Protocol):
    """Moves a bar: to a number of the total, with a text and the part of the next ones."""

    def __call__(self, done: int, total: int, now: str, part: float = 0.0) -> None: ...


class TimeLeft:
    """An estimate of the time that is left, from the time that the work so far has taken.

    Work that was done before the first call, by an earlier process, does not count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, float] | None = None

    def __call__(self, done: float, total: float) -> str:
        """Return the estimate as text, such as ``3 min left``; empty while there is none.

        Args:
            done: How much is done, in any unit.
            total: How much there is.
        """
        if self._first is None:
            self._first = done, self._clock()
        before, began = self._first
        if not before < done < total:
            return ""
        seconds = (self._clock() - began) / (done - before) * (total - done)
        return f"{as_time(seconds)} left"


def as_time(seconds: float) -> str:
    """Return a duration in words: ``40 s``, ``3 min``, ``2 h 05 min``, ``3.5 days``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    days = minutes / (24 * 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if days < 2 else f"{days:.1f} days"


@contextmanager
def bar(console: Console, name: str) -> Iterator[Show]:
    """Show a progress bar with the time that is left; yields the function that moves it."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    left = TimeLeft()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=None, now="", left="")

        def show(done: int, total: int, now: str, part: float = 0.0) -> None:
            remaining = left(done + part, total)
            progress.update(task, completed=done, total=total, now=now, left=remaining)

        yield show


@contextmanager
def watching(console: Console, name: str, epochs: int, *, quiet: bool) -> Iterator[Watch]:
    """Show the epochs of a run; yields the function to call with the metrics of each epoch."""
    if quiet:
        yield lambda row: None
    elif console.is_terminal:
        with bar(console, name) as show:
            yield lambda row: show(row.epoch, epochs, _losses(row))
    else:
        left = TimeLeft()

        def line(row: Metrics) -> None:
            text = f"{name}  epoch {row.epoch}/{epochs}  {_losses(row)}  {row.seconds:.1f} s"
            console.print(f"{text}  {left(row.epoch, epochs)}".rstrip(), soft_wrap=True)

        yield line


def _losses(row: Metrics) -> str:
    return f"train {row.train_loss:.2f}  test {row.test_loss:.2f}"
