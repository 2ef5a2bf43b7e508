"""Compare optimizers on one task, at equal steps and at equal time.

Settings are chosen by the loss on validation data, which is not used for training and not shown in
the table. At equal time, every method takes as many steps as fit into the time of the first method's
run, with a schedule of that length. The time of a step is measured before (`timing.py`).

Every run writes one JSON file when it is finished. A run whose file exists is not repeated, so the
same command continues an interrupted comparison. `training.py` makes one run.

Methods can be added later. Their time of a step is measured together with the first method's once more,
because the host's speed changes between measurements.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import timing
import torch
from arguments import count
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from training import Record, Run, Settings, Task, finished, perform, shown, write

from torch_locoprop.study import atomic_files, machine

SEARCH_SEED = 100  # differs from the seeds in the table
TIMINGS = "timings.json"
# In the times of a method that was measured later: the first method's time of a step in the same turns.
BESIDE = "first_ms_per_step"


@dataclass
class Comparison:
    """All runs of a task in one folder.

    Args:
        task: what to train.
        device: where to train.
        folder: folder of all results.
        methods: names of the methods; the first one's time is the time of all at equal time.
        seeds: seeds of the runs in the table.
        steps: steps of a run at equal steps.
        search_steps: steps of a run of the search.
        processes: runs at the same time. Those that are started end with the `with` block.
        deadline: no run is started that would end later, by `time.monotonic()`.
        console: where messages are printed.
    """

    task: Task
    device: str
    folder: Path
    methods: Sequence[str]
    seeds: Sequence[int]
    steps: int
    search_steps: int
    processes: int
    deadline: float
    console: Console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        if "_pool" in vars(self):
            self._pool.__exit__(*exception)

    @property
    def timings_path(self) -> Path:
        return self.folder / TIMINGS

    @property
    def length(self) -> timing.Length:
        """The length of the measurement of a step's time."""
        return timing.length(self.steps)

    def searches(self, name: str) -> list[Run]:
        """Return the runs of a method's search."""
        trials = self.task.methods[name].trials()
        folder = self.folder / "searches"
        return [Run(name, trial, SEARCH_SEED, self.search_steps, folder) for trial in trials]

    def tried(self, name: str) -> list[Record]:
        """Return the results of a method's finished trials, the best first."""
        records = [finished(self.task, run) for run in self.searches(name)]
        known = [record for record in records if record is not None]
        return sorted(known, key=lambda r: r["final"].get("validation loss", math.inf))

    def settings(self, name: str) -> Settings:
        """Return the best settings of the search, or the defaults if there was none."""
        tried = [record for record in self.tried(name) if not record["diverged"]]
        best: Settings = tried[0]["settings"] if tried else self.task.methods[name].settings
        return best

    def at_equal_steps(self, name: str) -> list[Run]:
        return self._with_seeds(name, self.steps)

    def at_equal_time(self, name: str, timings: Record) -> list[Run]:
        """Return the runs that take as long as the first method's, by the measured times."""
        own, first = (timings["methods"][each] for each in (name, self.methods[0]))
        budget = self.steps * own.get(BESIDE, first["ms_per_step"])
        return self._with_seeds(name, max(int(budget / own["ms_per_step"] + 1e-9), 1))

    def _with_seeds(self, name: str, steps: int) -> list[Run]:
        chosen, folder = self.settings(name), self.folder / "runs"
        return [Run(name, chosen, seed, steps, folder) for seed in self.seeds]

    # ---- timing ----

    def timings(self, again: bool = False) -> Record:
        """Return the time and memory of a step of each method; measure those that are unknown.

        Args:
            again: measure all methods, even if the folder has measurements of this machine.
        """
        here = machine.environment(self.device)
        known = self._usable()
        if known and any(known[name] != value for name, value in here.items()):
            known = None
        before = known["methods"] if known else {}
        wanted = [name for name in self.methods if again or name not in before]
        if known and not wanted:
            return known
        length, first = self.length, self.methods[0]
        runs = [
            Run(name, self.settings(name), SEARCH_SEED, length.steps, self.folder)
            for name in dict.fromkeys([first, *wanted])
        ]
        methods = dict(timing.measured(self.task, runs, self.device, length))
        for name, found in methods.items():
            self.console.print(f"{name}: {found['ms_per_step']:.2f} ms a step", highlight=False)
        if not set(before) <= set(methods):  # the times of other methods are from other turns
            beside = {BESIDE: methods.pop(first)["ms_per_step"]}
            methods = before | {name: {**found, **beside} for name, found in methods.items()}
        record = {"task": self.task.description, **here, "steps": length.steps, "methods": methods}
        write(self.timings_path, record)
        return record

    def known_timings(self) -> Record | None:
        """Return the measurements in the folder, or None if there are none that can be used.

        They must be of this task, contain all methods, and be as long as `steps` requires.
        """
        known = self._usable()
        return known if known and set(self.methods) <= set(known["methods"]) else None

    def _usable(self) -> Record | None:
        """Return the measurements of this task that are long enough, of any methods, or None."""
        known = timings_in(self.folder)
        if known is None:
            return None
        same = known["task"] == self.task.description
        # Older files have no "steps": their measurements had the full length.
        long_enough = known.get("steps", math.inf) >= self.length.steps
        return known if same and long_enough else None

    # ---- running ----

    def make(self, runs: Sequence[Run], title: str) -> None:
        """Make the runs that are not finished yet, unless they would end after the deadline.

        A run that takes longer than estimated is stopped at the deadline, without a result.
        """
        waiting = [run for run in _distinct(runs) if finished(self.task, run) is None]
        together = min(self.processes, len(waiting))
        measured = (self._usable() or {}).get("methods", {})
        self._pace.alone = {name: found["ms_per_step"] / 1000 for name, found in measured.items()}
        left_out, stopped = 0, 0
        until = time.time() + self.deadline - time.monotonic()  # on the clock of other processes
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
        terminal = self.console.is_terminal
        with Progress(*columns, console=self.console, disable=not terminal) as progress:
            bar = progress.add_task(title, total=len(waiting))
            going: dict[Future[Record | None], Run] = {}
            while waiting or going:
                while waiting and len(going) < self.processes:
                    run = waiting.pop(0)
                    if time.monotonic() + self._pace.seconds(run, together) > self.deadline:
                        left_out += 1
                        continue
                    going[self._pool.submit(perform, self.task, run, self.device, until)] = run
                for done in wait(going, return_when=FIRST_COMPLETED).done if going else ():
                    run, record = going.pop(done), done.result()
                    if record is None:
                        stopped += 1
                        continue
                    self._pace.learn(run, record, together)
                    self.console.print(_line(title, record), soft_wrap=True, highlight=False)
                    progress.advance(bar)
        if left_out or stopped:
            self.console.print(
                f"{title}: {left_out} runs would have ended after the time limit and were not started; "
                f"stopped at the limit: {stopped}. Run the same command again to make them.",
                soft_wrap=True,
            )

    @cached_property
    def _pace(self) -> Pace:
        return Pace()

    @cached_property
    def _pool(self) -> ProcessPoolExecutor | timing.InProcess:
        """The processes of all runs: they start once, and end with the `with` block."""
        return timing.InProcess() if self.processes == 1 else timing.processes(self.processes)

    def search(self) -> None:
        """Make all trials of all methods, and print them with the best first."""
        self.make([run for name in self.methods for run in self.searches(name)], "search")
        for name in self.methods:
            for place, record in enumerate(self.tried(name)):
                edge = self.task.methods[name].at_edge(record["settings"]) if place == 0 else []
                note = f"  at the edge of the grid: {', '.join(edge)}" if edge else ""
                self.console.print(_line("", record) + note, soft_wrap=True, highlight=False)

    def search_and_compare(self) -> None:
        """Make all trials, then the runs of the methods whose trials are all finished.

        Raises:
            SystemExit: trials of the first method are missing, so its time is not known.
        """
        self.search()
        first, every = self.methods[0], self.methods
        self.methods = [name for name in every if len(self.tried(name)) == len(self.searches(name))]
        if first not in self.methods:
            raise SystemExit(f"Trials of {first} are missing. Run the same command again.")
        for name in every:
            if name not in self.methods:
                self.console.print(f"{name} is left out: some of its trials are missing.")
        self.compare()

    def compare(self) -> None:
        """Make all runs with the best settings, at equal steps and at equal time."""
        timings = self.timings()
        each = [self.at_equal_steps(name) for name in self.methods]
        each += [self.at_equal_time(name, timings) for name in self.methods]
        # Seed by seed: if the deadline comes first, all methods have the same number of seeds.
        self.make([run for seed in zip(*each, strict=True) for run in seed], self.task.name)

    def table(self) -> str:
        """Return the results as a Markdown table."""
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
            *(f"{s}, equal time" for s in columns),
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
                    f"{cost['ms_per_step']:.2f}"
                    + (f" ({first} {cost[BESIDE]:.2f})" if BESIDE in cost else ""),
                    f"{cost['memory_mib']:.0f}",
                    str(later[0].steps),
                    *(self._over_seeds(later, s) for s in columns),
                ]
            )
        precision = "bfloat16 autocast" if self.task.bf16 else "TF32 if available"
        note = (
            f"Mean ± standard deviation over seeds {', '.join(map(str, self.seeds))}; "
            f"{timings['machine']}, {precision}, PyTorch {timings['torch']}. MiB: peak memory. "
            "Trials: runs of the search that chose the settings, with another seed."
        )
        return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", note, ""])

    def show_table(self) -> None:
        """Print the table and write it to `table.md`."""
        text = self.table()
        atomic_files.write(self.folder / "table.md", text)
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

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


def timings_in(folder: Path) -> Record | None:
    """Return the measurements in a folder, or None if there are none."""
    path = folder / TIMINGS
    if not path.exists():
        return None
    known: Record = json.loads(path.read_text())
    return known


class Pace:
    """An estimate of how long runs take when several run at the same time.

    Of a method without a measured time, nothing is known until the first of its runs is finished.
    """

    def __init__(self) -> None:
        self.alone: dict[str, float] = {}  # seconds of a step, alone on the machine
        self._shares: dict[str, float] = {}  # seconds of a step over the runs at the same time

    def seconds(self, run: Run, together: int) -> float:
        """Return the estimated seconds of a run, with a margin for its start and evaluations.

        Args:
            run: the run.
            together: runs at the same time. They share the machine, until it is known better.
        """
        alone = self.alone.get(run.method, 0.0)
        each = max(alone, self._shares.get(run.method, alone) * together)
        return 1.3 * each * run.steps + 10

    def learn(self, run: Run, record: Record, together: int) -> None:
        """Update the estimate from a finished run."""
        share = record["ms_per_step"] / 1000 / together
        self._shares[run.method] = max(self._shares.get(run.method, 0.0), share)


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """Drop repeated runs: the first method's runs at equal time are those at equal steps."""
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
    """Return a parser with the options of a comparison at equal steps and at equal time.

    Args:
        description: text of `--help`.
        steps: default of `--steps`.
    """
    own = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shared_options(own, steps)
    phase = own.add_mutually_exclusive_group()
    phase.add_argument(
        "--search", action="store_true", help="try all settings of each method's grids"
    )
    phase.add_argument(
        "--all",
        action="store_true",
        help="search, then train the methods whose trials are all finished, and print the table",
    )
    phase.add_argument(
        "--time", action="store_true", help="measure the time of a step of each method again"
    )
    phase.add_argument(
        "--table", action="store_true", help="print the table of finished runs without training"
    )
    own.add_argument("--search-steps", type=count, help="steps of a trial (default: --steps)")
    own.add_argument(
        "--limit", type=float, default=math.inf, metavar="SECONDS",
        help="do not start a run that would end more than this many seconds from now",
    )  # fmt: skip
    own.add_argument(
        "--bf16", action="store_true", help="compute forward passes in bfloat16 autocast"
    )
    return own


def add_shared_options(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add the options that all comparisons have.

    Args:
        parser: where they are added.
        steps: default of `--steps`.
    """
    parser.add_argument(
        "--steps", type=count, default=steps, help=f"training steps (default: {steps})"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="default: all; the others are compared with the first",
    )
    parser.add_argument(
        "--processes", type=count, default=1, help="runs at the same time (default: 1)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--out", type=Path, help="folder of results (default: results/examples/TASK)"
    )


def main(task: Task, options: argparse.Namespace) -> None:
    """Search, measure, or compare and print the table, as the options say."""
    folder = options.out or Path("results/examples") / task.name
    names = options.methods or list(task.methods)
    if options.table and not options.methods:  # of those that have been compared
        compared = (timings_in(folder) or {}).get("methods", names)
        names = [name for name in names if name in compared]
    check_methods(task.methods, names)
    if not options.table:
        check_device(options.device)
        task.load(torch.device("cpu"))  # report missing data here, once, and not in every process
    comparison = Comparison(
        task,
        options.device,
        folder,
        names,
        options.seeds,
        options.steps,
        options.search_steps or options.steps,
        options.processes,
        time.monotonic() + options.limit,
        Console(),
    )
    with comparison:
        if options.time:
            comparison.timings(again=True)
        elif options.search:
            comparison.search()
        elif options.all:
            comparison.search_and_compare()
        elif not options.table:
            comparison.compare()
    if not (options.time or options.search):
        comparison.show_table()


def check_methods(known: Collection[str], names: Sequence[str]) -> None:
    """Exit with a message if one of the names is not that of a method."""
    for name in names:
        if name not in known:
            raise SystemExit(f"Invalid method {name!r}. Must be one of {', '.join(known)}.")


def check_device(device: str) -> None:
    """Exit with a message if tensors cannot be created on the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        reason = str(error).partition("\n")[0]
        raise SystemExit(
            f"Device {device!r} cannot be used ({reason}). Choose another one, such as --device cpu."
        ) from error
