"""Train missing runs: one after the other, or several at a time in processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_locoprop.study.figures.images import Images
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.training.run_folder import Metrics
from torch_locoprop.study.training.run_result import RunResult
from torch_locoprop.study.training.runner import run

Watch = Callable[[Metrics], None]
Watching = Callable[[str, int], AbstractContextManager[Watch]]
"""Takes the name of a run and its epochs; yields the function to call with each epoch's metrics."""


@dataclass(frozen=True)
class Job:
    """A run to start, or to finish, in a folder."""

    config: RunConfig
    folder: Path
    name: str


@dataclass(frozen=True)
class Outcome:
    """The end of a job: its result, or the reason why it failed."""

    job: Job
    result: RunResult | None
    failure: str = ""


Done = Callable[[Outcome], None]


def one_by_one(jobs: Sequence[Job], images: Images, watching: Watching, done: Done) -> None:
    """Run the jobs in this process, one after the other."""
    for number, job in enumerate(jobs, 1):
        title = f"{job.name} ({number} of {len(jobs)} runs)"
        with watching(title, job.config.epochs) as watch:
            outcome = _do(job, images, watch)
        done(outcome)


def together(
    jobs: Sequence[Job], images: Images, processes: int, done: Done, threads: int | None = None
) -> None:
    """Run several jobs at a time in processes; Ctrl-C ends them, and their runs can be resumed."""
    context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU
    threads = threads or max(1, (os.cpu_count() or 1) // processes)
    pool = ProcessPoolExecutor(processes, context, _prepare, (threads,))
    before = set(multiprocessing.active_children())
    try:
        futures = [pool.submit(_do, job, images) for job in jobs]
        for future in as_completed(futures):
            done(future.result())
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise RunError(
                f"One of the {processes} processes was killed, perhaps for lack of memory. Give the "
                "same command again to continue, with fewer --jobs."
            ) from error
        raise
    pool.shutdown()


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Use this number of threads within this context; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prepare(threads: int) -> None:
    """Ignore Ctrl-C, which the parent process handles, and set the number of threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def _do(job: Job, images: Images, watch: Watch = lambda row: None) -> Outcome:
    """Run a job; a failure, such as a lack of memory, does not stop the other jobs."""
    data = images.load(job.config.dataset)
    try:
        result = run(job.config, job.folder, resume=True, data=data, on_epoch=watch)
    except (RuntimeError, ImportError) as error:  # a package may be too old
        return Outcome(job, None, (str(error) or type(error).__name__).splitlines()[0])
    return Outcome(job, result)
