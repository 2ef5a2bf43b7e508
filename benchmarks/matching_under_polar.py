"""Does LocoProp-M under the polar step serve better than LocoProp-S? On small autoencoders, on a CPU.

    python -m benchmarks.matching_under_polar --data-dir DATA --out benchmarks/results/matching-cpu.json

The spectral step takes the polar factor of the closed form of LocoProp-S. Here the polar factor is
that of a local solution instead: `solver="preconditioned"` solves LocoProp-S or LocoProp-M on the rows
of the batch in one to four iterations, and `apply="gradient"` hands the displacement to the spectral
step without its C. `closed-form` is the spectral step itself, with its running average of C. All have
an agreement of 1, a constant rate, and the same three rates. Tasks and losses are those of
`benchmarks.defaults`.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.default_groups import TASKS
from benchmarks.default_methods import BUILDERS, Settings
from benchmarks.default_runs import Job, train
from benchmarks.default_tasks import Task
from torch_locoprop import LocoProp
from torch_locoprop.functional import spectral

NAMES = ("autoencoder-sum-200", "autoencoder-mse-200", "autoencoder-pixels-100")
OUTPUTS = {"autoencoder-mse-200": "linear"}  # sigmoid elsewhere
RATES = (0.02, 0.04, 0.08)
ITERATIONS = (1, 2, 4)


class PolarStep(Optimizer):
    """The spectral step without C along the gradients of linear layers, weight and bias together."""

    def __init__(self, layers: list[nn.Linear], lr: float) -> None:
        super().__init__([p for layer in layers for p in layer.parameters()], {"lr": lr})
        self._layers = layers
        self._states: list[dict[str, Tensor] | None] = [None] * len(layers)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every layer along the polar factor of its average gradient."""
        for i, layer in enumerate(self._layers):
            assert layer.weight.grad is not None
            assert layer.bias.grad is not None
            joint = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1)
            lr = self.param_groups[0]["lr"]
            moved, self._states[i] = spectral(joint, None, self._states[i], lr=lr, agreement=1.0)
            layer.weight += moved[:, :-1]
            layer.bias += moved[:, -1]


def build(model: nn.Module, task: Task, settings: Settings) -> Optimizer:
    """Return the polar step of local solutions, or the spectral step for the method `closed-form`."""
    method, lr = settings["local"], settings["lr"]
    if method == "closed-form":
        return LocoProp(model, lr=lr)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return LocoProp(
        model,
        variant=method,
        solver="preconditioned",
        local_steps=settings["iterations"],
        output_transfer=OUTPUTS.get(task.name, "sigmoid"),
        apply="gradient",
        outer=lambda params: PolarStep(layers, lr),
    )


BUILDERS["under-polar"] = build


def candidates() -> list[dict[str, Any]]:
    """Return the local problems with their numbers of iterations, each at all rates."""
    local: list[dict[str, Any]] = [{"local": "closed-form"}]
    for method, iterations in product(("locoprop-s", "locoprop-m"), ITERATIONS):
        local.append({"local": method, "iterations": iterations})
    return [{**own, "lr": lr} for own in local for lr in RATES]


def main() -> None:
    """Run all candidates on all tasks, print the best rate of each, and write all runs to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tasks", nargs="+", default=list(NAMES), choices=list(TASKS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    for name in options.tasks:
        best: dict[str, tuple[float, float]] = {}
        for settings in candidates():
            result = train(Job(name, "under-polar", settings, 0, "cpu"), options.data_dir)
            loss = result.final if math.isfinite(result.final) else None
            runs.append({"task": name, **settings, "train": loss, "test": result.test})
            key = f"{settings['local']} {settings.get('iterations', '')}"
            best[key] = min(best.get(key, (math.inf, 0.0)), (result.final, settings["lr"]))
        for key, (final, lr) in best.items():
            print(f"{name}: {key:14} {final:.5g} at {lr}", flush=True)
    lines = ",\n ".join(map(json.dumps, runs))
    options.out.write_text(f"[\n {lines}\n]\n")


if __name__ == "__main__":
    main()
