"""`locoprop figure`: make the figures of the paper from existing and new runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from torch_locoprop.study import methods
from torch_locoprop.study.cli import completion, exit_codes, options
from torch_locoprop.study.cli.run_session import messages, stopped
from torch_locoprop.study.cli.shared import base_of, seed_numbers
from torch_locoprop.study.figures import catalog
from torch_locoprop.study.figures.figure_request import FigureRequest, MadeFigure
from torch_locoprop.study.figures.images import Images
from torch_locoprop.study.figures.protocol import PROTOCOL
from torch_locoprop.study.figures.quick import QUICK
from torch_locoprop.study.figures.run_library import Place
from torch_locoprop.study.training import progress
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.description import RunError

ALL = "all"


HELP = """\
Make the figures of the paper, and a few more, as PNG and PDF with captions.

Existing runs are used, on any device and in any precision unless these are
given. Unfinished runs are continued, and missing runs are trained. Seconds
are measured by short runs, one at a time. Keep the machine free of other
work during these.

[bold]locoprop figure[/bold]
    lists the figures

[bold]locoprop figure standard --quick[/bold]
    one figure in a minute or two; [bold]all --quick[/bold] makes all figures

[bold]locoprop figure standard wide deep --jobs 6 --device cuda --precision tf32[/bold]
    the protocol of the paper on MNIST, six runs at a time on the GPU

[bold]locoprop figure relu --config tuned/adam/best.json --seeds 0,1,2[/bold]
    with the settings of a search, three seeds

[bold]locoprop figure standard --quick --with adamw --without shampoo[/bold]
    with other methods

[bold]locoprop figure all --only-existing[/bold]
    draws the runs in runs/ and results/
"""

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME",
        autocompletion=completion.FIGURES,
        help="Figures, or all; without a name, figures are listed.",
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Generated images and small models: minutes on a CPU.")
]
Runs = Annotated[
    list[Path] | None,
    typer.Option(
        help="Folders to search for runs; new runs go into the first.  "
        "[dim]default: runs, and results if it exists[/dim]"
    ),
]
Out = Annotated[Path, typer.Option(help="The folder for figures.")]
Configs = Annotated[
    list[Path] | None,
    typer.Option(
        help="A configuration file, such as best.json of a search. Its settings replace those of "
        "lines with the same method, data set, model, transfer and batch size."
    ),
]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="METHOD",
        autocompletion=completion.method_names,
        help="Add a method to the figures that compare methods.",
    ),
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METHOD",
        autocompletion=completion.method_names,
        help="Leave out a method: shampoo@1, or shampoo for all @k.",
    ),
]
Seeds = Annotated[str, typer.Option(help="Seeds; several are drawn as mean and range.")]
Jobs = Annotated[int, typer.Option(min=1, help="Runs at the same time, in processes.")]
OnlyExisting = Annotated[
    bool, typer.Option("--only-existing", help="Train nothing; draw existing runs.")
]
Provenance = Annotated[
    bool,
    typer.Option(
        "--provenance",
        help="Write how each picture was made below it too; its caption NAME.md always says it.",
    ),
]


def figure(
    names: Names = None,
    quick: Quick = False,
    runs: Runs = None,
    out: Out = Path("figures"),
    config: Configs = None,
    added: With = None,
    without: Without = None,
    epochs: options.Epochs = None,
    seeds: Seeds = "0",
    precision: options.Precision = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
    jobs: Jobs = 1,
    only_existing: OnlyExisting = False,
    provenance: Provenance = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Make figures of the paper; the text of the command's help is in ``HELP``."""
    if not names:
        _list(as_json)
        return
    chosen = _chosen(names, added or [], without or [])
    scale = QUICK if quick else PROTOCOL
    request = FigureRequest(
        scale=scale,
        images=Images(data_dir, scale.images),
        place=_place(device, precision, quick),
        folders=tuple(runs or _default_folders()),
        out=out,
        command=_command(quick, config, added, without, epochs, seeds, device, precision),
        epochs=epochs,
        seeds=seed_numbers(seeds),
        tuned=tuple(RunConfig.from_dict(base_of(path, None)) for path in config or []),
        added=tuple(added or []),
        without=tuple(without or []),
        jobs=jobs,
        only_existing=only_existing,
        provenance=provenance,
    )
    made, failed = _make(chosen, request, quiet)
    _tell(made, as_json)
    if failed:
        raise typer.Exit(exit_codes.FAILED)
    if not any(each.files for each in made):
        raise RunError(_nothing(request))


def _chosen(names: list[str], added: list[str], without: list[str]) -> tuple[str, ...]:
    """Return the names of the figures to make.

    Raises:
        ValueError: If a figure or a method is unknown, or no figure can have the added methods.
    """
    for name in names:
        if name != ALL:
            catalog.entry_of(name)
    for method in (*added, *without):
        methods.get(method)
    chosen = catalog.NAMES if ALL in names else tuple(dict.fromkeys(names))
    if added and not set(chosen) & set(catalog.COMPARISONS):
        raise ValueError(
            f"--with adds methods to {', '.join(catalog.COMPARISONS)}. Ask for one of these figures."
        )
    return chosen


def _default_folders() -> list[Path]:
    """Return the folder for new runs, and that of the committed runs if there is one."""
    return [Path("runs"), *([Path("results")] if Path("results").is_dir() else [])]


def _make(
    names: Sequence[str], request: FigureRequest, quiet: bool
) -> tuple[list[MadeFigure], bool]:
    """Return the figures, and True if a run failed."""
    # matplotlib is slow to import, and no other command needs it.
    from torch_locoprop.study.figures.cost_figure import make_costs
    from torch_locoprop.study.figures.loss_figures import Maker
    from torch_locoprop.study.figures.matching_loss import make_matching_loss
    from torch_locoprop.study.figures.profile import make_profile
    from torch_locoprop.study.figures.run_jobs import using_threads
    from torch_locoprop.study.figures.time_to_loss import make_time_to_loss

    console = messages()

    def say(text: str) -> None:
        if not quiet:
            console.print(text, soft_wrap=True)

    @contextmanager
    def watching(name: str, epochs: int) -> Iterator[progress.Watch]:
        with progress.watching(console, name, epochs, quiet=quiet) as watch:
            yield watch

    maker = Maker(request, watching, say)
    try:
        made = [make_matching_loss(request)] if "matching-loss" in names else []
        with using_threads(request.scale.threads):
            made += maker.loss_figures([n for n in names if n in catalog.LOSS_FIGURES])
            made += [make_time_to_loss(maker)] if "time-to-loss" in names else []
            made += [make_profile(maker)] if "profile" in names else []
            made += [make_costs(request, say)] if "costs" in names else []
    except KeyboardInterrupt as error:
        console.print(f"{stopped(error)}. Give the same command again to continue.", soft_wrap=True)
        raise typer.Exit(exit_codes.of_interruption(error)) from None
    for failure in maker.failures if quiet else ():  # --quiet hides progress, not failures
        console.print(failure, soft_wrap=True)
    return made, bool(maker.failures)


def _tell(made: Sequence[MadeFigure], as_json: bool) -> None:
    if as_json:
        fields = ("files", "runs", "missing")
        content = [
            {"name": each.name, **{name: list(map(str, getattr(each, name))) for name in fields}}
            for each in made
        ]
        typer.echo(json.dumps(content))
        return
    for each in made:
        if each.text:
            typer.echo(each.text)
        if each.files:
            typer.echo(f"{each.name}: {', '.join(map(str, each.files))}")


def _nothing(request: FigureRequest) -> str:
    where = " or ".join(map(str, request.folders))
    advice = (
        " Leave out --only-existing to train missing runs, or give the folder of the runs with --runs."
        if request.only_existing
        else ""
    )
    return f"Nothing was drawn: none of the runs is in {where}.{advice}"


def _list(as_json: bool) -> None:
    if as_json:
        entries = [{"name": e.name, "title": e.title, "paper": e.paper} for e in catalog.ENTRIES]
        typer.echo(json.dumps(entries))
        return
    table = Table("figure", "what it shows", "in the paper")
    for entry in catalog.ENTRIES:
        table.add_row(entry.name, entry.title, entry.paper)
    Console().print(table)


def _place(device: str | None, precision: str | None, quick: bool) -> Place:
    """Return the device and precision; quick figures use the CPU, so that all users get the same."""
    default = "cuda" if torch.cuda.is_available() and not quick else "cpu"
    place = Place(device, precision, default)
    place.on(RunConfig())  # raises now if device and precision do not fit
    return place


def _command(
    quick: bool,
    config: list[Path] | None,
    added: list[str] | None,
    without: list[str] | None,
    epochs: int | None,
    seeds: str,
    device: str | None,
    precision: str | None,
) -> str:
    """Return the command that makes a figure, with NAME for its name and without paths."""
    words = ["locoprop", "figure", "NAME", *(["--quick"] if quick else [])]
    for path in config or []:
        words += ["--config", path.name]
    for option, names in (("--with", added), ("--without", without)):
        for method in names or []:
            words += [option, method]
    for option, value in (("epochs", epochs), ("device", device), ("precision", precision)):
        words += [] if value is None else [f"--{option}", str(value)]
    words += [] if seeds == "0" else ["--seeds", seeds]
    return shlex.join(words)
