"""Do the runs that are missing: one after the other, or several at a time in processes."""

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
"""From the name of a run and its number of epochs to what is told each epoch."""


@dataclass(frozen=True)
class Job:
    """A run to do, or to finish, in a folder."""

    config: RunConfig
    folder: Path
    name: str


@dataclass(frozen=True)
class Outcome:
    """How a job ended: with a result, or with the reason why there is none."""

    job: Job
    result: RunResult | None
    failure: str = ""


Done = Callable[[Outcome], None]


def one_by_one(jobs: Sequence[Job], images: Images, watching: Watching, done: Done) -> None:
    """Do the jobs in this process, each with the whole machine."""
    for number, job in enumerate(jobs, 1):
        title = f"{job.name} ({number} of {len(jobs)} runs)"
        with watching(title, job.config.epochs) as watch:
            outcome = _do(job, images, watch)
        done(outcome)


def together(
    jobs: Sequence[Job], images: Images, processes: int, done: Done, threads: int | None = None
) -> None:
    """Do so many jobs at a time; Ctrl-C ends the processes, whose runs can go on later."""
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
                f"One of the {processes} processes was killed, perhaps for lack of memory. The same "
                "command goes on where it stopped; try fewer --jobs."
            ) from error
        raise
    pool.shutdown()


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """So many threads in this process, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prepare(threads: int) -> None:
    """Leave Ctrl-C to the parent, which ends us, and share the cores."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def _do(job: Job, images: Images, watch: Watch = lambda row: None) -> Outcome:
    """The job's outcome; a run that fails, out of memory say, does not take the others with it."""
    data = images.load(job.config.dataset)
    try:
        result = run(job.config, job.folder, resume=True, data=data, on_epoch=watch)
    except (RuntimeError, ImportError) as error:  # a package may be there, and too old
        return Outcome(job, None, (str(error) or type(error).__name__).splitlines()[0])
    return Outcome(job, result)
