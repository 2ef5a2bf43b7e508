"""Tune every method with the same number of trials, and print the outcome as a table.

    python -m benchmarks.equal_budgets draw                       # settings, 12 trials a method; adds
                                                                  # methods that have none yet
    python -m benchmarks.equal_budgets run --minutes 9 --processes 4
    python -m benchmarks.equal_budgets draw --around              # 12 more around each method's best
    python -m benchmarks.equal_budgets draw --winners 1 2         # the best trial at other seeds
    python -m benchmarks.equal_budgets table

The folder `results/equal-budgets/standard` has `trials.json`, the task, the spaces and all settings,
and `results.jsonl`, a line for every trial that has ended. `run` takes the trials without a line. Every
trial has the full length; none is pruned. How settings are drawn and trials trained is in
`torch_locoprop.study.equal_budgets`, and `locoprop study` runs a whole study of several tasks. These
commands make one step of it each, for a machine that is lent for minutes.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.equal_budgets import trials as drawing_of
from torch_locoprop.study.equal_budgets import workers
from torch_locoprop.study.equal_budgets.trial_table import table
from torch_locoprop.study.equal_budgets.trials import (
    add_trials,
    is_pending,
    read_results,
    read_trials,
)
from torch_locoprop.study.methods import in_equal_budgets

FOLDER = Path(__file__).parents[1] / "results" / "equal-budgets" / "standard"

TASK = {
    "dataset": "mnist",
    "model": "standard",
    "transfer": "tanh",
    "epochs": 100,
    "batch_size": 1000,
}


@dataclass(frozen=True)
class FirstImages:
    """The images of a data set, or the first ones of it, to try the command."""

    count: int | None

    def load(self, name: str) -> Dataset:
        """Return the images of a data set."""
        data = datasets.load(name, download=False)
        if self.count is None:
            return data
        train, test = data.train[: self.count], data.test[: self.count]
        return Dataset(data.name, train, test, f"first {self.count} images")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
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
        command.add_argument("--methods", nargs="+", default=list(in_equal_budgets()))
    return parser


def _run(options: argparse.Namespace, began: float) -> None:
    content = read_trials(options.folder)
    out = (options.out or options.folder) / "results.jsonl"
    done = read_results(options.folder / "results.jsonl") + read_results(out)
    trials = [
        trial
        for method in options.methods
        for trial in content["trials"]
        if trial["method"] == method and is_pending(trial, done)
    ]
    given = {"model": options.model, "epochs": options.epochs}
    task = content["task"] | {name: value for name, value in given.items() if value is not None}
    work = workers.Work(
        out,
        FirstImages(options.limit),
        runs=out.parent / "runs",
        deadline=began + 60 * options.minutes,
        revision=options.revision or workers.revision(),
    )
    jobs = workers.jobs_of(trials, task, options.device, options.members)
    failed = workers.in_processes(jobs, task, options.device, options.processes, work, print)
    left = [trial for trial in trials if is_pending(trial, read_results(out))]
    print(f"{len(trials) - len(left)} trials ended, {len(left)} are left.", flush=True)
    if failed:
        raise SystemExit(f"{failed} of {len(jobs)} populations failed. See the messages above.")


def _draw(options: argparse.Namespace, results: list[dict[str, object]]) -> None:
    if not (options.around or options.winners):
        content = drawing_of.empty(TASK, [])
        if (options.folder / "trials.json").is_file():
            content = read_trials(options.folder)
        for method in options.methods:
            content["spaces"].setdefault(method, drawing_of.space_to_dict(method))
            found = drawing_of.spread(content, method, 0, options.trials)
            add_trials(options.folder, content, found)
        return
    content = read_trials(options.folder)
    for method in options.methods:
        if not any(line["method"] == method and not line["diverged"] for line in results):
            print(f"{method}: no trial has come to its end yet")
        elif options.winners:
            best = drawing_of.best_of(results, method)
            add_trials(options.folder, content, drawing_of.at_seeds(best, options.winners))
        else:
            found = drawing_of.around(content, results, method, options.trials)
            add_trials(options.folder, content, found)


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
    else:
        _draw(options, results)


if __name__ == "__main__":
    main()
