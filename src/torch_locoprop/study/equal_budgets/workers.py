"""Train trials of equal budgets and store their results: together as populations, or one by one.

A trial that is trained alone is a run with checkpoints, so that it continues after any interruption; a
population that is interrupted starts again. Losses of both are equal up to rounding, except with SOAP
(see ``torch_locoprop.study.training.matrix_population``). Seconds of a trial are its share of its
population's time.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
import signal
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from torch_locoprop.study import methods
from torch_locoprop.study.atomic_files import append_line
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.equal_budgets.trials import Trial
from torch_locoprop.study.machine import environment
from torch_locoprop.study.training import matrix_population, population_run
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import Checkpoint, Metrics
from torch_locoprop.study.training.runner import run

GRACE = 15.0
"""Seconds after the deadline in which a process may finish its epoch before it is killed."""

Job = list[Trial]
"""Trials that train together."""

NextJob = Callable[[], "tuple[Job, Work] | None"]
"""Returns a job that can be trained now and its work; None if there is none until another one ends."""

Say = Callable[[str], None]
Watch = Callable[[Trial, Metrics], None]
"""Called with a trial that is trained alone and the metrics of each epoch."""


class ImageSource(Protocol):
    """The source of the images of a process."""

    def load(self, name: str) -> Dataset:
        """Return the images of a data set."""
        ...


class OutOfTimeError(Exception):
    """Raised to end a run when the deadline has passed."""


@dataclass(frozen=True)
class Work:
    """The task, files, images and limits with which a process runs its trials.

    Args:
        task: The fields of a `RunConfig`, without those of a method.
        device: ``cpu`` or ``cuda``.
        results: The file `results.jsonl`, or where a subclass stores results.
        images: The source of the images.
        runs: The folder for trials that are trained alone.
        together: Trials in one population at most. If more than one, only trials of methods without
            populations are trained alone.
        second: What the second loss of a result is of: ``test``, or ``held_out`` images.
        deadline: The time, as ``time.time()``, at which to stop.
        revision: The revision of the code.
    """

    task: Mapping[str, Any]
    device: str
    results: Path
    images: ImageSource
    runs: Path
    together: int = 1
    second: str = "test"
    deadline: float = math.inf
    revision: str = "unknown"

    def store(
        self,
        trial: Trial,
        config: RunConfig,
        curve: Sequence[Metrics],
        data: Dataset,
        *,
        together: int,
        wall: float,
    ) -> None:
        """Append the result of a trial that has ended to the file of results.

        Args:
            trial: The trial.
            config: Its configuration.
            curve: The metrics of all epochs.
            data: The images.
            together: Trials in its population; 1 if it was trained alone.
            wall: Its share of the seconds that they took, with evaluations.
        """
        last = curve[-1].to_dict()
        line = {
            **trial,
            "epoch": last["epoch"],
            "train_loss": last["train_loss"],
            f"{self.second}_loss": last["test_loss"],
            "diverged": last["diverged"],
            "seconds": round(last["seconds"], 2),
            "wall": round(wall, 2),
            "train": [_rounded(row.train_loss) for row in curve],
            self.second: [_rounded(row.test_loss) for row in curve],
            "together": together,
            "config": config.to_dict(),
            "data": data.metadata,
            "environment": environment(config.device),
            "revision": self.revision,
        }
        append_line(self.results, json.dumps(line))


def config_of(trial: Trial, task: Mapping[str, Any], device: str) -> RunConfig:
    """Return the configuration of a trial; its precision is the method's, unless the task has one."""
    own = methods.get(trial["method"]).equal_budgets
    strict = device == "cpu" or (own is not None and own.strict)
    usual = {"precision": "fp32" if strict else "tf32"}
    return RunConfig(
        trial["method"],
        trial["settings"],
        seed=trial["seed"],
        device=device,
        **{**usual, **task},
    )


def jobs_of(
    trials: Sequence[Trial], task: Mapping[str, Any], device: str, members: int
) -> list[Job]:
    """Return the trials in groups that train together, with at most ``members`` in one."""
    groups: dict[Any, Job] = defaultdict(list)
    for number, trial in enumerate(trials):
        config = config_of(trial, task, device)
        if matrix_population.is_supported(config):
            key: Any = (trial["method"],)
        elif population_run.method_of(config) is not None:
            key = (trial["method"], str(population_run.without_numbers(config)))
        else:
            key = (trial["method"], number)
        groups[key].append(trial)
    return [
        group[start : start + members]
        for group in groups.values()
        for start in range(0, len(group), members)
    ]


def has_population(config: RunConfig) -> bool:
    """Return True if trials with such settings can train together."""
    return matrix_population.is_supported(config) or population_run.method_of(config) is not None


def train_job(job: Job, work: Work, watch: Watch = lambda trial, row: None) -> bool:
    """Train the trials of a job and store their results; return False if the time was too short."""
    configs = [config_of(trial, work.task, work.device) for trial in job]
    data = work.images.load(configs[0].dataset)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # steps that are not finite are expected
        if work.together == 1 or not has_population(configs[0]):
            return _train_alone(job[0], configs[0], data, work, watch)
        recorder = Recorder(job, configs, data, work)
        matrix = matrix_population.is_supported(configs[0])
        train = matrix_population.train_together if matrix else population_run.train_together
        train(configs, data, recorder)
    return not recorder.stopped


def _train_alone(trial: Trial, config: RunConfig, data: Dataset, work: Work, watch: Watch) -> bool:
    """Train a trial as a run in a folder, which is removed once the result is stored."""
    folder = work.runs / run_name(trial)
    began, first = time.monotonic(), 0

    def on_resume(checkpoint: Checkpoint) -> None:
        nonlocal first
        first = checkpoint.metrics[-1].epoch

    def on_epoch(row: Metrics) -> None:
        watch(trial, row)
        if time.time() > work.deadline and row.epoch < config.epochs:
            raise OutOfTimeError

    try:
        result = run(config, folder, resume=True, data=data, on_resume=on_resume, on_epoch=on_epoch)
    except OutOfTimeError:
        return False
    last = result.metrics[-1].epoch
    wall = (time.monotonic() - began) * last / max(last - first, 1)
    work.store(trial, config, result.metrics, data, together=1, wall=wall)
    shutil.rmtree(folder)
    return True


def run_name(trial: Trial) -> str:
    """Return the name of the folder of a trial that is trained alone."""
    stage = trial.get("stage") or "trial"
    return f"{trial['method']}-{stage}-{trial['trial']}-seed-{trial['seed']}"


class Recorder:
    """Stores the result of every member that ends, and stops a population that will not finish."""

    def __init__(self, job: Job, configs: list[RunConfig], data: Dataset, work: Work) -> None:
        self._job, self._configs, self._data, self._work = job, configs, data, work
        self._curves: list[list[Metrics]] = [[] for _ in job]
        self._began = self._after_first = time.time()
        self.stopped = False

    def __call__(self, rows: Mapping[int, Metrics]) -> Collection[int]:
        for place, row in rows.items():
            self._curves[place].append(row)
            if row.diverged or row.epoch == self._configs[place].epochs:
                self._work.store(
                    self._job[place],
                    self._configs[place],
                    self._curves[place],
                    self._data,
                    together=len(self._job),
                    wall=(time.time() - self._began) / len(self._job),
                )
        epoch = next(iter(rows.values())).epoch
        if epoch <= 1:  # kernels are compiled in the first one
            self._after_first = time.time()
        self._show(epoch, rows)
        self.stopped = self._is_too_late(epoch, self._configs[0].epochs)
        return list(rows) if self.stopped else ()

    def _is_too_late(self, epoch: int, epochs: int) -> bool:
        left = self._work.deadline - time.time()
        if epoch == epochs or left <= 0:
            return epoch < epochs
        expected = (time.time() - self._after_first) / max(epoch - 1, 1) * (epochs - epoch)
        # Other processes end meanwhile, and the rest goes faster: the estimate has that much room.
        return epoch >= epochs // 10 and 0.6 * expected > left

    def _show(self, epoch: int, rows: Mapping[int, Metrics]) -> None:
        epochs = self._configs[0].epochs
        if epoch % max(epochs // 5, 1) == 0 or epoch == min(3, epochs):
            best = min(row.train_loss if not row.diverged else math.inf for row in rows.values())
            print(
                f"{self._job[0]['method']}: {len(rows)} trials, epoch {epoch}, train loss "
                f"{best:.2f}, {time.time() - self._began:.0f} s",
                flush=True,
            )


def _rounded(loss: float) -> float | None:
    return float(f"{loss:.6g}") if math.isfinite(loss) else None


def in_process(
    next_job: NextJob,
    say: Say = print,
    watch: Watch = lambda trial, row: None,
    on_end: Callable[[], None] = lambda: None,
) -> int:
    """Run jobs in this process, one after the other, until the deadline; return how many failed.

    Args:
        next_job: Returns the next job.
        say: Called with messages about trials that were not trained.
        watch: Called with the metrics of each epoch of a trial that is trained alone.
        on_end: Called whenever a job has ended.
    """
    failed = 0
    while (found := next_job()) is not None:
        job, work = found
        if time.time() >= work.deadline:
            say(f"{job[0]['method']}: not started")
            continue
        try:
            if not train_job(job, work, watch):
                say(f"{job[0]['method']}: stopped, too little time is left")
        except Exception as error:  # the other jobs go on
            failed += 1
            say(f"{job[0]['method']}: failed, {error}")
        on_end()
    return failed


def in_processes(
    next_job: NextJob,
    processes: int,
    deadline: float,
    say: Say = print,
    on_end: Callable[[], None] = lambda: None,
) -> int:
    """Run jobs in several processes at a time until the deadline; return how many failed.

    Ctrl-C and SIGTERM end the processes; trials that are trained alone save a checkpoint first.

    Args:
        next_job: Returns the next job.
        processes: Processes at a time.
        deadline: The time, as ``time.time()``, at which to stop.
        say: Called with messages about trials that were not trained.
        on_end: Called whenever a job has ended.
    """
    context = multiprocessing.get_context("spawn")
    running, failed = list[BaseProcess](), 0
    try:
        while time.time() < deadline + GRACE:
            while len(running) < processes and time.time() < deadline:
                found = next_job()
                if found is None:
                    break
                running.append(context.Process(target=_in_child, args=found, daemon=True))
                running[-1].start()
            if not running:
                break
            left = deadline + GRACE - time.time()
            timeout = None if math.isinf(left) else max(left, 0.0)
            wait([process.sentinel for process in running], timeout=timeout)
            ended = [process for process in running if process.exitcode is not None]
            failed += sum(bool(process.exitcode) for process in ended)
            running = [process for process in running if process not in ended]
            if ended:
                on_end()
    except BaseException:
        for process in running:
            process.terminate()
        for process in running:
            process.join(GRACE)
        raise
    for process in running:
        process.kill()
    while (found := next_job()) is not None:
        say(f"{found[0][0]['method']}: not started")
    return failed


def _in_child(job: Job, work: Work) -> None:
    """Train a job in a process of its own; a failure is shown, and is its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    torch.set_num_threads(1)
    try:
        if not train_job(job, work):
            print(f"{job[0]['method']}: stopped, too little time is left", flush=True)
    except Exception:  # the other jobs go on
        print(f"{job[0]['method']}: failed\n{traceback.format_exc()}", flush=True)
        raise SystemExit(1) from None
