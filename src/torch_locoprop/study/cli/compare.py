"""`locoprop compare`: train one model with several methods and rank them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from torch_locoprop.study.cli import exit_codes, options, tables
from torch_locoprop.study.cli.run_session import RunSession
from torch_locoprop.study.cli.shared import (
    configuration,
    given_task,
    is_for,
    load,
    parsed,
    task_options,
)
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_result import RunResult, ranked


def compare(
    names: options.Compared,
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
    out: Annotated[Path, typer.Option(help="The folder for runs; each has a subfolder.")] = Path(
        "runs"
    ),
    data_dir: options.DataDir = None,
    logs: options.TensorBoard = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Train the same model with several methods and rank them.

    All methods start from the same weights and see the same batches. Finished
    runs in the folder are reused, unfinished ones are continued.

    [bold]locoprop compare locoprop-m rmsprop adam -d mnist --epochs 20[/bold]
        three methods with their default settings

    [bold]locoprop compare kfac kfac@10 shampoo@10 --set kfac.lr=3e-3[/bold]
        preconditioners renewed in every step or in every tenth step, and a setting of one method

    [bold]locoprop compare locoprop-s locoprop-m --set local_steps=5 --json[/bold]
        a setting of all methods; prints the ranking as JSON
    """
    configs = _configurations(names, given_task(locals()), settings or [])
    data = load(configs[0].dataset, data_dir, quiet)
    session = RunSession(data, data_dir, quiet, logs, several=True)
    results = ranked(
        session.train(each, out / each.name(data.fingerprint), resume=True) for each in configs
    )
    if as_json:
        typer.echo(json.dumps([result.to_dict() for result in results]))
    else:
        _print(results, data.title, out)
    if all(result.diverged for result in results):
        raise typer.Exit(exit_codes.DIVERGED)


def _configurations(names: list[str], task: dict[str, Any], settings: list[str]) -> list[RunConfig]:
    """Return the configuration of each method, after all of them have been checked.

    Raises:
        ValueError: If a setting is wrong, or of a method that is not compared.
    """
    for text in settings:
        owner = text.partition("=")[0].rpartition(".")[0]
        if owner and owner not in names:
            raise ValueError(f"Invalid --set {text}. {owner} is not among the methods to compare.")
    configs = []
    for name in dict.fromkeys(names):
        own = parsed(text.removeprefix(f"{name}.") for text in settings if is_for(name, text))
        configs.append(configuration({**task, "method": name, "settings": own}))
    for each in configs:  # before any run, which may take hours
        each.check_settings()
    return configs


def _print(results: list[RunResult], title: str, out: Path) -> None:
    """Print the ranking, where the runs are, and what to do next."""
    first = results[0].config
    length = "1 epoch" if first.epochs == 1 else f"{first.epochs} epochs"
    console = Console(highlight=False, markup=False)
    console.print(
        f"{title}, {first.model}, {first.transfer}, {length} of batches of "
        f"{first.batch_size}, seed {first.seed}",
    )
    console.print(tables.ranking(results))
    last = results[-1].config
    report = shlex.join(["locoprop", "report", str(out)])
    tune = shlex.join(["locoprop", "tune", "-m", last.method, *task_options(last)])
    lines = [
        "Runs, in the order of the table:",
        *(f"  {result.folder}" for result in results),
        "Next:",
        f"  {report}    # curves, ranking and reconstructions as an HTML page",
        f"  {tune}    # search better settings of a method",
    ]
    console.print("\n".join(lines), soft_wrap=True)
