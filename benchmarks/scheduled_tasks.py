"""The spectral preset on small tasks with a rate that decays to zero, by values of `bias_rate`.

    python -m benchmarks.scheduled_tasks --data-dir DATA --out FILE
    python -m benchmarks.scheduled_tasks --show benchmarks/results/scheduled-tasks-cpu.json

The tasks are those of `benchmarks.defaults`, where rates are constant. The table has the mean train
loss of the last tenth of the steps, relative to that with the first value of `--bias-rates`.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.default_groups import selected
from benchmarks.default_runs import indices
from benchmarks.default_tasks import Task
from benchmarks.options import add_options
from torch_locoprop import LocoProp
from torch_locoprop.solvers import Spectral
from torch_locoprop.study.machine import environment

NAMES = (
    *("classifier", "autoencoder-pixels-100", "autoencoder-mse-200", "halves-300", "friedman-200"),
    *("cnn-200", "deep-layernorm-100", "residual-cnn-100", "gpt-300"),
    *("held-curves-300", "held-batchnorm-400", "held-friedman-600"),
)


def final_loss(
    task: Task, lr: float, bias_rate: float, seed: int, folder: Path | None, steps: int
) -> float:
    """Return the mean train loss of the last tenth of the steps."""
    data = task.data(folder, "cpu")
    torch.manual_seed(seed)
    model = task.model()
    solver = Spectral(bias_rate=bias_rate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the parameters that AdamW trains
        opt = LocoProp(model, preset="spectral", solver=solver, lr=lr)
    schedule = LambdaLR(opt, lambda step: 1 - step / steps)
    batches, losses = indices(data.size, task.batch, seed, "cpu"), []
    for _ in range(steps):
        inputs, targets = data.batch(next(batches))
        loss = task.loss(model(inputs), targets)
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
    return mean(losses[-max(steps // 10, 1) :])


def table(content: Mapping[str, Any]) -> str:
    """Return the losses relative to those with the first value of `bias_rate`, as Markdown."""
    first, *others = content["bias_rates"]
    heads = [f"lr {lr:g}, bias_rate {rate:g}" for lr in content["rates"] for rate in others]
    lines = [f"| task | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    columns: list[list[float]] = [[] for _ in heads]
    for task, losses in content["losses"].items():
        row = []
        for lr in content["rates"]:
            base = mean(losses[f"{lr:g}, {first:g}"])
            row += [mean(losses[f"{lr:g}, {rate:g}"]) / base for rate in others]
        for column, ratio in zip(columns, row, strict=True):
            column.append(ratio)
        lines.append(f"| {task} | {' | '.join(f'{ratio:.3f}' for ratio in row)} |")
    means = " | ".join(f"{geometric_mean(column):.3f}" for column in columns)
    return "\n".join([*lines, f"| geometric mean | {means} |"])


def main(arguments: list[str] | None = None) -> None:
    """Train all tasks and print the table, or show that of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=list(NAMES))
    parser.add_argument("--rates", type=float, nargs="+", default=[0.015, 0.04])
    parser.add_argument("--bias-rates", type=float, nargs="+", default=[0.0, 0.3, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, help="fewer steps, to try the command")
    parser.add_argument("--data-dir", type=Path, help="folder with the data sets")
    add_options(parser, "out", "show")
    options = parser.parse_args(arguments)
    if options.show:
        print(table(json.loads(options.show.read_text())))
        return
    losses: dict[str, dict[str, list[float]]] = {}
    content = {
        "rates": options.rates,
        "bias_rates": options.bias_rates,
        "seeds": options.seeds,
        "losses": losses,
        "environment": environment("cpu"),
    }
    for task in selected(options.tasks):
        losses[task.name] = {
            f"{lr:g}, {rate:g}": [
                final_loss(task, lr, rate, seed, options.data_dir, options.steps or task.steps)
                for seed in options.seeds
            ]
            for lr in options.rates
            for rate in options.bias_rates
        }
        print(task.name, losses[task.name], flush=True)
        if options.out:
            options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(table(content))


if __name__ == "__main__":
    main()
