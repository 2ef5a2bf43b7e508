"""The subcommands of `locoprop`.

Results are printed to standard output, as text or with `--json` as JSON; progress to standard error.
"""

from typing import Annotated

import typer

from torch_locoprop import __version__
from torch_locoprop.study.cli import exit_codes, figure, options, study, train, tune
from torch_locoprop.study.cli.compare import compare
from torch_locoprop.study.cli.datasets import datasets_command
from torch_locoprop.study.cli.methods import methods_command
from torch_locoprop.study.cli.report import report
from torch_locoprop.study.training import processes

app = typer.Typer(
    name="locoprop",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train deep autoencoders with LocoProp and with other optimizers, and compare them.\n\n"
    "[bold]locoprop compare locoprop-m adam --model 784-64-16 --epochs 10[/bold]\n"
    "    a first comparison, half a minute on a CPU; [bold]locoprop report[/bold] makes a page of it",
    epilog="Exit codes: "
    + "; ".join(f"{code} {meaning}" for code, meaning in exit_codes.MEANING.items())
    + ".",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torch-locoprop {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    if processes.started().are_several and context.invoked_subcommand != "train":
        raise ValueError(
            f"locoprop {context.invoked_subcommand} does not run under torchrun with several "
            "processes; locoprop train alone does. Start it without torchrun."
        )


app.command(help=train.HELP, epilog=options.METHODS)(train.train)
app.command(epilog=options.METHODS)(compare)
app.command(help=tune.HELP, epilog=options.METHODS)(tune.tune)
app.command("study", help=study.HELP)(study.study_command)
app.command("methods")(methods_command)
app.command("datasets")(datasets_command)
app.command(help=figure.HELP)(figure.figure)
app.command()(report)
