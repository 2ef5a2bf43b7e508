"""Compares optimizers on one task, at equal steps and at equal time: what two examples share.

Settings are chosen by the loss on validation data, which nothing is trained on and no table shows. At
equal time, every method trains, with a schedule of its own, as many steps as fit into the time that
the first method takes; the time of a step is measured beforehand, in turns (``timing.py``).

Every run is one JSON file, written when the run is done. Runs whose file is there are not made again,
so whatever was stopped goes on where it was. One run is in ``training.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import timing
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from training import Record, Run, Settings, Task, finished, perform, shown, write

from torch_locoprop.study.data import safe_files
from torch_locoprop.study.training import machine

SEARCH_SEED = 100  # none of the seeds that are reported


@dataclass
class Comparison:
    """All runs of a task in one folder."""

    task: Task
    device: str
    folder: Path
    methods: Sequence[str]
    seeds: Sequence[int]
    steps: int
    search_steps: int
    processes: int
    deadline: float  # on the clock of time.monotonic
    console: Console

    @property
    def timings_path(self) -> Path:
        return self.folder / "timings.json"

    def searches(self, name: str) -> list[Run]:
        """The runs of a method's search."""
        trials = self.task.methods[name].trials()
        folder = self.folder / "searches"
        return [Run(name, trial, SEARCH_SEED, self.search_steps, folder) for trial in trials]

    def tried(self, name: str) -> list[Record]:
        """What is known of a method's trials, the best first."""
        records = [finished(self.task, run) for run in self.searches(name)]
        known = [record for record in records if record is not None]
        return sorted(known, key=lambda r: r["final"].get("validation loss", math.inf))

    def settings(self, name: str) -> Settings:
        """The best settings that a search has found, or the example's own."""
        tried = [record for record in self.tried(name) if not record["diverged"]]
        best: Settings = tried[0]["settings"] if tried else self.task.methods[name].settings
        return best

    def at_equal_steps(self, name: str) -> list[Run]:
        return self._with_seeds(name, self.steps)

    def at_equal_time(self, name: str, timings: Record) -> list[Run]:
        """Runs that take the time of the first method's steps, by the timings."""
        milliseconds = {each: timings["methods"][each]["ms_per_step"] for each in self.methods}
        budget = self.steps * milliseconds[self.methods[0]]
        return self._with_seeds(name, max(int(budget / milliseconds[name] + 1e-9), 1))

    def _with_seeds(self, name: str, steps: int) -> list[Run]:
        chosen, folder = self.settings(name), self.folder / "runs"
        return [Run(name, chosen, seed, steps, folder) for seed in self.seeds]

    # ---- timing ----

    def timings(self, anew: bool = False) -> Record:
        """Time and memory of a step of each method, with nothing else going on."""
        known, here = self.known_timings(), machine.environment(self.device)
        if known and not anew and all(known[name] == value for name, value in here.items()):
            return known
        length = timing.length(self.steps)
        runs = [
            Run(name, self.settings(name), SEARCH_SEED, length.steps, self.folder)
            for name in self.methods
        ]
        measured = timing.measured(self.task, runs, self.device, length)
        for name, found in measured.items():
            self.console.print(f"{name}: {found['ms_per_step']:.2f} ms a step", highlight=False)
        record = {"task": self.task.description, **here, "steps": length.steps, "methods": measured}
        write(self.timings_path, record)
        return record

    def known_timings(self) -> Record | None:
        """Those in the folder, if of this task and of all methods, and as long as they should be."""
        if not self.timings_path.exists():
            return None
        known: Record = json.loads(self.timings_path.read_text())
        same = known["task"] == self.task.description
        # Files from before timings could be short do not say how long they were.
        long_enough = known.get("steps", math.inf) >= timing.length(self.steps).steps
        all_methods = set(self.methods) <= set(known["methods"])
        return known if same and long_enough and all_methods else None

    # ---- running ----

    def make(self, runs: Sequence[Run], title: str) -> None:
        """Make the runs that are not there yet, several at a time, until the time is up."""
        waiting = [run for run in _distinct(runs) if finished(self.task, run) is None]
        pace = Pace(self.timings() if waiting else {}, self.processes)
        left_out = 0
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
        terminal = self.console.is_terminal
        with (
            Progress(*columns, console=self.console, disable=not terminal) as progress,
            self._pool() as pool,
        ):
            bar = progress.add_task(title, total=len(waiting))
            going: dict[Future[Record], Run] = {}
            while waiting or going:
                while waiting and len(going) < self.processes:
                    run = waiting.pop(0)
                    if time.monotonic() + pace.seconds(run) > self.deadline:
                        left_out += 1
                        continue
                    going[pool.submit(perform, self.task, run, self.device)] = run
                for done in wait(going, return_when=FIRST_COMPLETED).done if going else ():
                    record = done.result()
                    pace.learn(going.pop(done), record)
                    self.console.print(_line(title, record), soft_wrap=True, highlight=False)
                    progress.advance(bar)
        if left_out:
            self.console.print(
                f"{title}: {left_out} runs would have ended after --limit and were not started. "
                "The same command makes them."
            )

    def _pool(self) -> ProcessPoolExecutor | timing.InProcess:
        return timing.InProcess() if self.processes == 1 else timing.processes(self.processes)

    def search(self) -> None:
        """Make all trials of all methods, and say which settings are the best."""
        self.make([run for name in self.methods for run in self.searches(name)], "search")
        for name in self.methods:
            for place, record in enumerate(self.tried(name)):
                edge = self.task.methods[name].at_edge(record["settings"]) if place == 0 else []
                note = f"  the end of the grid: {', '.join(edge)}" if edge else ""
                self.console.print(_line("", record) + note, soft_wrap=True, highlight=False)

    def compare(self) -> None:
        """Make all runs with the best settings: at equal steps, and at equal time."""
        timings = self.timings()
        each = [self.at_equal_steps(name) for name in self.methods]
        each += [self.at_equal_time(name, timings) for name in self.methods]
        # Seed by seed: if the time is up too early, all methods have as many.
        self.make([run for seed in zip(*each, strict=True) for run in seed], self.task.name)

    def table(self) -> str:
        """What has been found, as Markdown."""
        timings = self.known_timings()
        if timings is None:
            raise SystemExit(f"No timings in {self.folder}. Run this without --table first.")
        first, columns = self.methods[0], self.task.shown
        headings = ["method", "settings", "trials"]
        headings += [f"{name}, {self.steps} steps" for name in ("train loss", *columns)]
        headings += [
            "ms a step",
            "MiB",
            f"steps in {first}'s time",
            *(f"{s}, then" for s in columns),
        ]
        lines = [headings, ["---"] * len(headings)]
        for name in self.methods:
            cost, settings = timings["methods"][name], self.settings(name)
            tried, asked = len(self.tried(name)), len(self.searches(name))
            later = self.at_equal_time(name, timings)
            lines.append(
                [
                    name,
                    ", ".join(f"{setting} {shown(value)}" for setting, value in settings.items()),
                    f"{tried} of {asked}" if 0 < tried < asked else str(tried),
                    *(
                        self._over_seeds(self.at_equal_steps(name), s)
                        for s in ("train loss", *columns)
                    ),
                    f"{cost['ms_per_step']:.2f}",
                    f"{cost['memory_mib']:.0f}",
                    str(later[0].steps),
                    *(self._over_seeds(later, s) for s in columns),
                ]
            )
        precision = "bfloat16 autocast" if self.task.bf16 else "TF32 where the machine has it"
        note = (
            f"Mean ± standard deviation over seeds {', '.join(map(str, self.seeds))}; "
            f"{timings['machine']}, {precision}, PyTorch {timings['torch']}. MiB are the "
            "most at a time; trials are those of the search that chose the settings, at another seed."
        )
        return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", note, ""])

    def _over_seeds(self, runs: Sequence[Run], name: str) -> str:
        records = [finished(self.task, run) for run in runs]
        known = [record for record in records if record is not None]
        if not known:
            return "–"
        if any(record["diverged"] for record in known):
            return "diverged"
        values = [record["final"][name] for record in known]
        percent, digits, unit = (100, 2, " %") if "accuracy" in name else (1, 4, "")
        mean = f"{percent * statistics.mean(values):.{digits}f}"
        spread = f" ± {percent * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        missing = f" ({len(known)} of {len(runs)} seeds)" if len(known) < len(runs) else ""
        return f"{mean}{spread}{unit}{missing}"


class Pace:
    """How long runs take when several share the machine, to end before a limit."""

    def __init__(self, timings: Record, processes: int) -> None:
        self._alone = {
            name: found["ms_per_step"] / 1000 for name, found in timings.get("methods", {}).items()
        }
        self._slower = float(processes)  # as if they took turns, until there is something to go by
        self._learned = False

    def seconds(self, run: Run) -> float:
        """An estimate, with a margin for starting and evaluating."""
        return 1.3 * self._slower * self._alone[run.method] * run.steps + 10

    def learn(self, run: Run, record: Record) -> None:
        """A run has ended."""
        now = record["ms_per_step"] / 1000 / self._alone[run.method]
        self._slower = max(now, self._slower) if self._learned else now
        self._learned = True


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """Each once: at equal time, the first method makes the steps it makes anyway."""
    return list({run.path: run for run in runs}.values())


def _line(title: str, record: Record) -> str:
    settings = " ".join(f"{name}={shown(value)}" for name, value in record["settings"].items())
    final = ", ".join(
        f"{name} {value:.4f}" for name, value in record["final"].items() if name != "step"
    )
    found = f"diverged in step {record['final']['step']}" if record["diverged"] else final
    head = f"{title}  " if title else ""
    return (
        f"{head}{record['method']} {settings} seed={record['seed']} steps={record['steps']}: {found}, "
        f"{record['seconds']:.1f} s"
    )


# ---- the command line ---------------------------------------------------------------------------


def parser(description: str | None, steps: int) -> argparse.ArgumentParser:
    """Options that all comparisons have."""
    own = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    phase = own.add_mutually_exclusive_group()
    phase.add_argument(
        "--search", action="store_true", help="try each method's grid of settings, at one seed"
    )
    phase.add_argument(
        "--time", action="store_true", help="measure the time of a step of each method anew"
    )
    phase.add_argument(
        "--table", action="store_true", help="make the table of what is there, train nothing"
    )
    own.add_argument("--steps", type=count, default=steps, help=f"of training (default: {steps})")
    own.add_argument("--search-steps", type=count, help="of a search's runs (default: --steps)")
    own.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    own.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="some of them; the first sets the time"
    )
    own.add_argument("--processes", type=count, default=1, help="runs at a time (default: 1)")
    own.add_argument(
        "--limit", type=float, default=math.inf, metavar="SECONDS",
        help="start no run that would end later than so long after the start",
    )  # fmt: skip
    own.add_argument("--bf16", action="store_true", help="forward passes in bfloat16 autocast")
    own.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    own.add_argument("--out", type=Path, help="folder of the results (default: results/examples/…)")
    return own


def count(text: str) -> int:
    """A number of one or more, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def main(task: Task, options: argparse.Namespace) -> None:
    """Do what the options ask for; without any, compare, and show the table."""
    names = options.methods or list(task.methods)
    for name in names:
        if name not in task.methods:
            raise SystemExit(f"Invalid method {name!r}. Must be one of {', '.join(task.methods)}.")
    if not options.table:
        check_device(options.device)
        task.load(torch.device("cpu"))  # what is missing is said once, not by every process
    comparison = Comparison(
        task,
        options.device,
        options.out or Path("results/examples") / task.name,
        names,
        options.seeds,
        options.steps,
        options.search_steps or options.steps,
        options.processes,
        time.monotonic() + options.limit,
        Console(),
    )
    if options.time:
        comparison.timings(anew=True)
        return
    if options.search:
        comparison.search()
        return
    if not options.table:
        comparison.compare()
    text = comparison.table()
    path = comparison.folder / "table.md"
    safe_files.replace(path, lambda file: file.write(text.encode()))
    comparison.console.print(text, soft_wrap=True, highlight=False, markup=False)


def check_device(device: str) -> None:
    """End with a line for people if tensors cannot be made there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch has no CUDA at all
        reason = str(error).partition("\n")[0]
        raise SystemExit(
            f"Device {device!r} cannot be used ({reason}). Choose another with --device, such as cpu."
        ) from error
