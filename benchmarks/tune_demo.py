"""Search the settings of the demo, with the same number of trials for each method.

    python -m benchmarks.tune_demo --folder runs/tune-demo --out benchmarks/tune_demo.json

Each method gets `TRIALS` trials of `locoprop tune` (TPE, without pruning) on the task of the demo at
seed 0; the lowest train loss after the last epoch wins. Learning rates are searched over two decades,
the other settings in the ranges of the study. The command continues an interrupted search.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from torch_locoprop.study import methods
from torch_locoprop.study.data import datasets
from torch_locoprop.study.demo.run import EPOCHS, IMAGES, TUNED, configs
from torch_locoprop.study.machine import environment
from torch_locoprop.study.methods.search_space import Space
from torch_locoprop.study.tuning import campaign, spaces

TRIALS = 24
SEED = 0
RATES = {
    "locoprop": "1e-3:1e-1",
    "muon": "1e-3:1e-1",
    "rmsprop": "3e-4:3e-2",
    "adam": "3e-4:3e-2",
}
"""The ranges of the learning rates, two decades each."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("benchmarks.tune_demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/tune-demo"), help="the searches")
    parser.add_argument("--out", type=Path, help="write all trials to this JSON file")
    options = parser.parse_args()
    data = datasets.some_curves(IMAGES, IMAGES // 4, SEED)
    found: dict[str, Any] = {}
    for base in configs(EPOCHS, SEED):
        result = campaign.tune(
            base,
            space(base.method),
            options.folder / base.method,
            trials=TRIALS,
            population=1,
            pruning=False,
            data=data,
        )
        found[base.method] = sorted(map(shown, result.trials), key=_loss)
        print(f"{base.method}: {found[base.method][0]}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(record(found), indent=1) + "\n")


def space(method: str) -> Space:
    """Return where the settings of a method of the demo are searched."""
    return spaces.of(methods.get(method), ranges={"lr": RATES[method]})


def shown(trial: dict[str, Any]) -> dict[str, Any]:
    """Return a trial with four digits of each number; the losses of a diverged one are None."""
    diverged = trial["state"] == "diverged"
    return {
        "setting": {name: float(f"{value:.4g}") for name, value in trial["settings"].items()},
        "train_loss": None if diverged else round(trial["train_loss"], 3),
        "test_loss": None if diverged else round(trial["test_loss"], 3),
    }


def record(found: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the file."""
    ranges = {
        method: {name: domain.to_dict() for name, domain in space(method).items()}
        for method in TUNED
    }
    return {
        "command": "python -m benchmarks.tune_demo --out benchmarks/tune_demo.json",
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment("cpu"),
        "trials": TRIALS,
        "epochs": EPOCHS,
        "images": IMAGES,
        "seed": SEED,
        "ranges": ranges,
        "methods": found,
    }


def _loss(trial: dict[str, Any]) -> float:
    return float("inf") if trial["train_loss"] is None else trial["train_loss"]


if __name__ == "__main__":
    main()
