"""`locoprop train`: train one model with one method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from torch_locoprop.study.cli import exit_codes, options
from torch_locoprop.study.cli.run_session import RunSession
from torch_locoprop.study.cli.shared import base_of, configuration, given_task, load, parsed
from torch_locoprop.study.training.processes import joined
from torch_locoprop.study.training.run_folder import RunFolder

HELP = """\
Train one model with one method and store the run in a folder.

[bold]locoprop train[/bold]
    LocoProp-M with the protocol of the paper, on images of curves

[bold]locoprop train -d mnist -m adam --set lr=1e-3 --epochs 20 --out runs/adam[/bold]
    another data set, method and setting; writes config.json, metrics.jsonl and checkpoint.pt

[bold]locoprop train --resume --out runs/adam[/bold]
    continues after Ctrl-C, a crash or a kill, with bit-identical results; Ctrl-C and SIGTERM
    save a checkpoint first

[bold]locoprop train -m locoprop-s --set solver=adam --set local_steps=5[/bold]
    another local solver and number of local iterations

[bold]locoprop train --model 784-64-16 --epochs 3[/bold]
    a small model for a quick look

[bold]torchrun --nproc-per-node 2 -m torch_locoprop_command train[/bold]
    one model on several processes, each with its share of every batch
"""

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with all options above: config.json of a run, or best.json of a search."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="The folder of the run.  [dim]default: a new folder in runs/[/dim]"),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart",
        help="Start the unfinished run in the folder again from epoch 0. Its metrics and its "
        "checkpoint are kept, with the ending .old.",
    ),
]


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
    config: ConfigFile = None,
    out: Out = None,
    resume: Resume = False,
    restart: Restart = False,
    data_dir: options.DataDir = None,
    logs: options.TensorBoard = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Train one model with one method; the text of the command's help is in ``HELP``."""
    task = given_task(locals())
    resume = resume or restart
    base = base_of(config, out if resume else None)
    if method is not None and method != base.get("method"):
        base.pop("settings", None)
    own = base.get("settings", {})
    if settings and isinstance(own, dict):  # the configuration refuses other types
        own = {**own, **parsed(settings)}
    chosen = configuration(
        {**base, **task, **({"method": method} if method else {}), "settings": own}
    )
    with joined(chosen.device) as processes:
        # The first process downloads what is missing, before the others look for it.
        processes.on_first(lambda: load(chosen.dataset, data_dir, quiet) and None)
        data = processes.on_all(lambda: load(chosen.dataset, data_dir, quiet))
        folder = out or Path("runs") / chosen.name(data.fingerprint)
        session = RunSession(data, data_dir, quiet, logs, processes=processes)
        files = RunFolder(folder)
        if resume and not (files.exists or files.leftovers):
            session.console.print(
                f"No run to continue in {folder}; starting a new one.", soft_wrap=True
            )
        result = session.train(chosen, folder, resume=resume, restart=restart)
        if processes.is_first:
            typer.echo(json.dumps(result.to_dict()) if as_json else result.summary)
    if result.diverged:
        raise typer.Exit(exit_codes.DIVERGED)
