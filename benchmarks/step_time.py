"""Time one training step of each method on the study's models, and print ratios to plain BackProp.

    python benchmarks/step_time.py --device cuda --precision tf32 --models standard deep wide

Every method takes steps in turn, round after round, so that a slow moment of the machine meets all of
them; the table has the median of the rounds.

`step_time-h200-*.json` were made before the first-order baselines were captured as graphs: SGD, RMSProp
and Adam are eager in them, LocoProp is not. As a graph, SGD took 0.69 ms and RMSProp 0.63 (standard).
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

from torch_locoprop.study import methods, models
from torch_locoprop.study.machine import environment, matmul_precision
from torch_locoprop.study.step import TrainingStep

METHODS = ("sgd", "rmsprop", "adam", "locoprop-s", "locoprop-m", "kfac@10", "shampoo@100", "muon")


def step_of(method: str, model: str, batch: int, device: str) -> TrainingStep:
    network = models.build(model).to(device)
    own = methods.get(method)
    optimizer = own.build(network, {**own.settings, "weight_decay": 1e-5})
    images = torch.rand(batch, models.sizes_of(model)[0], device=device)
    step = TrainingStep(network, optimizer, images)
    step.set_rates([float(group["lr"]) for group in optimizer.param_groups])
    return step


def milliseconds(step: TrainingStep, rows: torch.Tensor, steps: int) -> float:
    _wait(rows)
    began = time.perf_counter()
    for _ in range(steps):
        step(rows)
    _wait(rows)
    return (time.perf_counter() - began) / steps * 1e3


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


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
    times: dict[str, dict[str, float]] = {}
    with matmul_precision(options.precision):
        for model in options.models:
            steps = {
                name: step_of(name, model, options.batch, options.device)
                for name in options.methods
            }
            rows = torch.arange(options.batch, device=options.device)
            for step in steps.values():
                milliseconds(step, rows, 5)  # states, graphs and libraries come into being
            rounds = [
                {name: milliseconds(step, rows, options.steps) for name, step in steps.items()}
                for _ in range(options.rounds)
            ]
            times[model] = {name: median(each[name] for each in rounds) for name in steps}
            for name, value in times[model].items():
                ratio = value / times[model][options.methods[0]]
                print(f"{model:9} {name:12} {value:8.2f} ms  {ratio:6.1f} x", flush=True)
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
