"""Options that several subcommands of `locoprop` share."""

from pathlib import Path
from typing import Annotated

import typer

from torch_locoprop.study import methods
from torch_locoprop.study.cli import completion
from torch_locoprop.study.data import datasets
from torch_locoprop.study.models import architectures
from torch_locoprop.study.training import tensorboard

METHODS = (
    f"Methods: {', '.join(methods.names())}. For methods that renew a preconditioner, @k sets the "
    "number of steps between renewals: [bold]kfac@10[/bold], [bold]shampoo@20[/bold]."
)

Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        autocompletion=completion.method_names,
        help="The method.  [dim]default: locoprop-m[/dim]",
    ),
]
Compared = Annotated[
    list[str],
    typer.Argument(
        metavar="METHOD", autocompletion=completion.method_names, help="The methods to compare."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=completion.settings,
        help="A setting of the method, such as lr=1e-4; see `locoprop methods METHOD`.",
    ),
]
SetOfOne = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="[METHOD.]KEY=VALUE",
        autocompletion=completion.settings_of_several,
        help="A setting of all methods, or of one method: adam.lr=1e-3.",
    ),
]
DatasetName = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        "-d",
        autocompletion=completion.DATASETS,
        help=f"{', '.join(datasets.NAMES)}.  [dim]default: curves[/dim]",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        autocompletion=completion.MODELS,
        help=f"{', '.join(architectures.PRESETS)}, or widths from input to code: 784-64-16.  "
        "[dim]default: standard[/dim]",
    ),
]
Transfer = Annotated[
    str | None,
    typer.Option(
        autocompletion=completion.TRANSFERS,
        help=f"Transfer between layers: {', '.join(architectures.SUITABLE)}.  "
        "[dim]default: tanh[/dim]",
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option("--epochs", "-e", help="Passes over the images.  [dim]default: 100[/dim]"),
]
BatchSize = Annotated[int | None, typer.Option(help="Images per step.  [dim]default: 1000[/dim]")]
Warmup = Annotated[
    int | None,
    typer.Option(
        help="Epochs of increasing learning rate, at most half of all.  [dim]default: 5[/dim]"
    ),
]
Decay = Annotated[
    float | None, typer.Option(help="Decoupled weight decay.  [dim]default: 1e-5[/dim]")
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of weights and order of images.  [dim]default: 0[/dim]")
]
Schedule = Annotated[
    str | None,
    typer.Option(
        autocompletion=completion.SCHEDULES,
        help="Learning-rate schedule. paper: changes by epoch, and is zero in the first epoch; "
        "linear: by step, from above zero.  [dim]default: paper[/dim]",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        autocompletion=completion.PRECISIONS,
        help="Of matrix products: fp32; on a GPU also tf32, or bf16: tf32 with LocoProp's local "
        "products in bfloat16.  [dim]default: fp32[/dim]",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        autocompletion=completion.DEVICES,
        help="cpu or cuda.  [dim]default: cuda if available[/dim]",
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="A folder with files of data sets.")]
TensorBoard = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        metavar="DIR",
        callback=tensorboard.checked,
        help="Also log each epoch for TensorBoard, each run in a subfolder of DIR.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
