"""What a step costs where no method waits for the host: every method's step as a CUDA graph.

    python -m benchmarks.graph_clock --models standard deep wide --out graph-clock.json
    python -m benchmarks.graph_clock --show results/timings/cuda-graphs.json

In the study's runs of one configuration, LocoProp and the first-order methods are replayed as CUDA
graphs, and Muon, SOAP, K-FAC and Shampoo run eagerly, so that their seconds compare engineering too.
Here the updates of these four, and of exact-s-muon, are recorded: those of
``study/training/matrix_updates.py`` for one member, with forward and backward pass. The factorisations
that they renew every k steps need the host. They are timed by themselves, as the difference of eager
steps with and without them, and a k-th of that time is added.

A replay repeats the step that was recorded. It takes the time of the next step, but does not train, so
this is a clock and nothing else. On a CPU everything runs eagerly, to try the command.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks import step_table
from benchmarks.clock import milliseconds
from benchmarks.contestants import Task, get
from benchmarks.options import add_options
from benchmarks.steps import graphed
from torch_locoprop.baselines.kfac import EARLY
from torch_locoprop.fast.dispatch import graphs
from torch_locoprop.study import methods
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import environment, matmul_precision
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.matrix_population import Training

OWN = ("sgd", "adamw", "locoprop-s", "locoprop-m", "locoprop-spectral")
"""Methods whose whole training step is one CUDA graph in the study, renewals included."""
OTHERS = ("muon", "soap", "exact-s-muon", "kfac@10", "kfac@100", "shampoo@10", "shampoo@100")
RENEWALS = 2  # that are timed
WHOLE = 100  # steps of a turn: whole cycles of renewals


class Member(Training):
    """One model with one of the other methods, whose steps read the same images again and again."""

    def __init__(self, method: str, task: Task) -> None:
        numbers = torch.Generator().manual_seed(0)
        images = torch.rand(task.batch, task.layers[0][0], generator=numbers)
        settings = methods.get(method).settings
        config = RunConfig(method, settings, model=task.model, device=task.device)
        super().__init__([config], Dataset("random", images, images[:1], "random numbers"))
        self.every = int(settings.get("every", 0))
        self._images = self.train[None]
        self._draw(len(images))  # labels are drawn by the same numbers in every step

    def step(self) -> None:
        """Run forward pass, backward pass and update."""
        with torch.no_grad():
            self.update.step(self.layers, self.passes(self._images), 1.0)

    def before_renewal(self) -> None:
        """Take the steps up to the one that renews factorisations."""
        while self.every and not self._renews:
            self.step()

    @property
    def _renews(self) -> bool:
        """True if the next step renews factorisations; the early ones are over."""
        return self.update.steps % self.every == 0


def of_other(method: str, task: Task, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a step of a method without a CUDA graph of its own in the study."""
    member = Member(method, task)
    for _ in range(EARLY + 2):
        member.step()
    member.before_renewal()
    renewing = []
    for _ in range(RENEWALS if member.every else 0):
        renewing.append(milliseconds(member.step, 1, task.device))
        eager = milliseconds(member.step, 1, task.device)
        renewing[-1] = max(renewing[-1] - eager, 0.0)
        member.before_renewal()
    if member.every:
        member.step()  # the next one renews nothing
    repeat: Callable[[], object] = member.step
    if task.device == "cuda":
        repeat = graphs.Recording(member.step).replay
        repeat()
    step = median(milliseconds(repeat, WHOLE, task.device) for _ in range(rounds))
    renewal = median(renewing) / member.every if renewing else 0.0
    return {"ms": step + renewal, "step_ms": step, "renewals_ms": renewal}


def of_own(method: str, task: Task, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a step that the study replays as a CUDA graph."""
    contestant = get(method)
    step = graphed(contestant, task)
    if step is None:
        ready = contestant.prepare(task, *task.prepared())
        step = ready.step
    for _ in range(max(contestant.warm_up, 10)):
        step()
    return {"ms": median(milliseconds(step, WHOLE, task.device) for _ in range(rounds))}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Return the content of the JSON file."""
    found: dict[str, dict[str, Any]] = {}
    content = {
        "models": found,
        "batch": options.batch,
        "precision": options.precision,
        "rounds": options.rounds,
        "environment": environment(options.device),
    }
    with matmul_precision(options.precision):
        for model in options.models:
            task = Task(model, options.batch, device=options.device)
            found[model] = {}
            for method in options.methods:
                time_of = of_own if method in OWN else of_other
                try:
                    found[model][method] = time_of(method, task, options.rounds)
                except RuntimeError as error:  # a recording that failed
                    found[model][method] = {"missing": str(error)}
                print(model, method, found[model][method], flush=True)
                if options.out:  # what is measured so far, should the machine's time end
                    step_table.write(options.out, content)
    return content


def markdown(content: dict[str, Any]) -> str:
    """Return the table: a row for each method, a column for each model."""
    models = content["models"]
    lines = [f"| ms a step | {' | '.join(models)} |", f"| --- |{' ---: |' * len(models)}"]
    for method in next(iter(models.values())):
        cells = []
        for rows in models.values():
            row = rows.get(method, {"missing": "not measured"})
            if "missing" in row:
                cells.append("–")
                continue
            parts = ""
            if row.get("renewals_ms"):
                parts = f" ({row['step_ms']:.2f} + {row['renewals_ms']:.2f})"
            cells.append(f"{row['ms']:.2f}{parts}")
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["standard"])
    parser.add_argument("--methods", nargs="+", default=[*OWN, *OTHERS])
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="tf32", choices=("fp32", "tf32"))
    add_options(parser, "device", "out", "show")
    options = parser.parse_args(arguments)
    if options.show:
        print(markdown(json.loads(options.show.read_text())))
        return
    if options.device == "cpu":
        options.precision = "fp32"
    print(markdown(measured(options)))


if __name__ == "__main__":
    main()
