"""LocoProp-M with the preconditioned solver and with RMSProp on a small autoencoder, on a CPU.

    python -m benchmarks.local_solvers --out benchmarks/results/local-solvers-cpu.json

The model is 784-100-30-100-784 with tanh, the data the first 2,000 images of MNIST in batches of 200.
A run has 20 epochs: a linear warm-up over one epoch, then a linear decay. RMSProp has ten local
iterations and all rates, distances of the target and momenta in ``RMSPROP``; the preconditioned solver
has its defaults and one to four iterations. Its default ``gamma`` is the best of 3, 7, 10, 14 and 20
tried on this very task with ``local_reduction="sum"`` (0.05 times the batch of 200 is 10), and its
damping of 0.01 was level with 0.001, 0.03 and 0.1; these trials let steps grow more. One seed.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from torch_locoprop import LocoProp
from torch_locoprop.study.data.datasets import load
from torch_locoprop.study.models.autoencoder import deep_autoencoder, reconstruction_loss
from torch_locoprop.study.training.schedules import linear

IMAGES, BATCH, EPOCHS = 2000, 200, 20
REPORTED = (2, 5, 10, 20)
RMSPROP = {"lr": (3e-4, 1e-3, 3e-3), "gamma": (10.0, 30.0), "momentum": (0.9, 0.95, 0.98)}


def run(seed: int = 0, **settings: Any) -> dict[str, Any]:
    """Train with these settings, and return train losses after some epochs and seconds of CPU time."""
    images = load("mnist").train[:IMAGES]
    model = deep_autoencoder((784, 100, 30), generator=torch.Generator().manual_seed(seed))
    optimizer = LocoProp(model, variant="locoprop-m", output_transfer="sigmoid", **settings)
    per_epoch = IMAGES // BATCH
    rate = linear(EPOCHS * per_epoch, per_epoch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    order, losses, began = torch.Generator().manual_seed(seed), {}, time.process_time()
    for epoch in range(1, EPOCHS + 1):
        for rows in torch.randperm(IMAGES, generator=order).split(BATCH):
            reconstruction_loss(model(images[rows]), images[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if epoch in REPORTED:
            with torch.no_grad():
                losses[epoch] = round(reconstruction_loss(model(images), images).item(), 2)
    seconds = round(time.process_time() - began, 1)
    return {"settings": settings, "seed": seed, "losses": losses, "seconds": seconds}


def main() -> None:
    """Run all settings and write them, with their losses, to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    runs = [run(solver="preconditioned", local_steps=steps) for steps in (1, 2, 3, 4)]
    for values in product(*RMSPROP.values()):
        settings = dict(zip(RMSPROP, values, strict=True))
        runs.append(run(solver="rmsprop", local_steps=10, **settings))
    runs.sort(key=lambda each: each["losses"][EPOCHS])
    out.write_text(json.dumps(runs, indent=1) + "\n")
    for each in runs:
        print(each["losses"], f"{each['seconds']} s", each["settings"])


if __name__ == "__main__":
    main()
