"""Tune every method with the same number of trials, and print the outcome as a table.

    python -m benchmarks.equal_budgets draw                       # settings, 12 trials a method
    python -m benchmarks.equal_budgets run --minutes 9 --processes 4
    python -m benchmarks.equal_budgets draw --around              # 12 more around each method's best
    python -m benchmarks.equal_budgets draw --winners 1 2         # the best trial at other seeds
    python -m benchmarks.equal_budgets table

The folder `results/equal-budgets/standard` has `trials.json`, the task, the spaces and all settings,
and `results.jsonl`, a line for every trial that has ended. `run` takes the trials without a line. The
settings of all methods come from one sampler (a scrambled Sobol sequence with a fixed seed) over the
spaces of `torch_locoprop.study.tuning.spaces`. Every trial has the full length; none is pruned.

The trials of a method train together as a population. Losses are those of runs alone up to rounding,
except with SOAP (see `matrix_population`).
Seconds are a trial's share of its population's time, on a GPU that several populations share.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.equal_budgets_table import table
from benchmarks.equal_budgets_trials import (
    FOLDER,
    Trial,
    add_trials,
    around,
    draw,
    is_pending,
    read_results,
    read_trials,
    winners,
)
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import environment
from torch_locoprop.study.training import matrix_population, population_run
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import Metrics

METHODS = (
    "muon",
    "soap",
    "locoprop-m",
    "locoprop-s",
    "exact-s-muon",
    "kfac@10",
    "rmsprop",
    "adam",
    "shampoo@100",
    "momentum",
    "adagrad",
    "sgd",
)
"""The methods compared, in the order in which `run` starts them."""

STRICT = ("kfac@10", "shampoo@100")
"""Methods whose matrix products are in strict float32 on a GPU, as in the other results."""

GRACE = 15.0
"""Seconds after the deadline in which a process may finish its epoch before it is killed."""


@dataclass(frozen=True)
class Limits:
    """What a process has to know besides its trials."""

    out: Path
    deadline: float  # of time.time()
    revision: str
    images: int | None  # of the training set, for tests


def config_of(trial: Trial, task: Mapping[str, Any], device: str) -> RunConfig:
    """Return the configuration of a trial."""
    strict = device == "cpu" or trial["method"] in STRICT
    return RunConfig(
        trial["method"],
        trial["settings"],
        seed=trial["seed"],
        precision="fp32" if strict else "tf32",
        device=device,
        **task,
    )


def jobs_of(
    trials: list[Trial], task: Mapping[str, Any], device: str, members: int
) -> list[list[Trial]]:
    """Return the trials in groups that train together, at most so many in one."""
    groups: dict[Any, list[Trial]] = defaultdict(list)
    for trial in trials:
        matrix = matrix_population.is_supported(config_of(trial, task, device))
        groups[trial["method"], None if matrix else trial["seed"]].append(trial)
    return [
        group[start : start + members]
        for group in groups.values()
        for start in range(0, len(group), members)
    ]


def load(name: str, images: int | None) -> Dataset:
    """Return the data set, or the first images of it."""
    data = datasets.load(name, download=False)
    if images is None:
        return data
    return Dataset(data.name, data.train[:images], data.test[:images], f"first {images} images")


class Recorder:
    """Writes a line for every trial that ends, and stops a population that will not finish."""

    def __init__(
        self, job: list[Trial], configs: list[RunConfig], data: Dataset, limits: Limits
    ) -> None:
        self._job, self._configs, self._limits = job, configs, limits
        self._curves: list[list[Metrics]] = [[] for _ in job]
        self._origin = {
            "data": data.metadata,
            "environment": environment(configs[0].device),
            "revision": limits.revision,
        }
        self._began = self._after_first = time.time()
        self.stopped = False

    def __call__(self, rows: Mapping[int, Metrics]) -> Collection[int]:
        for place, row in rows.items():
            self._curves[place].append(row)
            if row.diverged or row.epoch == self._configs[place].epochs:
                self._write(place)
        epoch = next(iter(rows.values())).epoch
        if epoch <= 1:  # kernels are compiled in the first one
            self._after_first = time.time()
        self._show(epoch, rows)
        self.stopped = self._is_too_late(epoch, self._configs[0].epochs)
        return list(rows) if self.stopped else ()

    def _is_too_late(self, epoch: int, epochs: int) -> bool:
        left = self._limits.deadline - time.time()
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

    def _write(self, place: int) -> None:
        trial, curve = self._job[place], self._curves[place]
        last = curve[-1]
        line = {
            **trial,
            **{name: last.to_dict()[name] for name in ("epoch", "train_loss", "test_loss")},
            "diverged": last.diverged,
            "seconds": round(last.seconds, 2),
            "train": [_rounded(row.train_loss) for row in curve],
            "test": [_rounded(row.test_loss) for row in curve],
            "together": len(self._job),
            "config": self._configs[place].to_dict(),
            **self._origin,
        }
        text = json.dumps(line) + "\n"
        file = os.open(self._limits.out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, text.encode())  # in one call: lines of other processes stay whole
        finally:
            os.close(file)


def _rounded(loss: float) -> float | None:
    return float(f"{loss:.6g}") if math.isfinite(loss) else None


def work(job: list[Trial], task: Mapping[str, Any], device: str, limits: Limits) -> None:
    """Train the trials of a job together, in a process of its own."""
    warnings.simplefilter("ignore", UserWarning)  # of steps that are not finite: expected
    torch.set_num_threads(1)
    try:
        configs = [config_of(trial, task, device) for trial in job]
        data = load(configs[0].dataset, limits.images)
        recorder = Recorder(job, configs, data, limits)
        matrix = matrix_population.is_supported(configs[0])
        train = matrix_population.train_together if matrix else population_run.train_together
        train(configs, data, recorder)
        if recorder.stopped:
            print(f"{job[0]['method']}: stopped, too little time is left", flush=True)
    except Exception:  # the other jobs go on
        print(f"{job[0]['method']}: failed\n{traceback.format_exc()}", flush=True)
        raise SystemExit(1) from None


def run(
    jobs: list[list[Trial]], task: Mapping[str, Any], device: str, processes: int, limits: Limits
) -> int:
    """Run the jobs in so many processes at a time, until all are done or the time is over.

    Returns the number of jobs that failed.
    """
    context = multiprocessing.get_context("spawn")
    waiting, running, failed = list(jobs), list[BaseProcess](), 0
    while (waiting or running) and time.time() < limits.deadline + GRACE:
        while waiting and len(running) < processes and time.time() < limits.deadline:
            arguments = (waiting.pop(0), task, device, limits)
            running.append(context.Process(target=work, args=arguments, daemon=True))
            running[-1].start()
        if not running:
            break
        left = limits.deadline + GRACE - time.time()
        wait([process.sentinel for process in running], timeout=max(left, 0.0))
        failed += sum(bool(process.exitcode) for process in running)
        running = [process for process in running if process.exitcode is None]
    for process in running:
        process.kill()
    for job in waiting:
        print(f"{job[0]['method']}: not started", flush=True)
    return failed


def _revision() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="add trials to trials.json")
    drawing.add_argument("--trials", type=int, default=12, help="of each method")
    drawing.add_argument("--around", action="store_true", help="around the best trials so far")
    drawing.add_argument("--winners", type=int, nargs="+", metavar="SEED", help="at these seeds")
    running = commands.add_parser("run", help="train the trials that have no result yet")
    running.add_argument("--processes", type=int, default=4, help="at a time")
    running.add_argument("--members", type=int, default=12, help="trials that train together")
    running.add_argument("--minutes", type=float, default=60.0, help="after which it stops")
    running.add_argument("--out", type=Path, help="folder for results.jsonl instead of the first")
    running.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    running.add_argument("--model", help="another model, to try the command")
    running.add_argument("--epochs", type=int, help="fewer epochs, to try the command")
    running.add_argument("--limit", type=int, help="fewer images, to try the command")
    running.add_argument("--revision", help="of the code; that of git unless given")
    showing = commands.add_parser("table", help="print the outcome as Markdown")
    for command in (drawing, showing):
        command.add_argument("--first", type=int, help="look at so many trials of each method only")
    for command in (drawing, running, showing):
        command.add_argument("--folder", type=Path, default=FOLDER)
        command.add_argument("--methods", nargs="+", default=list(METHODS))
    return parser


def _run(options: argparse.Namespace, began: float) -> None:
    content = read_trials(options.folder)
    out = (options.out or options.folder) / "results.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    done = read_results(options.folder / "results.jsonl") + read_results(out)
    trials = [
        trial
        for method in options.methods
        for trial in content["trials"]
        if trial["method"] == method and is_pending(trial, done)
    ]
    given = {"model": options.model, "epochs": options.epochs}
    task = content["task"] | {name: value for name, value in given.items() if value is not None}
    revision = options.revision or _revision()
    limits = Limits(out, began + 60 * options.minutes, revision, options.limit)
    jobs = jobs_of(trials, task, options.device, options.members)
    failed = run(jobs, task, options.device, options.processes, limits)
    left = [trial for trial in trials if is_pending(trial, read_results(out))]
    print(f"{len(trials) - len(left)} trials ended, {len(left)} are left.", flush=True)
    if failed:
        raise SystemExit(f"{failed} of {len(jobs)} populations failed. See the messages above.")


def main(arguments: list[str] | None = None) -> None:
    began = time.time()
    options = _parser().parse_args(arguments)
    if options.command == "run":
        _run(options, began)
        return
    results = [
        line
        for line in read_results(options.folder / "results.jsonl")
        if options.first is None or line["trial"] < options.first
    ]
    if options.command == "table":
        print(table(read_trials(options.folder), results))
    elif options.around or options.winners:
        content = read_trials(options.folder)
        for method in options.methods:
            if not any(line["method"] == method and not line["diverged"] for line in results):
                print(f"{method}: no trial has come to its end yet")
            elif options.winners:
                found = winners(content, results, method, options.winners)
                add_trials(options.folder, content, found)
            else:
                found = around(content, results, method, options.trials)
                add_trials(options.folder, content, found)
    else:
        draw(options.folder, options.methods, options.trials)


if __name__ == "__main__":
    main()
