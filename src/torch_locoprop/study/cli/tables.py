"""Tables that the commands print."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from torch_locoprop.study.data.datasets import Status
from torch_locoprop.study.training.run_result import RunResult


def ranking(results: Sequence[RunResult]) -> Table:
    """Return a table of runs in the given order, with the origin of their settings below it.

    Memory is that of the GPU. On a CPU it could only be that of the whole process, with the libraries
    and what earlier runs have left, so it is left out.
    """
    on_gpu = any(result.config.device == "cuda" for result in results)
    names = [result.config.method for result in results]
    origins = (f"{result.config.method}: {result.origin}" for result in results)
    table = Table("", caption="\n".join(["Settings from", *origins]), caption_justify="left")
    table.add_column("method", no_wrap=True, min_width=max(map(len, names)))
    memory = ("memory MiB",) if on_gpu else ()
    for heading in ("train loss", "test loss", "seconds", *memory, "epochs"):
        table.add_column(heading, justify="right")
    for place, result in enumerate(results, 1):
        last = result.metrics[-1]
        losses = (f"{last.train_loss:.3f}", f"{last.test_loss:.3f}")
        table.add_row(
            str(place),
            result.config.method,
            *(("diverged", "") if last.diverged else losses),
            f"{last.seconds:.1f}",
            *((f"{last.memory_mib:.0f}",) if on_gpu else ()),
            str(last.epoch),
        )
    return table


def availability(statuses: Sequence[Status]) -> Table:
    """Return a table of data sets and where they are."""
    table = Table("data set", "ready", "where")
    for status in statuses:
        table.add_row(status.name, "yes" if status.ready else "no", status.detail)
    return table
