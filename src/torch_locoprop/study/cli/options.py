"""The options that the commands of `locoprop` share."""

from pathlib import Path
from typing import Annotated

import typer

from torch_locoprop.study import methods
from torch_locoprop.study.data import datasets
from torch_locoprop.study.models import architectures
from torch_locoprop.study.training import tensorboard

METHODS = (
    f"Methods: {', '.join(methods.names())}. Those that renew a preconditioner every k steps are "
    "also called by that: [bold]kfac@10[/bold], [bold]shampoo@20[/bold]."
)

Method = Annotated[
    str | None,
    typer.Option("--method", "-m", help="How to train.  [dim]default: locoprop-m[/dim]"),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the method, such as lr=1e-4. A wrong KEY is answered with the right ones.",
    ),
]
SetOfOne = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="[METHOD.]KEY=VALUE",
        help="A setting of all methods, or of one: adam.lr=1e-3.",
    ),
]
DatasetName = Annotated[
    str | None,
    typer.Option(
        "--dataset", "-d", help=f"{', '.join(datasets.NAMES)}.  [dim]default: curves[/dim]"
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(architectures.PRESETS)}, or widths from input to code: 784-64-16.  "
        "[dim]default: standard[/dim]"
    ),
]
Transfer = Annotated[
    str | None,
    typer.Option(
        help=f"Between the layers: {', '.join(architectures.SUITABLE)}.  [dim]default: tanh[/dim]"
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option("--epochs", "-e", help="Passes over the images.  [dim]default: 100[/dim]"),
]
BatchSize = Annotated[int | None, typer.Option(help="Images in a step.  [dim]default: 1000[/dim]")]
Warmup = Annotated[
    int | None,
    typer.Option(
        help="Epochs of rising learning rate, at most half of all.  [dim]default: 5[/dim]"
    ),
]
Decay = Annotated[
    float | None, typer.Option(help="Decoupled weight decay.  [dim]default: 1e-5[/dim]")
]
Seed = Annotated[
    int | None, typer.Option(help="Of weights and order of images.  [dim]default: 0[/dim]")
]
Schedule = Annotated[
    str | None,
    typer.Option(
        help="paper: by epoch, the first of a warm-up at rate zero; linear: by step.  "
        "[dim]default: paper[/dim]"
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        help="Of matrix products: fp32, or tf32 on a GPU; bf16 there is tf32 with LocoProp's local "
        "products in bfloat16.  [dim]default: fp32[/dim]"
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda.  [dim]default: cuda if there is one[/dim]")
]
DataDir = Annotated[
    Path | None, typer.Option(help="A folder with data sets that you have already.")
]
TensorBoard = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        metavar="DIR",
        callback=tensorboard.checked,
        help="Log each epoch for TensorBoard too, in a subfolder of this one for each run.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
