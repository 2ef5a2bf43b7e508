"""Does Shampoo gain if its roots are computed in each of the first steps, as K-FAC's inverses are?

    python -m benchmarks.early_roots --out early.json

Autoencoders of generated curves of 14 x 14 pixels, with Shampoo at several learning rates, three seeds
each, and roots that are computed every 10 or every 100 steps. `early` is the number of first steps that
compute them too. One schedule falls linearly from the first step; the other is the paper's, whose first
epoch has the rate zero, so that roots from a single batch do less harm.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import environment
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.matrix_population import train_together
from torch_locoprop.study.training.run_folder import Metrics

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
SEEDS = (0, 1, 2)
EARLY = (0, 3, 10, 20)
SCHEDULES = {"linear": 0, "paper": 2}
"""The schedules, with their epochs of warm-up."""


def row(schedule: str, every: int, early: int, epochs: int, model: str) -> dict[str, Any]:
    """Train all rates and seeds; return the losses at the best rate, and how long all took."""
    began = time.perf_counter()
    configs = [
        RunConfig(
            f"shampoo@{every}",
            {"lr": rate, "momentum": 0.8, "decay": 0.95, "early": early},
            model=model,
            batch_size=200,
            epochs=epochs,
            warmup_epochs=SCHEDULES[schedule],
            schedule=schedule,
            seed=seed,
        )
        for rate in RATES
        for seed in SEEDS
    ]
    found = train_together(configs, _images())
    of_rate = {rate: found[len(SEEDS) * k :][: len(SEEDS)] for k, rate in enumerate(RATES)}
    best = min(of_rate, key=lambda rate: _mean(of_rate[rate], epochs))
    return {
        "schedule": schedule,
        "every": every,
        "early": early,
        "lr": best,
        "train": [rows[-1].train_loss for rows in of_rate[best]],
        "after_first_epoch": _mean(of_rate[best], 1),
        "diverged": sum(rows[-1].diverged for rows in found),
        "seconds": time.perf_counter() - began,
    }


def _images() -> Dataset:
    whole = datasets.some_curves(4000, 1000)
    return Dataset("curves", _smaller(whole.train), _smaller(whole.test), "14 x 14 pixels")


def _smaller(images: Tensor) -> Tensor:
    return F.avg_pool2d(images.reshape(-1, 1, 28, 28), 2).flatten(1)


def _mean(runs: Sequence[Sequence[Metrics]], epoch: int) -> float:
    """Return the mean train loss after an epoch; infinite if a run has diverged before."""
    if any(len(rows) <= epoch or rows[-1].diverged for rows in runs):
        return float("inf")
    return mean(rows[epoch].train_loss for rows in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--model", default="196-100-50-12")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for schedule, every, early in product(SCHEDULES, (10, 100), EARLY):
        rows.append(row(schedule, every, early, options.epochs, options.model))
        print(rows[-1], flush=True)
    if options.out:
        content = {"rows": rows, "epochs": options.epochs, "model": options.model}
        text = json.dumps({**content, "environment": environment("cpu")}, indent=1)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
