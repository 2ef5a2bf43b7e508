"""Time a step of a population: K models of one shape that train together.

    python -m benchmarks.population --device cuda --precision tf32 --out population.json
    python -m benchmarks.population --members 4 --model 784-100-30 --methods locoprop-m

A step is timed as in the study: on a GPU it is a CUDA graph. TFLOP/s are the operations of all members'
matrix products, by formula, over the measured time. A trial is one member for 100 epochs of 60 steps.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torch

from benchmarks import step_table, work
from benchmarks.clock import milliseconds
from benchmarks.contestants import Task
from benchmarks.options import add_options
from torch_locoprop.study.machine import environment, matmul_precision
from torch_locoprop.study.models import architectures
from torch_locoprop.study.training.config import PRECISIONS, RunConfig
from torch_locoprop.study.training.population import GraphedPopulation, Population
from torch_locoprop.study.training.population_run import method_of, numbers_of, transfers_of

WARM_UP = 3
STEPS_OF_A_TRIAL = 100 * 60


def timed(
    task: Task, name: str, precision: str, members: int, rounds: int, steps: int
) -> dict[str, Any]:
    """Time the population of one method; return the row of the table."""
    settings = {"model": task.model, "device": task.device, "precision": precision}
    config = RunConfig(name, **settings)
    method = method_of(config)
    if method is None:
        raise SystemExit(f"{name} has no population. Choose a first-order or LocoProp method.")
    model, images = task.prepared()
    population = Population(
        [model] * members, transfers_of(config), method, [numbers_of(config)] * members
    )
    graphed = GraphedPopulation(population, images, task.batch)
    rows = torch.arange(task.batch, device=task.device)
    for _ in range(WARM_UP):
        graphed.step(rows, 0.01)

    def step() -> None:
        graphed.step(rows, 0.01)

    seconds = median(milliseconds(step, steps, task.device) for _ in range(rounds)) / 1e3
    flop = members * _flop(task, name, method.local_steps)
    return {
        "method": name,
        "ms": 1e3 * seconds,
        "tflop_per_s": flop / seconds / 1e12,
        "trials_per_hour": 3600 / seconds / STEPS_OF_A_TRIAL * members,
        "members_that_diverged": int((population.skipped > 0).sum()),
    }


def _flop(task: Task, name: str, T: int) -> int:
    count = work.gram_flop if name == "locoprop-s" else work.locoprop_flop
    return count(task.layers, task.batch, T)


def markdown(content: dict[str, Any]) -> str:
    """Return the Markdown table."""
    lines = [
        f"{content['members']} members, {content['model']}, batch {content['batch']}, "
        f"{content['precision']}, {content['environment']['machine']}",
        "",
        "| method | ms a step | TFLOP/s | trials of 100 epochs in an hour |",
        "| --- | --- | --- | --- |",
    ]
    for row in content["rows"]:
        lines.append(
            f"| {row['method']} | {row['ms']:.2f} | {row['tflop_per_s']:.1f} "
            f"| {row['trials_per_hour']:.0f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", default=["locoprop-m", "locoprop-s", "rmsprop"])
    parser.add_argument("--members", type=int, default=32, help="models K")
    parser.add_argument("--model", default="standard")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps in a round")
    add_options(parser, "device", "out")
    options = parser.parse_args(arguments)
    architectures.sizes_of(options.model)
    task = Task(options.model, options.batch, device=options.device)
    with matmul_precision(options.precision):
        rows = [
            timed(task, name, options.precision, options.members, options.rounds, options.steps)
            for name in options.methods
        ]
    content = {
        "rows": rows,
        "members": options.members,
        "model": options.model,
        "batch": options.batch,
        "precision": options.precision,
        "environment": environment(options.device),
    }
    if options.out:
        step_table.write(options.out, content)
    step_table.display(markdown(content))


if __name__ == "__main__":
    main()
