"""What a run looks like while it goes on, and tables of what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from rich.table import Table

from torch_locoprop.study.data.datasets import Status
from torch_locoprop.study.training.run_folder import Metrics
from torch_locoprop.study.training.runner import RunResult

Watch = Callable[[Metrics], None]
Show = Callable[[int, int, str], None]
"""Takes how much is done, of how much, and what there is to say of it."""


@contextmanager
def bar(console: Console, name: str) -> Iterator[Show]:
    """Give what moves a bar on the terminal."""
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
    """Give what shows each epoch as it ends: a bar on a terminal, lines elsewhere, or nothing."""
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


def outcome(result: RunResult) -> str:
    """Return one sentence on a run that has ended."""
    last = result.metrics[-1]
    if last.diverged:
        return f"{result.config.method} diverged in epoch {last.epoch}: {result.folder}"
    epochs = "1 epoch" if last.epoch == 1 else f"{last.epoch} epochs"
    return (
        f"{result.config.method}: train loss {last.train_loss:.3f}, test loss {last.test_loss:.3f} "
        f"after {epochs} in {last.seconds:.1f} s of training: {result.folder}"
    )


def ranked(results: Sequence[RunResult]) -> list[RunResult]:
    """Return the runs by their last train loss, the lowest first, those that diverged last."""
    return sorted(results, key=lambda r: (r.diverged, r.metrics[-1].train_loss))


def ranking(results: Sequence[RunResult]) -> Table:
    """Return the table of runs in their order; below it, where their settings come from."""
    names = [result.config.method for result in results]
    origins = (f"{result.config.method}: {result.origin}" for result in results)
    table = Table("", caption="\n".join(["Settings from", *origins]), caption_justify="left")
    table.add_column("method", no_wrap=True, min_width=max(map(len, names)))
    for heading in ("train loss", "test loss", "seconds", "memory MiB", "epochs"):
        table.add_column(heading, justify="right")
    for place, result in enumerate(results, 1):
        last = result.metrics[-1]
        losses = (f"{last.train_loss:.3f}", f"{last.test_loss:.3f}")
        table.add_row(
            str(place),
            result.config.method,
            *(("diverged", "") if last.diverged else losses),
            f"{last.seconds:.1f}",
            f"{last.memory_mib:.0f}",
            str(last.epoch),
        )
    return table


def availability(statuses: Sequence[Status]) -> Table:
    """Return the table of data sets."""
    table = Table("data set", "ready", "where")
    for status in statuses:
        table.add_row(status.name, "yes" if status.ready else "no", status.detail)
    return table
