"""`locoprop datasets`: show or download the data sets."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from torch_locoprop.paper.names import unknown
from torch_locoprop.study.cli import completion, options, tables
from torch_locoprop.study.cli.shared import load
from torch_locoprop.study.data import datasets


def datasets_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", autocompletion=completion.DATASETS, help="Data sets; all by default."
        ),
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Download missing files.")] = False,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Show where the data sets are, or download them.

    [bold]locoprop datasets[/bold]
        which data sets are available, and which files are missing or wrong; files are compared
        with the published ones by size and SHA-256

    [bold]locoprop datasets mnist --download[/bold]
        downloads MNIST into the cache, once
    """
    for name in names or []:
        if name not in datasets.NAMES:
            raise ValueError(unknown("data set", name, datasets.NAMES))
    wanted = names or list(datasets.NAMES)
    if download:
        for name in wanted:
            load(name, data_dir, quiet=False)
    statuses = datasets.status(data_dir, wanted)
    if as_json:
        typer.echo(json.dumps([status._asdict() for status in statuses]))
    else:
        Console().print(tables.availability(statuses))
