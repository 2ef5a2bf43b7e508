"""Train the seeds that are missing beside the runs with seed 0 in a folder of results.

    python -m benchmarks.more_seeds --tasks mnist-tanh-deep --methods muon adam --plan
    python -m benchmarks.more_seeds --tasks mnist-tanh-deep --methods muon adam --jobs 4 --minutes 9

A method is the name of a run, such as muon for TASK/muon-s0, whose `config.json` has the configuration.
`--like kfac@10=kfac@100` is for tasks without kfac@10-s0: there it has the settings of kfac@100-s0, and
seed 0 is missing too.

The missing seeds of a configuration train together as a population, if the method has one, and else one
by one, with checkpoints in `runs/more-seeds` from which the next call continues. Methods are started in
the order in which they are given, and the longest job of each method first. A job is started only if,
by its estimate, it ends within `--minutes`. Only finished runs are written, each with all its files at
once. A run that exists is neither trained again nor changed.

Losses of a member of a population are those of a run alone up to rounding, except with SOAP (see
`torch_locoprop.study.training.matrix_population`). Seconds and memory are not: `config.json` has the
number of members as `population`. No package besides torch is needed.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.results_table import IMAGES
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.equal_budgets import workers
from torch_locoprop.study.equal_budgets.trials import Trial
from torch_locoprop.study.equal_budgets.workers import Job, Work, has_population
from torch_locoprop.study.figures.images import Images
from torch_locoprop.study.figures.run_library import GraphClock
from torch_locoprop.study.machine import environment, revision
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import POPULATION, Metrics, RunFolder

CLOCK = Path(__file__).parents[1] / "results" / "timings" / "cuda-graphs.json"
TIMED_AS = {"adam": "adamw", "rmsprop": "adamw"}
"""Methods that the clock lacks, and those that take about as long."""

PER_MEMBER = 3.0
"""Seconds of a population over those of one run by the clock, for each member.

Not measured for these populations. Those in `results/equal-budgets`, on the standard model and several
at a time, took 1.2 to 3.4, and those of two members 2.5 to 2.9.
"""

START = 20.0
"""Seconds in which a process starts, loads the images and compiles kernels: a guess."""

UNFINISHED = Path("runs") / "more-seeds"
"""The folder for runs that train alone."""


@dataclass(frozen=True)
class Source:
    """The configuration of a method on a task, and the run that it is from.

    Args:
        task: The folder of the task.
        method: The name of its runs, without the seed.
        config: The configuration; its seed does not matter.
        run: The run with seed 0, or that of another method with the same settings.
    """

    task: Path
    method: str
    config: RunConfig
    run: RunFolder

    def folder(self, seed: int) -> Path:
        """Return the folder of the run with a seed."""
        return self.task / f"{self.method}-s{seed}"

    def seconds(self, members: int) -> tuple[float, str]:
        """Return an estimate for so many seeds, and what it is from.

        What the clock lacks is taken to need as long as the run with seed 0.
        """
        timed_as = TIMED_AS.get(self.config.method, self.config.method)
        config = replace(self.config, method=timed_as, settings={})
        epoch = GraphClock.read(CLOCK).seconds(config, IMAGES)
        if epoch is None:
            return START + max((row.seconds for row in self.run.metrics()), default=0.0), "seed 0"
        return START + PER_MEMBER * members * config.epochs * epoch, "clock"

    def check_images(self, data: Dataset) -> None:
        """Exit unless these are the images of the run."""
        there = self.run.description()["data"]["fingerprint"]
        if there != data.fingerprint:
            raise SystemExit(
                f"{self.run.path} was trained on other images of {data.name}: their fingerprint is "
                f"{there} there and {data.fingerprint} here. Set --data-dir to the folder with its "
                "images."
            )


def source_of(task: Path, method: str, like: Mapping[str, str]) -> Source | None:
    """Return the source of a method on a task, or None if there is no run.

    Args:
        task: The folder of the task.
        method: The name of its runs.
        like: Other methods whose settings count where there is no run with seed 0.
    """
    run = RunFolder(task / f"{method}-s0")
    if run.exists:
        return Source(task, method, run.config(), run)
    run = RunFolder(task / f"{like.get(method, method)}-s0")
    if not run.exists:
        return None
    config = run.config()
    settings = {name: value for name, value in config.settings.items() if name != "every"}
    return Source(task, method, replace(config, method=method, settings=settings), run)


@dataclass(frozen=True)
class RunWriter(Work):
    """Stores each trial that has ended as a run; `results` is the folder of the task."""

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
        """Write the files of the run elsewhere, and move them to their place all at once."""
        population = {POPULATION: together} if has_population(config) else {}
        description = {
            "config": config.to_dict(),
            "data": data.metadata,
            "environment": {**environment(config.device), **population},
            "revision": self.revision,
        }
        with tempfile.TemporaryDirectory(prefix=".", dir=self.results) as place:
            files = RunFolder(Path(place) / trial["run"])
            files.begin(description)
            files.write_metrics(curve)
            files.path.rename(self.results / trial["run"])  # an error if there is a run
        say(f"{self.results / trial['run']}: train loss {curve[-1].train_loss:.2f}")


@dataclass(frozen=True)
class Planned:
    """A job and its estimate.

    Args:
        job: Trials of one configuration that differ in their seeds.
        work: How they are trained.
        seconds: An estimate of the seconds.
        by: What the estimate is from.
    """

    job: Job
    work: Work
    seconds: float
    by: str

    def __str__(self) -> str:
        runs = ", ".join(trial["run"] for trial in self.job)
        return f"{self.work.results.name}: {runs}, about {self.seconds:.0f} s (by {self.by})"

    @property
    def missing(self) -> int:
        """The number of runs that are not there yet."""
        return sum(not (self.work.results / trial["run"]).exists() for trial in self.job)


def planned_of(source: Source, options: argparse.Namespace) -> list[Planned]:
    """Return the jobs for the seeds of a configuration that are missing."""
    config = source.config
    trials = [
        {
            "method": config.method,
            "trial": 0,
            "seed": seed,
            "settings": config.settings,
            "run": source.folder(seed).name,
        }
        for seed in options.seeds
        if not source.folder(seed).exists()
    ]
    of_method = ("method", "settings", "seed", "device")
    task = {name: value for name, value in config.to_dict().items() if name not in of_method}
    work = RunWriter(
        task,
        config.device,
        source.task,
        Images(options.data_dir),
        UNFINISHED / source.task.name / source.method,
        together=len(options.seeds) + 1,  # one seed is a population too: SOAP has no other way
        deadline=options.deadline,
        revision=options.revision,
    )
    if trials and not options.plan:
        source.check_images(work.images.load(config.dataset))
    jobs = workers.jobs_of(trials, task, config.device, options.together)
    return [Planned(job, work, *source.seconds(len(job))) for job in jobs]


def plan(options: argparse.Namespace) -> list[Planned]:
    """Return the jobs in the order of the methods, and of each method the longest first."""
    found = []
    for method in options.methods:
        own: list[Planned] = []
        for task in (options.runs / name for name in options.tasks):
            source = source_of(task, method, options.like)
            if source is None:
                say(f"{task.name}: {method} is left out, as it has no run with seed 0")
            else:
                own += planned_of(source, options)
        found += sorted(own, key=lambda each: -each.seconds)
    return found


class Waiting:
    """The jobs that are not started yet, in their order."""

    def __init__(self, planned: Sequence[Planned], deadline: float) -> None:
        self.left, self._deadline = list(planned), deadline

    def next(self) -> tuple[Job, Work] | None:
        """Return the first job that, by its estimate, ends before the deadline; None without one."""
        seconds = self._deadline - time.time()
        fitting = next((each for each in self.left if each.seconds <= seconds), None)
        if fitting is None:
            return None
        self.left.remove(fitting)
        return fitting.job, fitting.work


def say(text: str) -> None:
    print(text, flush=True)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("results"), help="folder of the tasks")
    parser.add_argument("--tasks", nargs="+", required=True, help="folders of runs in it")
    parser.add_argument("--methods", nargs="+", required=True, help="the first is started first")
    parser.add_argument("--like", nargs="+", default=[], metavar="METHOD=OTHER")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--together", type=int, default=12, help="seeds in one population")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which it stops")
    parser.add_argument("--data-dir", type=Path, help="folder with the data sets")
    parser.add_argument("--revision", default=revision(), help="of the code; by default git's")
    parser.add_argument("--plan", action="store_true", help="print what is missing; train nothing")
    options = parser.parse_args(arguments)
    absent = [name for name in options.tasks if not (options.runs / name).is_dir()]
    if absent:
        parser.error(f"{options.runs} has no {' and no '.join(absent)}")
    options.deadline = time.time() + 60 * options.minutes
    options.like = dict(each.split("=", 1) for each in options.like)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    planned = plan(options)
    for each in planned:
        say(str(each))
    count = sum(each.missing for each in planned)
    minutes = sum(each.seconds for each in planned) / options.jobs / 60
    say(
        f"{count} runs are missing: about {minutes:.1f} minutes with {options.jobs} jobs at a time."
    )
    if options.plan:
        return
    waiting = Waiting(planned, options.deadline)
    if options.jobs == 1:
        failed = workers.in_process(waiting.next, say)
    else:
        failed = workers.in_processes(waiting.next, options.jobs, options.deadline, say)
    for each in waiting.left:
        say(f"not started: {each}")
    say(f"{sum(each.missing for each in planned)} of {count} runs are still missing.")
    if failed:
        raise SystemExit(f"Failed jobs: {failed}. See the messages above.")


if __name__ == "__main__":
    main()
