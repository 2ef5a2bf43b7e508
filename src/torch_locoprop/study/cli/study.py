"""`locoprop study`: tune all methods with equal budgets on several tasks."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from torch_locoprop.study import methods
from torch_locoprop.study.cli import completion, exit_codes, options
from torch_locoprop.study.cli.run_session import messages, stopped
from torch_locoprop.study.cli.shared import seed_numbers
from torch_locoprop.study.equal_budgets import plan as planning
from torch_locoprop.study.equal_budgets import summary
from torch_locoprop.study.equal_budgets.study import TASKS, How, Study, StudyDescription, stored
from torch_locoprop.study.equal_budgets.task_study import Budget, TaskStudy
from torch_locoprop.study.equal_budgets.trials import Trial
from torch_locoprop.study.figures.run_jobs import using_threads
from torch_locoprop.study.training.description import RunError, differences, differing
from torch_locoprop.study.training.progress import as_time
from torch_locoprop.study.training.run_folder import Metrics

HELP = """\
Tune all methods with the same number of trials on several tasks, and compare them.

On each task, every method gets --budget trials of the full length: half of
them spread over its space, half around the best of these. They train on nine
tenths of the training images. Two trials win, by the train loss and by the
loss on the held-out tenth. Each is trained on all images at every seed.

The study is stored in a folder, and --resume continues it after Ctrl-C, a
crash or a kill. A table of each task is in its subfolder.

[bold]locoprop study --quick --budget 4 --tasks standard --methods adam,muon --out studies/mini[/bold]
    in miniature, a few minutes on a CPU

[bold]locoprop study --resume --out studies/mini --plan[/bold]
    what is left and how long it takes; without --plan the study continues

[bold]locoprop study --budget 12 --tasks standard,deep,wide --device cuda --together 12 --jobs 4[/bold]
    the protocol of the paper on a GPU, up to 12 trials as one population, 4 at a time

[bold]locoprop study --resume --out studies/mini --tasks relu --methods muon[/bold]
    one more task and one more method with the same budget
"""

Trials = Annotated[
    int | None,
    typer.Option(
        "--budget", "-n", help="Trials of each method on each task.  [dim]default: 12[/dim]"
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--tasks",
        metavar="TASK,...",
        autocompletion=completion.TASKS,
        help=f"{', '.join(TASKS)}.  [dim]default: all[/dim]",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        metavar="METHOD,...",
        autocompletion=completion.method_names,
        help=f"[dim]default: {', '.join(methods.in_equal_budgets())}[/dim]",
    ),
]
Seeds = Annotated[str | None, typer.Option(help="Seeds of the winners.  [dim]default: 0,1,2[/dim]")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Generated images and small models, for a CPU.")
]
Out = Annotated[Path, typer.Option(help="The folder of the study.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the study in the folder.")]
Plan = Annotated[
    bool, typer.Option("--plan", help="Show what is left and how long it takes; train nothing.")
]
Jobs = Annotated[int, typer.Option(min=1, help="Processes at a time.")]
Together = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Trials that train together as one population. Alone, trials have checkpoints.  "
        "[dim]default: 12 on a GPU, 1 on a CPU[/dim]",
    ),
]
Minutes = Annotated[float | None, typer.Option(min=0, help="Stop after this time.")]


def study_command(
    trials: Trials = None,
    tasks: Tasks = None,
    names: Methods = None,
    seeds: Seeds = None,
    quick: Quick = False,
    epochs: options.Epochs = None,
    out: Out = Path("studies"),
    resume: Resume = False,
    plan: Plan = False,
    jobs: Jobs = 1,
    together: Together = None,
    minutes: Minutes = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Tune all methods with equal budgets; the text of the command's help is in ``HELP``."""
    began = time.time()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    given = {
        "budget": trials,
        "seeds": None if seeds is None else seed_numbers(seeds),
        "quick": quick or None,
        "epochs": epochs,
    }
    chosen = _split(tasks), _split(names)
    if resume and stored(out) is None and not any((*chosen, *given.values())):
        raise RunError(
            f"{out} has no study to continue. Choose its folder (--out), or begin one with --budget."
        )
    description = _description(out, resume or plan, *chosen, given)
    study = Study(out, description, data_dir)
    console = messages()
    with using_threads(description.scale.threads):
        if plan:
            _print_plan(study.plan(device), jobs, as_json)
            return
        study.begin()
        with _continued(console, out, data_dir):
            planned = study.plan(device)
        if not quiet:
            console.print(_plan_table(planned, jobs))
        how = How(
            device,
            jobs,
            together or (12 if device == "cuda" else 1),
            math.inf if minutes is None else began + 60 * minutes,
        )
        with _continued(console, out, data_dir):
            failed = _Progress(study, planned, how, console, quiet).run()
    _tell(study, as_json)
    if failed:
        raise typer.Exit(exit_codes.FAILED)


def _split(texts: list[str] | None) -> tuple[str, ...]:
    """Return the names in options that were given several times or with commas."""
    return tuple(dict.fromkeys(word for text in texts or [] for word in text.split(",") if word))


def _description(
    out: Path, resume: bool, tasks: tuple[str, ...], names: tuple[str, ...], given: dict[str, Any]
) -> StudyDescription:
    """Return what the study consists of: what is stored in the folder, and what is given.

    Raises:
        RunError: If the folder has a study and it is not resumed, or has other options.
    """
    there = stored(out)
    given = {name: value for name, value in given.items() if value is not None}
    if there is None:
        budget = Budget(given.pop("budget", 12), given.pop("seeds", (0, 1, 2)))
        return StudyDescription(
            tasks or TASKS, names or _installed_methods(), budget=budget, **given
        )
    if not resume:
        raise RunError(
            f"{out} already has a study. Continue it with --resume, or choose another folder (--out)."
        )
    known = {
        "budget": there.budget.trials,
        "seeds": there.budget.seeds,
        "quick": there.quick,
        "epochs": there.epochs,
    }
    others = differing({name: known[name] for name in given}, given)
    if others:
        text = differences(known, given, others)
        raise RunError(f"{out} has another study: {text}. Choose another folder (--out).")
    return there.extended(tasks, names)


def _installed_methods() -> tuple[str, ...]:
    """Return the usual methods without those whose package is missing, which are named."""
    missing = {name: methods.get(name).missing_package for name in methods.in_equal_budgets()}
    for name, needs in missing.items():
        if needs:
            typer.echo(f"{name} is left out: it {needs}.", err=True)
    return tuple(name for name, needs in missing.items() if not needs)


def _plan_table(planned: Sequence[planning.Planned], jobs: int) -> Table:
    """Return a table of what is left on each task, and of the whole."""
    table = Table("task", title="What is left", title_justify="left")
    for heading in ("trials ended", "trials left, at most", "time"):
        table.add_column(heading, justify="right")
    parts = {**planning.by_task(planned), "all": list(planned)}
    for task, own in parts.items():
        about = "" if all(each.measured or not each.left for each in own) else "about "
        table.add_row(
            task,
            str(sum(each.done for each in own)),
            str(sum(each.left for each in own)),
            f"{about}{as_time(planning.total_seconds(own, jobs))}",
            end_section=task != "all" and task == list(parts)[-2],
        )
    return table


def _print_plan(planned: Sequence[planning.Planned], jobs: int, as_json: bool) -> None:
    if as_json:
        seconds = planning.total_seconds(planned, jobs)
        content = {"seconds": seconds, "plan": [each.to_dict() for each in planned]}
        typer.echo(json.dumps(content))
    else:
        Console().print(_plan_table(planned, jobs))


class _Progress:
    """Runs a study and shows, after every trial, how much is left."""

    def __init__(
        self,
        study: Study,
        planned: Sequence[planning.Planned],
        how: How,
        console: Console,
        quiet: bool,
    ) -> None:
        self.study, self.how, self.console, self.quiet = study, how, console, quiet
        self.first = {(each.task, each.method): each.seconds for each in planned}
        self.shown = {task.name: len(task.results()) for task in study.tasks}

    def run(self) -> int:
        """Train all trials that are left; return how many failed."""
        return self.study.run(self.how, self._say, self._watch, self._on_trials)

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def _watch(self, trial: Trial, row: Metrics) -> None:
        if not self.quiet and self.console.is_terminal:
            text = f"{trial['method']} {trial['stage']} {trial['trial']}, epoch {row.epoch}"
            self.console.print(f"{text}: train {row.train_loss:.2f}", end="\r", soft_wrap=True)

    def _on_trials(self) -> None:
        """Show the trials that have ended since the last call, and how long the rest takes."""
        if self.quiet:
            return
        left = as_time(planning.total_seconds(self._plan(), self.how.jobs))
        for task in self.study.tasks:
            results = task.results()
            for line in results[self.shown[task.name] :]:
                loss = "diverged" if line["diverged"] else f"train {line['train_loss']:.2f}"
                trial = f"{line['method']} {line['stage']} {line['trial']} at seed {line['seed']}"
                self._say(f"{task.name}: {trial}, {loss}; {left} left")
            self.shown[task.name] = len(results)

    def _plan(self) -> list[planning.Planned]:
        """Return the plan now; nothing is measured again."""
        now = self.study.plan(self.how.device, lambda config, images: math.nan)
        return [
            replace(each, seconds=self.first[each.task, each.method])
            if math.isnan(each.seconds)
            else each
            for each in now
        ]


@contextmanager
def _continued(console: Console, out: Path, data_dir: Path | None) -> Iterator[None]:
    """After Ctrl-C or SIGTERM, say how to continue, and exit."""
    try:
        yield
    except KeyboardInterrupt as error:
        words = ["locoprop", "study", "--resume", "--out", str(out)]
        words += [] if data_dir is None else ["--data-dir", str(data_dir)]
        console.print(f"{stopped(error)}. Continue with: {shlex.join(words)}", soft_wrap=True)
        raise typer.Exit(exit_codes.of_interruption(error)) from None


def _tell(study: Study, as_json: bool) -> None:
    """Print the outcome of every task, and what is left."""
    if as_json:
        typer.echo(json.dumps({task.name: summary.summary(task) for task in study.tasks}))
        return
    console = Console()
    for task in study.tasks:
        console.print(_outcome(task))
        text = f"With both winners and their settings: {task.folder / 'table.md'}"
        console.print(text, highlight=False, soft_wrap=True)
    left = sum(each.left for each in study.plan("cpu", lambda config, images: math.nan))
    if left:
        console.print(f"{left} trials are left. Give the command again with --resume.")


def _outcome(task: TaskStudy) -> Table:
    """Return the losses of both winners of every method."""
    budget = task.budget
    title = f"{task.name}, {budget.trials} trials of each method, seeds {_words(budget.seeds)}"
    table = Table("method", title=title, title_justify="left")
    shown = ("train", "test", "test, by held-out", "seconds")
    for heading in shown:
        table.add_column(heading, justify="right")
    for row in summary.rows(task):
        table.add_row(row[0], *(row[summary.HEAD.index(heading)] for heading in shown))
    return table


def _words(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
