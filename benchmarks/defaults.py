"""Compare `LocoProp(model)`, with no settings at all, with other optimizers on many small tasks.

    python -m benchmarks.defaults tasks                                  # list the tasks
    python -m benchmarks.defaults run --data-dir DATA --jobs 2           # run what is missing
    python -m benchmarks.defaults run --methods ours --ours lr=0.02 --tasks short      # try a candidate
    python -m benchmarks.defaults run --timed --threads 2                # times too, on an idle machine
    python -m benchmarks.defaults run --device cuda --tasks all large --timed           # on a GPU
    python -m benchmarks.defaults show benchmarks/results/defaults-cpu.json --figure profile.png
    python -m benchmarks.defaults show FILE --page docs/results-defaults.md    # tables into the page

Methods: ours, `Adam()` and `AdamW()` with their defaults, and Adam, AdamW, Muon and SOAP at the best of
four rates each (`default_methods`). The rate is constant. The training loss is the mean over the last
tenth of the steps, each on its batch before the update; all methods see the same batches. Each row of a
table is the mean over the seeds.

Results are kept in the folder of `--cache`, by task, method, settings and seed, and for ours by the
source files of the library. `run` compares with all results of other methods that it finds there or in
the file of `--published`, so that a candidate needs only its own runs. `--ours` may be given several
times; `--ours loss_fn=true` hands the loss to LocoProp.

Times count only if they were measured with `--timed`, one run after another on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.default_groups import TASKS, selected
from benchmarks.default_methods import BASELINES, OURS, WIDE, Row, ours, parse_settings
from benchmarks.default_runs import Cache, Job, code_fingerprint, read_results, run_all
from benchmarks.default_table import Comparison, score, tables
from benchmarks.default_tasks import Task
from benchmarks.options import add_options
from torch_locoprop.paper.names import unknown
from torch_locoprop.study.machine import environment

PUBLISHED = Path(__file__).parent / "results" / "defaults-cpu.json"

MARKS = ("<!-- tables -->", "<!-- end of tables -->")
"""What stands before and after the tables in a page."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "benchmarks.defaults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tasks", help="list the tasks")
    run = commands.add_parser("run", help="run what is missing and print the tables")
    _add_run_options(run)
    show = commands.add_parser("show", help="print the tables of a file")
    show.add_argument("file", type=Path)
    show.add_argument("--page", type=Path, help="replace the tables in this Markdown file")
    add_options(show, "figure")
    options = parser.parse_args(arguments)
    if options.command == "tasks":
        for task in TASKS.values():
            print(f"{task.name:24} batch {task.batch:5} {task.about}")
        return
    try:
        made = _run(options) if options.command == "run" else _read(options.file)
    except ValueError as error:
        parser.error(str(error))
    print(tables(made))
    if options.command == "show" and options.page is not None:
        options.page.write_text(with_tables(options.page.read_text(), made))
    if options.figure is not None:
        from benchmarks import default_profile  # needs matplotlib

        default_profile.save(made, options.figure)


def with_tables(page: str, made: Comparison) -> str:
    """Return the text of a page with the tables between its two marks; times only if they count.

    Raises:
        ValueError: If the page does not have the marks.
    """
    before, start, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise ValueError(f"The page has no marks {MARKS[0]} and {MARKS[1]} for the tables.")
    shown = [measure for measure in made.measures() if measure != "time" or made.timed]
    return f"{before}{start}\n\n{tables(made, shown)}\n\n{end}{after}"


def _add_run_options(run: argparse.ArgumentParser) -> None:
    run.add_argument("--tasks", nargs="+", default=["all"], help="names, their beginnings, groups")
    run.add_argument(
        "--methods",
        nargs="+",
        default=[OURS, *BASELINES],
        help=f"what to run: {OURS} {' '.join([*BASELINES, *WIDE])} (default: all but the last two)",
    )
    run.add_argument(
        "--ours",
        action="append",
        metavar="NAME=VALUE,...",
        help="settings of LocoProp instead of none; several times for several candidates",
    )
    run.add_argument("--seeds", nargs="+", type=int, default=[0])
    run.add_argument("--jobs", type=int, default=1, help="processes that train (default: 1)")
    run.add_argument("--data-dir", type=Path, help="folder with the data sets")
    run.add_argument(
        "--cache", type=Path, default=Path("runs/defaults"), help="folder with finished runs"
    )
    run.add_argument(
        "--published", type=Path, default=PUBLISHED, help="file with runs of other methods"
    )
    run.add_argument(
        "--timed", action="store_true", help="the machine is idle: measure times, one run at a time"
    )
    run.add_argument("--note", default="", help="a remark for the file")
    add_options(run, "device", "out", "figure")
    run.add_argument("--threads", type=int, default=1, help="threads of each process (default: 1)")


def _rows(methods: Sequence[str], candidates: Sequence[str] | None) -> list[Row]:
    """Return the rows of these methods, ours first.

    Raises:
        ValueError: If a method is unknown or a setting is not NAME=VALUE.
    """
    others = {**BASELINES, **WIDE}
    known = [OURS, *others]
    for name in methods:
        if name not in known:
            raise ValueError(unknown("method", name, known))
    own = [ours(parse_settings(text)) for text in candidates or [""]] if OURS in methods else []
    return [*own, *(row for key, row in others.items() if key in methods)]


def _run(options: argparse.Namespace) -> Comparison:
    """Run the jobs that are missing and return the comparison with all that is known."""
    if options.timed and options.jobs != 1:
        raise ValueError(f"Invalid --jobs {options.jobs} with --timed. Must be 1.")
    tasks = selected(options.tasks)
    rows = _rows(options.methods, options.ours)
    cache = Cache(options.cache, options.published)
    results = run_all(
        _jobs(tasks, rows, options.seeds, options.device),
        cache,
        folder=options.data_dir,
        processes=options.jobs,
        threads=options.threads,
        timed=options.timed,
    )
    # Baselines that were not asked for are shown where their results are known.
    rows = [*(row for row in rows if row.method == OURS), *BASELINES.values(), *WIDE.values()]
    for job in _jobs(tasks, rows, options.seeds, options.device):
        if job.key not in results and (known := cache.get(job.key, options.timed)) is not None:
            results[job.key] = known
    names = [task.name for task in tasks]
    made = Comparison(names, rows, options.seeds, results.values())
    if options.out is not None:
        _write(options, made)
    return made


def _jobs(
    tasks: Sequence[Task], rows: Sequence[Row], seeds: Sequence[int], device: str
) -> list[Job]:
    return [
        Job(task.name, row.method, settings, seed, device)
        for task in tasks
        for row in rows
        for settings in row.candidates
        for seed in seeds
    ]


def _write(options: argparse.Namespace, made: Comparison) -> None:
    """Write the results with the machine and the command to the file of `--out`."""
    content: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.defaults", *_public(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "environment": {**environment(options.device), "threads": options.threads},
        "processes": options.jobs,
        "code_of_ours": code_fingerprint(),
        "timed": made.timed,
        "note": options.note,
        "tasks": made.tasks,
        "rows": [asdict(row) for row in made.rows],
        "seeds": made.seeds,
        "scores": _scores(made),
    }
    runs = [json.dumps(asdict(result)) for result in made.results]
    text = json.dumps(content, indent=1)[:-2] + ',\n "runs": [\n  '
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text + ",\n  ".join(runs) + "\n ]\n}\n")


def _public(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without folders of this machine."""
    shown = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before in ("--data-dir", "--cache", "--published"):
            argument = before.removeprefix("--").upper()
        elif before in ("--out", "--figure"):
            argument = Path(argument).name
        shown.append(argument)
    return shown


def _scores(made: Comparison) -> dict[str, Any]:
    others = [row for row in made.rows if row.method != OURS]
    return {
        mine.label: {
            measure: {other.label: asdict(score(made, mine, other, measure)) for other in others}
            for measure in made.measures()
        }
        for mine in made.rows
        if mine.method == OURS
    }


def _read(path: Path) -> Comparison:
    """Return the comparison in a file."""
    content = json.loads(path.read_text())
    rows = [Row(**{**row, "candidates": tuple(row["candidates"])}) for row in content["rows"]]
    return Comparison(content["tasks"], rows, content["seeds"], read_results(path))


if __name__ == "__main__":
    main()
