"""`locoprop tune`: search the settings of a method."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from torch_locoprop.study import methods
from torch_locoprop.study.cli import completion, exit_codes, options
from torch_locoprop.study.cli.run_session import messages, stopped
from torch_locoprop.study.cli.shared import configuration, given_task, load, parsed
from torch_locoprop.study.methods.search_space import Space, from_dict
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.progress import TimeLeft, bar
from torch_locoprop.study.tuning import campaign, spaces
from torch_locoprop.study.tuning.folder import TuningFolder
from torch_locoprop.study.tuning.results import Status, TuningResult, best_of
from torch_locoprop.study.tuning.storage_address import StorageAddress

HELP = """\
Search a method's settings for the lowest train loss after the last epoch.

The search is stored in a folder. The same command continues it after Ctrl-C,
a crash or a kill, or with more trials. The same command in another terminal
shares the work. best.json in the folder has the best configuration.

[bold]locoprop tune -m adam -d mnist --epochs 20 --out tuning/adam[/bold]
    64 trials, 8 at a time; bad ones end early

[bold]locoprop tune --out tuning/adam --trials 256[/bold]
    continues that search, or shares its work

[bold]locoprop train --config tuning/adam/best.json --seed 1[/bold]
    trains with the best configuration

[bold]locoprop tune -m locoprop-s --range lr=1e-6:1e-3 --range gamma=10,100 --set eps=1e-5[/bold]
    other ranges, and a fixed setting

[bold]locoprop tune -m adam -d mnist --storage postgresql://me@host/tuning[/bold]
    on any number of machines, which share the trials in a database, or in a file on a
    shared disk: --storage /shared/adam.journal

[bold]locoprop tune -m kfac@10 --sampler gp --no-pruning --trials 30[/bold]
    a Gaussian process for few expensive trials, without pruning
"""

Ranges = Annotated[
    list[str] | None,
    typer.Option(
        "--range",
        metavar="KEY=LOW:HIGH",
        help="The range of a setting, or its values: gamma=10,100,1000.  "
        "[dim]default: see locoprop methods METHOD[/dim]",
    ),
]
Fixed = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=completion.settings,
        help="A setting that is not searched.",
    ),
]
Trials = Annotated[
    int, typer.Option("--trials", "-n", help="Trials to finish, by all processes and calls.")
]
Population = Annotated[
    int, typer.Option("--population", "-k", help="Trials trained together, as one model.")
]
Sampler = Annotated[
    str | None,
    typer.Option(
        help="How settings are chosen: tpe (tree-structured Parzen estimator), near those of the best "
        "trials; gp (Gaussian process), by a model of the loss, for few expensive trials.  "
        "[dim]default: tpe[/dim]"
    ),
]
Pruning = Annotated[bool, typer.Option(help="End trials early that are worse than the median.")]
Out = Annotated[
    Path | None,
    typer.Option(help="The folder of the search.  [dim]default: a new folder in tuning/[/dim]"),
]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URL",
        help="Where several machines share the trials: a journal file on a shared disk, "
        "sqlite:///FILE, or postgresql://USER@HOST/DATABASE.  [dim]default: the folder[/dim]",
    ),
]

POPULATION = 8


def tune(
    method: options.Method = None,
    settings: Fixed = None,
    ranges: Ranges = None,
    trials: Trials = 64,
    population: Population = POPULATION,
    sampler: Sampler = None,
    pruning: Pruning = True,
    dataset: options.DatasetName = None,
    model: options.Model = None,
    transfer: options.Transfer = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    warmup_epochs: options.Warmup = None,
    weight_decay: options.Decay = None,
    seed: options.Seed = None,
    schedule: options.Schedule = None,
    precision: options.Precision = None,
    device: options.Device = None,
    out: Out = None,
    storage: Storage = None,
    data_dir: options.DataDir = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Search a method's settings; the text of the command's help is in ``HELP``."""
    task = given_task(locals())
    there = TuningFolder(out).description() if out and TuningFolder(out).exists else None
    base, space = _search(there, task, method, settings or [], ranges or [])
    sampler = sampler or (there["sampler"] if there else "tpe")
    storage = storage or (there.get("storage") if there else None)
    shared = None if storage is None else StorageAddress.of(storage)
    data = load(base.dataset, data_dir, quiet)
    if out is None:
        own = campaign.description(base, space, sampler, data, shared)
        out = Path("tuning") / campaign.name_of(base, own)
    again = ["locoprop", "tune", "--out", str(out), "--trials", str(trials)]
    again += [] if population == POPULATION else ["--population", str(population)]
    again += [] if pruning else ["--no-pruning"]
    again += [] if shared is None else ["--storage", shared.public]
    again += [] if data_dir is None else ["--data-dir", str(data_dir)]
    with _interruptible(again, base.method, quiet) as watch:
        result = campaign.tune(
            base,
            space,
            out,
            trials=trials,
            population=population,
            sampler=sampler,
            pruning=pruning,
            storage=storage,
            data=data,
            watch=watch,
        )
    typer.echo(json.dumps(result.to_dict()) if as_json else _outcome(result))
    if result.best is None:
        _say_that_none_finished(result)
        raise typer.Exit(exit_codes.DIVERGED)


@contextmanager
def _interruptible(again: list[str], name: str, quiet: bool) -> Iterator[Callable[[Status], None]]:
    """Show the progress of a search; after a signal, say how to continue it, and exit."""
    console = messages()
    try:
        with watching(console, name, quiet=quiet) as watch:
            yield watch
    except KeyboardInterrupt as error:
        console.print(f"{stopped(error)}. Continue with: {shlex.join(again)}", soft_wrap=True)
        raise typer.Exit(exit_codes.of_interruption(error)) from None


def _say_that_none_finished(result: TuningResult) -> None:
    messages().print(
        f"None of {len(result.trials)} trials finished with a finite loss. Search smaller learning "
        "rates, --range lr=LOW:HIGH, in another folder.",
        soft_wrap=True,
    )


def _search(
    there: dict[str, Any] | None,
    task: dict[str, Any],
    method: str | None,
    settings: list[str],
    ranges: list[str],
) -> tuple[RunConfig, Space]:
    """Return the task and the space: those of the command, or else of the folder."""
    config = dict(there["config"]) if there else {}
    if there and not (method or settings or ranges):
        space = {name: from_dict(domain) for name, domain in there["space"].items()}
        return configuration({**config, **task}), space
    chosen = methods.get(method or config.get("method") or "locoprop-m")
    fixed = parsed(settings)
    base = configuration({**config, **task, "method": chosen.name, "settings": fixed})
    pairs = {}
    for text in ranges:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ValueError(
                f"Invalid --range {text!r}. Must be KEY=LOW:HIGH, such as lr=1e-4:1e-1."
            )
        pairs[key] = value
    return base, spaces.of(chosen, ranges=pairs, fixed=fixed)


@contextmanager
def watching(console: Console, name: str, *, quiet: bool) -> Iterator[Callable[[Status], None]]:
    """Show the progress of a search; yields the function to call with its status."""
    if quiet:
        yield lambda status: None
    elif console.is_terminal:
        with bar(console, name) as show:
            yield lambda status: show(status.finished, status.trials, _now(status), _part(status))
    else:
        shown, left = -1, TimeLeft()

        def line(status: Status) -> None:
            nonlocal shown
            remaining = left(status.finished + _part(status), status.trials)
            if status.finished > shown:
                shown = status.finished
                words = (f"{status.finished}/{status.trials} trials", _best(status), remaining)
                console.print("  ".join((name, *filter(None, words))), soft_wrap=True)

        yield line


def _part(status: Status) -> float:
    """Return how much of the running trials of this process is done, in trials."""
    return status.running * status.epoch / status.epochs


def _best(status: Status) -> str:
    return "" if status.best is None else f"best train {status.best:.3f}"


def _now(status: Status) -> str:
    running = f"{status.running} at epoch {status.epoch}/{status.epochs}" if status.running else ""
    return "  ".join(text for text in (_best(status), running) if text)


def _outcome(result: TuningResult) -> str:
    """Return the best trial, the number of trials by state, and how to train with the settings."""
    states = ", ".join(f"{count} {state}" for state, count in result.to_dict()["states"].items())
    best = best_of(result.trials)
    if best is None or result.best is None:
        return f"{states}: {result.folder}"
    found = " ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in best["settings"].items()
    )
    file = shlex.quote(str(result.folder / "best.json"))
    return (
        f"{result.best.method}: train loss {best['train_loss']:.3f}, test loss "
        f"{best['test_loss']:.3f} in trial {best['number']} ({states}): {found}\n"
        f"Train with it: locoprop train --config {file}"
    )
