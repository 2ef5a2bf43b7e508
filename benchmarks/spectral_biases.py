"""Does a step of their own for biases lower the loss of the spectral step on MNIST's autoencoders?

    export TORCH_LOCOPROP_DATA=.data
    python -m benchmarks.spectral_biases --model standard --out biases.json \\
        --cases 0.015:0.85:0 0.015:0.85:1 0.015:0.85:1:1
    python -m benchmarks.spectral_biases --show benchmarks/results/spectral-biases-h200.json

A case is the learning rate, the momentum, `bias_rate` and, if it is not 0, the seed. All cases train
together as one population of the study's method `locoprop-spectral`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.options import add_options
from torch_locoprop.study.data import datasets
from torch_locoprop.study.machine import environment
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.matrix_population import train_together
from torch_locoprop.study.training.run_folder import Metrics


def config_of(case: str, options: argparse.Namespace) -> RunConfig:
    """Return the configuration of a case, such as ``0.015:0.85:1``."""
    lr, momentum, bias_rate, *seed = case.split(":")
    settings = {"lr": float(lr), "momentum": float(momentum), "bias_rate": float(bias_rate)}
    return RunConfig(
        "locoprop-spectral",
        settings,
        dataset=options.dataset,
        model=options.model,
        epochs=options.epochs,
        seed=int(seed[0]) if seed else 0,
        precision="tf32" if options.device == "cuda" else "fp32",
        device=options.device,
    )


def result_of(config: RunConfig, metrics: Sequence[Metrics]) -> dict[str, Any]:
    """Return what a member of the population has reached."""
    return {
        "model": config.model,
        "settings": config.settings,
        "seed": config.seed,
        "epochs": config.epochs,
        "train": metrics[-1].train_loss,
        "test": metrics[-1].test_loss,
        "lowest_test": min(row.test_loss for row in metrics),
        "diverged": metrics[-1].diverged,
        "losses": [round(row.train_loss, 3) for row in metrics],
    }


def table(content: Mapping[str, Any]) -> str:
    """Return the losses as a Markdown table."""
    lines = [
        "| model | lr | momentum | bias_rate | seed | train | test | lowest test |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in content["runs"]:
        own = run["settings"]
        cells = [run["model"], *(f"{own[name]:g}" for name in ("lr", "momentum", "bias_rate"))]
        cells += [f"{run['seed']}", f"{run['train']:.2f}", f"{run['test']:.1f}"]
        lines.append(f"| {' | '.join(cells)} | {run['lowest_test']:.1f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Train the cases and print their losses, or show those of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--model", default="standard")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--cases", nargs="+", metavar="LR:MOMENTUM:RATE[:SEED]")
    add_options(parser, "device", "out", "show")
    options = parser.parse_args(arguments)
    if options.show:
        print(table(json.loads(options.show.read_text())))
        return
    if not options.cases:
        parser.error("Give --cases to train, or --show to read a file.")
    configs = [config_of(case, options) for case in options.cases]
    found = train_together(configs, datasets.load(options.dataset))
    content = {
        "runs": [result_of(*each) for each in zip(configs, found, strict=True)],
        "environment": environment(options.device),
    }
    if options.out:
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(table(content))


if __name__ == "__main__":
    main()
