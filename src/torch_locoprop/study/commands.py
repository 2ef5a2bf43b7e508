"""The commands of `locoprop`: what their options are and what they print.

Results go to standard output, as text or with `--json` as JSON; progress goes to standard error.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from torch_locoprop.study import datasets, display, options
from torch_locoprop.study.config import RunConfig
from torch_locoprop.study.datasets import Dataset
from torch_locoprop.study.run_folder import RunFolder
from torch_locoprop.study.runner import RunResult, result_of, run

INTERRUPTED = 130

app = typer.Typer(
    name="locoprop",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train deep autoencoders with LocoProp and with the optimizers it is compared with.",
)


@app.command(epilog=options.METHODS)
def train(
    method: options.Method = None,
    settings: options.Set = None,
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
    config: Annotated[
        Path | None,
        typer.Option(help="A file to take all of the above from: config.json of another run."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the run.  [dim]default: a name of its own in runs/[/dim]"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that is in the folder, if any.")
    ] = False,
    data_dir: options.DataDir = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Train one model with one method; the run is a folder.

    [bold]locoprop train[/bold]
        the paper's protocol with LocoProp-M, on images of curves

    [bold]locoprop train -d mnist -m adam --set lr=1e-3 --epochs 20 --out runs/adam[/bold]
        another data set, method and setting; config.json, metrics.jsonl and checkpoint.pt in runs/adam

    [bold]locoprop train --resume --out runs/adam[/bold]
        goes on after Ctrl-C, a crash or a kill, to the same bits

    [bold]locoprop train -m locoprop-s --set solver=adam --set local_steps=5[/bold]
        any solver and number of local iterations

    [bold]locoprop train --model 784-64-16 --epochs 3[/bold]
        a small model, for a quick look
    """
    base = _base(config, out if resume else None)
    task = _task(locals())
    if method is not None and method != base.get("method"):
        base.pop("settings", None)
    own = {**base.get("settings", {}), **_parsed(settings or [])}
    chosen = _config({**base, **task, **({"method": method} if method else {}), "settings": own})
    data = _load(chosen.dataset, data_dir, quiet)
    folder = out or Path("runs") / chosen.name(data.fingerprint)
    result = _run(chosen, folder, data, data_dir, quiet=quiet, resume=resume)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
    else:
        typer.echo(display.outcome(result))


@app.command(epilog=options.METHODS)
def compare(
    names: Annotated[list[str], typer.Argument(metavar="METHOD", help="The methods.")],
    settings: options.SetOfOne = None,
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
    out: Annotated[Path, typer.Option(help="The folder in which each run has its own.")] = Path(
        "runs"
    ),
    data_dir: options.DataDir = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Train the same model with several methods and rank them.

    All start from the same weights and see the same batches. Runs that are in the folder already are
    taken from it if they are finished, and continued if they are not.

    [bold]locoprop compare locoprop-m rmsprop adam -d mnist --epochs 20[/bold]
        three methods at their own settings

    [bold]locoprop compare kfac kfac@10 shampoo@10 --set kfac.lr=3e-3[/bold]
        preconditioners renewed in every or in every tenth step, and a setting of one method

    [bold]locoprop compare locoprop-s locoprop-m --set local_steps=5 --json[/bold]
        a setting of all methods; the ranking as JSON
    """
    task = _task(locals())
    for text in settings or []:
        owner = text.partition("=")[0].rpartition(".")[0]
        if owner and owner not in names:
            raise ValueError(f"Invalid --set {text}. {owner} is not among the methods to compare.")
    configs = []
    for name in dict.fromkeys(names):
        own = _parsed(
            text.removeprefix(f"{name}.") for text in settings or [] if _is_for(name, text)
        )
        configs.append(_config({**task, "method": name, "settings": own}))
    data = _load(configs[0].dataset, data_dir, quiet)
    results = [
        _run(each, out / each.name(data.fingerprint), data, data_dir, quiet=quiet, resume=True)
        for each in configs
    ]
    results = display.ranked(results)
    if as_json:
        typer.echo(json.dumps([result.to_dict() for result in results]))
    else:
        first = results[0].config
        console = Console()
        console.print(
            f"{data.title}, {first.model}, {first.transfer}, {first.epochs} epochs of batches of "
            f"{first.batch_size}, seed {first.seed}",
            highlight=False,
        )
        console.print(display.ranking(results))


@app.command("datasets")
def datasets_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Only these.")] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download what is missing, and check what is there.")
    ] = False,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Show where the data sets are, or fetch them.

    [bold]locoprop datasets[/bold]
        what is there and what is missing

    [bold]locoprop datasets mnist --download[/bold]
        fetches MNIST into the cache, once
    """
    for name in names or []:
        if name not in datasets.NAMES:
            raise ValueError(f"Unknown data set {name!r}. Known: {', '.join(datasets.NAMES)}.")
    wanted = names or list(datasets.NAMES)
    if download:
        for name in wanted:
            _load(name, data_dir, quiet=False)
    statuses = [status for status in datasets.status(data_dir) if status.name in wanted]
    if as_json:
        typer.echo(json.dumps([status._asdict() for status in statuses]))
    else:
        Console().print(display.availability(statuses))


TASK = (
    *("dataset", "model", "transfer", "epochs", "batch_size", "warmup_epochs"),
    *("weight_decay", "seed", "schedule", "precision", "device"),
)


def _task(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of the options that say the task."""
    return {name: options[name] for name in TASK if options[name] is not None}


def _config(values: dict[str, Any]) -> RunConfig:
    return RunConfig.from_dict({"device": "cuda" if torch.cuda.is_available() else "cpu", **values})


def _base(config: Path | None, resumed: Path | None) -> dict[str, Any]:
    """The fields of a configuration file, or of the run that is to go on."""
    if config is None:
        folder = None if resumed is None else RunFolder(resumed)
        return dict(folder.description()["config"]) if folder and folder.exists else {}
    try:
        content = json.loads(config.read_text())
    except ValueError as error:
        raise ValueError(f"{config} is not a JSON file ({error}).") from error
    fields = content.get("config", content) if isinstance(content, dict) else None
    if not isinstance(fields, dict):
        raise ValueError(f"{config} is not a configuration: it must be a JSON object.")
    return dict(fields)


def _is_for(name: str, text: str) -> bool:
    """Whether a setting, `KEY=VALUE` or `METHOD.KEY=VALUE`, is one of this method."""
    return text.partition("=")[0].rpartition(".")[0] in ("", name)


def _parsed(texts: Iterable[str]) -> dict[str, Any]:
    """`KEY=VALUE` texts as settings: numbers, true, false, null, or else words."""
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ValueError(f"Invalid --set {text!r}. Must be KEY=VALUE, such as lr=1e-4.")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def _load(name: str, data_dir: Path | None, quiet: bool) -> Dataset:
    """The data set, with a bar for each file that is downloaded."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return datasets.load(name, data_dir)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def show(file: str, here: int, total: int | None) -> None:
            if file not in bars:
                bars[file] = progress.add_task(file)
            progress.update(bars[file], completed=here, total=total)

        return datasets.load(name, data_dir, progress=show)


def _run(
    config: RunConfig,
    folder: Path,
    data: Dataset,
    data_dir: Path | None,
    *,
    quiet: bool,
    resume: bool,
) -> RunResult:
    """The run with its progress on standard error; Ctrl-C ends the program and says what to do."""
    console = Console(stderr=True, highlight=False, markup=False)
    there = resume and RunFolder(folder).exists and result_of(folder).finished
    try:
        with display.watching(console, config.method, config.epochs, quiet=quiet) as watch:
            result = run(config, folder, resume=resume, data=data, on_epoch=watch)
    except KeyboardInterrupt:
        words = ["locoprop", "train", "--resume", "--out", str(folder)]
        words += [] if data_dir is None else ["--data-dir", str(data_dir)]
        console.print(f"Interrupted. Go on with: {shlex.join(words)}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    if there and not quiet:
        console.print(f"{folder} is finished already.", soft_wrap=True)
    return result
