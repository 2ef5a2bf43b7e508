"""Time `optimizer.step()` in an ordinary loop, `loss.backward(); optimizer.step()`, on the study's models.

    python benchmarks/eager_step.py --device cuda --precision tf32 --models standard

`locoprop-m, no graph` has `cuda_graph=False`: every kernel is launched by the host. Methods take turns, and
the table has medians: of the whole step, and of `optimizer.step()` alone.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.optim import Optimizer

from torch_locoprop import LocoProp
from torch_locoprop.study import methods, models
from torch_locoprop.study.autoencoder import reconstruction_loss
from torch_locoprop.study.machine import environment, matmul_precision

METHODS = ("adamw", "muon", "locoprop-m", "locoprop-s", "exact-s-muon", "locoprop-m, no graph")


def built(name: str, model: nn.Module) -> Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    base, _, plain = name.partition(", ")
    own = methods.get(base)
    optimizer = own.build(model, {**own.settings, "weight_decay": 1e-5})
    if plain and isinstance(optimizer, LocoProp):
        optimizer._replays = False
    return optimizer


class Loop:
    def __init__(self, name: str, model: str, batch: int, device: str) -> None:
        self.device = device
        self.model = models.build(model).to(device)
        self.optimizer = built(name, self.model)
        self.images = torch.rand(batch, models.sizes_of(model)[0], device=device)

    def step(self) -> tuple[float, float]:
        """Milliseconds of the whole step and of the optimizer's part."""
        began = self._now()
        reconstruction_loss(self.model(self.images), self.images).backward()
        between = self._now()
        self.optimizer.step()
        end = self._now()
        self.optimizer.zero_grad()
        return 1e3 * (end - began), 1e3 * (end - between)

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["standard"])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20, help="of each method in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--out", type=Path, help="a JSON file for the times")
    options = parser.parse_args()
    times: dict[str, dict[str, dict[str, float]]] = {}
    with matmul_precision(options.precision):
        for model in options.models:
            loops = {n: Loop(n, model, options.batch, options.device) for n in options.methods}
            for loop in loops.values():
                for _ in range(5):
                    loop.step()
            taken = {name: [] for name in loops}
            for _ in range(options.rounds):
                for name, loop in loops.items():
                    taken[name] += [loop.step() for _ in range(options.steps)]
            times[model] = {
                name: {"whole": median(t[0] for t in each), "optimizer": median(t[1] for t in each)}
                for name, each in taken.items()
            }
            for name, value in times[model].items():
                print(
                    f"{model:9} {name:22} {value['whole']:8.2f} ms, "
                    f"optimizer.step() {value['optimizer']:8.2f}",
                    flush=True,
                )
    if options.out:
        content = {
            "milliseconds": times,
            "batch": options.batch,
            "precision": options.precision,
            "environment": environment(options.device),
        }
        options.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
