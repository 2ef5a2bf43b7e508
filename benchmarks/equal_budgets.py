"""Run the protocol of `locoprop study` where torch is the only package, for minutes at a time.

    python -m benchmarks.equal_budgets run --tasks deep --out studies --minutes 8.5 --jobs 3
    python -m benchmarks.equal_budgets table results/equal-budgets/standard

`run` is `locoprop study --resume` without typer, rich and the packages of other methods: SOAP's
population needs none. It stops in time and prints what is left; the same command continues. Only whole
populations count, so give less `--together`, or fewer `--jobs`, if one does not end within the minutes.
The folder of a study has a few small files, which can be copied to another machine to continue there;
`locoprop study --resume` takes it as well.

`table` shows all trials of a folder without held-out images: 12 trials of a method, and the best one at
more seeds.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch

from torch_locoprop.study.equal_budgets import plan
from torch_locoprop.study.equal_budgets.study import TASKS, How, Study, StudyDescription, stored
from torch_locoprop.study.equal_budgets.task_study import Budget
from torch_locoprop.study.equal_budgets.trial_table import table
from torch_locoprop.study.equal_budgets.trials import read_results, read_trials
from torch_locoprop.study.machine import revision
from torch_locoprop.study.methods import in_equal_budgets


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train the trials that have no result yet")
    running.add_argument("--out", type=Path, required=True, help="folder of the study")
    running.add_argument("--tasks", nargs="+", default=[], choices=TASKS)
    running.add_argument(
        "--methods", nargs="+", default=[], help="the first ones are started first"
    )
    running.add_argument("--budget", type=int, default=12, help="trials of each method")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the winners")
    running.add_argument("--quick", action="store_true", help="generated images and small models")
    running.add_argument("--epochs", type=int, help="fewer epochs, to try the command")
    running.add_argument("--jobs", type=int, default=1, help="processes at a time")
    running.add_argument("--together", type=int, default=12, help="trials in one population")
    running.add_argument("--minutes", type=float, default=math.inf, help="after which it stops")
    running.add_argument("--data-dir", type=Path, help="folder with the data sets")
    running.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    running.add_argument("--revision", default=revision(), help="of the code; by default git's")
    showing = commands.add_parser("table", help="print a folder's trials as Markdown")
    showing.add_argument("folder", type=Path)
    return parser


def _study(options: argparse.Namespace) -> Study:
    """Return the study in the folder, with more tasks and methods if some are given."""
    there = stored(options.out)
    tasks, methods = tuple(options.tasks), tuple(options.methods)
    budget = Budget(options.budget, tuple(options.seeds))
    given = StudyDescription(
        tasks or TASKS, methods or in_equal_budgets(), budget, options.quick, options.epochs
    )
    # Other settings than those in the folder are refused by its tasks.
    described = given if there is None else given.extended(there.tasks, there.methods)
    return Study(options.out, described, options.data_dir)


def _run(options: argparse.Namespace, began: float) -> None:
    study = _study(options)
    deadline = began + 60 * options.minutes
    how = How(options.device, options.jobs, options.together, deadline, options.revision)
    ended = sum(len(task.results()) for task in study.tasks)
    failed = study.run(how, _say)
    planned = study.plan(options.device, lambda config, images: math.nan)
    for each in planned:
        each_takes = "" if math.isnan(each.seconds) else f", {each.seconds:.1f} s each"
        _say(f"{each.task} {each.method}: {each.done} trials, at most {each.left} left{each_takes}")
    done, left = sum(each.done for each in planned), sum(each.left for each in planned)
    seconds = plan.total_seconds([each for each in planned if each.left], options.jobs)
    takes = "" if math.isnan(seconds) else f", about {seconds / 60:.1f} minutes"
    _say(f"{done - ended} trials ended in {time.time() - began:.0f} s, at most {left} left{takes}.")
    if failed:
        raise SystemExit(f"{failed} populations failed. See the messages above.")


def _say(text: str) -> None:
    print(text, flush=True)


def main(arguments: list[str] | None = None) -> None:
    began = time.time()
    options = _parser().parse_args(arguments)
    if options.command == "run":
        _run(options, began)
    else:
        _say(table(read_trials(options.folder), read_results(options.folder / "results.jsonl")))


if __name__ == "__main__":
    main()
