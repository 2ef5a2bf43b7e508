"""The demo: four methods train the same small deep autoencoder on generated curves.

Run it with ``python -m torch_locoprop.study.demo``.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from torch_locoprop.study.data import datasets
from torch_locoprop.study.demo.figure import draw, verdict
from torch_locoprop.study.methods import label
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.progress import watching
from torch_locoprop.study.training.run_result import RunResult, ranked
from torch_locoprop.study.training.runner import run

EPOCHS = 25
IMAGES = 4000
TASK: dict[str, Any] = {"model": "784-250-100-20", "batch_size": 200, "schedule": "linear"}

# The best of 24 trials each; benchmarks/tune_demo.json has all trials and how they were made.
TUNED: dict[str, dict[str, float]] = {
    "locoprop-spectral": {
        "lr": 0.0551,
        "momentum": 0.8012,
        "decay": 0.9829,
        "damping": 0.0006946,
    },
    "muon": {"lr": 0.04123, "momentum": 0.8183},
    "rmsprop": {"lr": 0.00327, "momentum": 0.83, "decay": 0.806, "eps": 1.63e-06},
    "adam": {"lr": 0.0066, "momentum": 0.723, "decay": 0.898, "eps": 3.24e-06},
}

FIXED: dict[str, dict[str, float]] = {"locoprop-spectral": {"bias_rate": 1.0}}
"""Settings that were not searched, which are those of `preset="spectral"`."""


def main(
    epochs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Passes over the images.")
    ] = EPOCHS,
    images: Annotated[int, typer.Option(min=4, metavar="N", help="Images to train on.")] = IMAGES,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seed of images, weights and batches.")
    ] = 0,
    out: Annotated[
        Path,
        typer.Option(metavar="PNG", dir_okay=False, writable=True, help="The file of the figure."),
    ] = Path("runs/demo.png"),
) -> list[RunResult]:
    """Train one deep autoencoder with four methods; compare by epoch and by time.

    All methods start from the same weights and see the same batches of curve
    images. LocoProp, in its spectral preset, solves a small convex problem in
    every layer after each backward pass; Muon, and RMSProp and Adam as in
    TensorFlow, use the gradient. The demo prints a table, says who is ahead,
    and writes a figure with loss curves and reconstructed test images.

    [bold]python -m torch_locoprop.study.demo[/bold]
        the full demo, one to two minutes on two CPU cores

    [bold]python -m torch_locoprop.study.demo --epochs 5[/bold]
        a quick look

    [bold]python -m torch_locoprop.study.demo --seed 1[/bold]
        other images and initial weights

    All four methods were tuned by the same number of trials at the default
    --epochs and --images.
    """
    console = Console(highlight=False)
    data = datasets.some_curves(images, images // 4, seed)
    console.print(
        f"{len(data.train)} training images of curves, {len(data.test)} test images. Autoencoder "
        f"{TASK['model']} and back, tanh. {epochs} epochs of batches of {TASK['batch_size']}."
    )
    with TemporaryDirectory() as folder:  # no earlier run is reused
        results = []
        width = max(len(label(method)) for method in TUNED)
        for config in configs(epochs, seed):
            name = f"{label(config.method):<{width}}"
            with watching(console, name, epochs, quiet=False) as watch:
                results.append(run(config, Path(folder, config.method), data=data, on_epoch=watch))
        console.print(_table(results))
        console.print(verdict(results), soft_wrap=True)
        draw(out, results, data)
    console.print(f"Figure: {out}", soft_wrap=True)
    return results


def configs(epochs: int, seed: int) -> list[RunConfig]:
    """Return the runs of the demo, which differ only in the method and its settings."""
    warmup = max(1, epochs // 20)  # as in the paper: 5 of 100
    return [
        RunConfig(
            name,
            {**settings, **FIXED.get(name, {})},
            epochs=epochs,
            warmup_epochs=warmup,
            seed=seed,
            **TASK,
        )
        for name, settings in TUNED.items()
    ]


def _table(results: Sequence[RunResult]) -> Table:
    """Return the results, with the epoch at which each method reaches the best of the others."""
    rival = ranked([each for each in results if each.config.method != "locoprop-spectral"])[0]
    mark = rival.metrics[-1].train_loss
    table = Table("method")
    reaches = f"reaches {label(rival.config.method)}'s {mark:.1f}"
    for heading in ("train loss", "test loss", "seconds", reaches):
        table.add_column(heading, justify="right")
    for result in results:
        last = result.metrics[-1]
        passed = next((row for row in result.metrics if row.train_loss <= mark), None)
        table.add_row(
            label(result.config.method),
            f"{last.train_loss:.1f}",
            f"{last.test_loss:.1f}",
            f"{last.seconds:.1f}",
            f"epoch {passed.epoch}, {passed.seconds:.1f} s" if passed else "–",
        )
    return table
