"""`locoprop compare`: train one model with several methods and rank them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torch_locoprop.study.cli import options, tables
from torch_locoprop.study.cli.shared import configuration, given_task, is_for, load, parsed, run_in
from torch_locoprop.study.training.run_result import ranked


def compare(
    names: Annotated[list[str], typer.Argument(metavar="METHOD", help="The methods to compare.")],
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
    task = given_task(locals())
    for text in settings or []:
        owner = text.partition("=")[0].rpartition(".")[0]
        if owner and owner not in names:
            raise ValueError(f"Invalid --set {text}. {owner} is not among the methods to compare.")
    configs = []
    for name in dict.fromkeys(names):
        own = parsed(text.removeprefix(f"{name}.") for text in settings or [] if is_for(name, text))
        configs.append(configuration({**task, "method": name, "settings": own}))
    for each in configs:  # before any run, which may take hours
        each.check_settings()
    data = load(configs[0].dataset, data_dir, quiet)
    results = [
        run_in(
            each,
            out / each.name(data.fingerprint),
            data,
            data_dir,
            quiet=quiet,
            resume=True,
            logs=logs,
            others=True,
        )
        for each in configs
    ]
    results = ranked(results)
    if as_json:
        typer.echo(json.dumps([result.to_dict() for result in results]))
    else:
        first = results[0].config
        length = "1 epoch" if first.epochs == 1 else f"{first.epochs} epochs"
        console = Console()
        console.print(
            f"{data.title}, {first.model}, {first.transfer}, {length} of batches of "
            f"{first.batch_size}, seed {first.seed}",
            highlight=False,
        )
        console.print(tables.ranking(results))
