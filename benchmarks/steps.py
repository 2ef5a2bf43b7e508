"""Time one whole training step, forward, backward and optimizer, of LocoProp and of others.

    python -m benchmarks.steps --threads 2 --out steps.json
    python -m benchmarks.steps --device cuda --precision tf32 --models standard deep wide
    python -m benchmarks.steps --methods products sgd locoprop-m exact-s-muon
    python -m benchmarks.steps --show benchmarks/results/steps-*.json      # tables; nothing is run
    python -m benchmarks.steps --show benchmarks/results/steps-cpu.json --figure steps-cpu.png

All take turns, round after round, so that a slow moment of the machine meets all of them; the table has
medians over all steps. What is renewed only every k steps is timed over whole cycles, and has means.
`loop` is the ordinary one, `loss.backward(); optimizer.step()`; `graph`, on a GPU, has the whole step
replayed as a CUDA graph, for those that allow it. The floor is LocoProp-M's matrix products alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import step_table, steps_figure
from benchmarks.contestants import CONTESTANTS, FLOOR, Contestant, Ready, Task, get
from torch_locoprop.study.figures.memory import peak_bytes
from torch_locoprop.study.training.machine import environment, matmul_precision
from torch_locoprop.study.training.step import EAGER_STEPS, TrainingStep

# Steps of a turn on a GPU before those that count: others have moved what memory is free, and graphs
# are recorded anew.
SETTLING = 4


@dataclass
class Row:
    """What was measured of one contestant; None where there is nothing to measure."""

    key: str
    name: str
    loop_ms: float | None = None
    quartiles_ms: list[float] | None = None  # of the same: how far steps, or a GPU's rounds, differ
    optimizer_ms: float | None = None
    graph_ms: float | None = None
    needed_gflop: float | None = None  # of the method's products, by formula
    counted_gflop: float | None = None  # of the products that were computed
    peak_mib: float | None = None  # beside model and images
    missing: str | None = None  # why there is nothing


@dataclass
class Turns:
    """A contestant made ready, and its milliseconds so far."""

    row: Row
    contestant: Contestant
    device: str
    ready: Ready
    graph: Callable[[], object] | None
    loop: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)

    def warm_up(self) -> None:
        """States, graphs and libraries come into being, and early steps of another kind pass."""
        for _ in range(self.contestant.warm_up):
            self.ready.step()
        if self.graph is not None:
            for _ in range(EAGER_STEPS + 2):
                self.graph()

    def take(self, steps: int) -> None:
        if self.device == "cuda":
            for _ in range(SETTLING if self.contestant.cycle == 1 else 0):
                self.ready.step()
            # In one go: the host may run ahead of the device, as it does in training.
            self.loop.append(_milliseconds(self.ready.step, steps, self.device))
        whole, optimizer = self._in_parts(steps)
        self.optimizer += optimizer
        if self.device != "cuda":
            self.loop += whole
        if self.graph is not None:
            self.replayed.append(_milliseconds(self.graph, steps, self.device))

    def _in_parts(self, steps: int) -> tuple[list[float], list[float]]:
        """Milliseconds of each step, and of the optimizer's part of it."""
        wholes, parts = [], []
        for _ in range(steps):
            began = _now(self.device)
            if self.ready.gradients is not None:
                self.ready.gradients()
            between = _now(self.device)
            self.ready.update()
            end = _now(self.device)
            wholes.append(1e3 * (end - began))
            parts.append(1e3 * (end - between))
        return wholes, parts if self.ready.gradients is not None else []

    def typical(self, times: list[float]) -> float | None:
        if not times:
            return None
        return median(times) if self.contestant.cycle == 1 else mean(times)

    def quartiles(self) -> list[float] | None:
        if self.contestant.cycle > 1 or len(self.loop) < 2:
            return None
        lower, _, upper = quantiles(self.loop, n=4, method="inclusive")
        return [lower, upper]


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _milliseconds(work: Callable[[], object], steps: int, device: str) -> float:
    began = _now(device)
    for _ in range(steps):
        work()
    return 1e3 * (_now(device) - began) / steps


def steps_in_a_round(cycle: int, rounds: int, steps: int) -> int:
    """Return how many steps to take so that so many rounds together are whole cycles."""
    whole = math.lcm(rounds, cycle)
    return math.ceil(rounds * steps / whole) * whole // rounds


def _ready(contestant: Contestant, task: Task) -> Ready:
    return contestant.prepare(task, *task.prepared())


def graphed(contestant: Contestant, task: Task) -> Callable[[], object] | None:
    """The same step, replayed as a graph, if there is a GPU and it can be."""
    if task.device != "cuda":
        return None
    ready = _ready(contestant, task)
    if contestant == CONTESTANTS[FLOOR]:
        ready.step()  # libraries set up what they need
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ready.step()
        return lambda _=ready: graph.replay()  # whose matrices it reads
    if not getattr(ready.optimizer, "capturable", False):
        return None
    assert ready.optimizer is not None
    assert ready.model is not None
    assert ready.images is not None
    step = TrainingStep(ready.model, ready.optimizer, ready.images)
    step.set_rates([float(group["lr"]) for group in ready.optimizer.param_groups])
    rows = torch.arange(task.batch, device=task.device)
    return lambda: step(rows)


def _peak_mib(contestant: Contestant, task: Task) -> float:
    model, images = task.prepared()
    steps = 6 if task.device == "cuda" else 2  # on a GPU, what a recorded graph sets aside counts

    def work() -> None:
        ready = contestant.prepare(task, model, images)
        for _ in range(steps):
            ready.step()

    return peak_bytes(work, task.device) / 2**20


def _added_flop(_: object, left: torch.Size, right: torch.Size, **more: object) -> int:
    return 2 * left.numel() * right[-1]


def _turned_flop(left: torch.Size, right: torch.Size, *more: object, **named: object) -> int:
    return 2 * left.numel() * right[0]


ADDED = {torch.ops.aten.addmm_: _added_flop, torch.ops.aten.baddbmm_: _added_flop}
if torch.backends.mkldnn.is_available():
    ADDED[torch.ops.mkldnn._linear_pointwise] = _turned_flop
"""Products that torch's counter does not know by itself."""


def _counted_gflop(contestant: Contestant, task: Task) -> float:
    ready = _ready(contestant, task)
    with FlopCounterMode(display=False, custom_mapping=ADDED) as counter:
        ready.step()
    return counter.get_total_flops() / 1e9


def compared(task: Task, keys: Iterable[str], rounds: int, steps: int) -> list[Row]:
    """Measure them all."""
    rows, turns = [], []
    for key in keys:
        contestant = get(key)
        rows.append(Row(key, contestant.name))
        if contestant.flop is not None:
            rows[-1].needed_gflop = contestant.flop(task.layers, task.batch, task.T) / 1e9
        try:
            ready = _ready(contestant, task)
        except ImportError as error:
            rows[-1].missing = str(error)
            continue
        turns.append(Turns(rows[-1], contestant, task.device, ready, graphed(contestant, task)))
        turns[-1].warm_up()
    together = 1 if task.device == "cuda" else rounds  # a GPU's steps are not timed one by one
    for _ in range(rounds):
        for turn in turns:
            turn.take(steps_in_a_round(turn.contestant.cycle, together, steps))
    for turn in turns:
        row, contestant = turn.row, turn.contestant
        row.loop_ms = turn.typical(turn.loop)
        row.quartiles_ms = turn.quartiles()
        row.optimizer_ms = turn.typical(turn.optimizer)
        row.graph_ms = turn.typical(turn.replayed)
        if contestant.cycle == 1:
            row.counted_gflop = _counted_gflop(contestant, task)
        if row.key != FLOOR:
            row.peak_mib = _peak_mib(contestant, task)
    return rows


def _load() -> float:
    """How many threads wanted to run in the last minute, those of this program among them."""
    return round(os.getloadavg()[0], 2)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Return the content of the JSON file."""
    device = options.device
    keys = [key for key in options.methods if device == "cuda" or not get(key).gpu_only]
    load, found = _load(), {}
    with matmul_precision(options.precision):
        for model in options.models:
            task = Task(model, options.batch, options.local_steps, device)
            rows = compared(task, keys, options.rounds, options.steps)
            found[model] = [asdict(row) for row in rows]
    return {
        "models": found,
        "batch": options.batch,
        "local_steps": options.local_steps,
        "precision": options.precision,
        "rounds": options.rounds,
        "steps": options.steps,
        "load": [load, _load()],
        "environment": environment(device),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["standard"])
    parser.add_argument(
        "--methods", nargs="+", default=list(CONTESTANTS), help="the study's have their names there"
    )
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--local-steps", type=int, default=10, help="T")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32"))
    parser.add_argument("--threads", type=int, help="of the CPU; otherwise as many as torch likes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, help="in a round; 2, on a GPU 20")
    parser.add_argument("--out", type=Path, help="a JSON file for what was measured")
    parser.add_argument("--show", type=Path, nargs="+", help="such files, to be shown instead")
    parser.add_argument("--figure", type=Path, help="a file for the figure, .png; a .pdf beside it")
    options = parser.parse_args(arguments)
    if options.show:
        if options.figure and len(options.show) > 1:
            parser.error("--figure draws one file. Give one to --show.")
        step_table.show(options.show)
        if options.figure:
            steps_figure.save(json.loads(options.show[0].read_text()), options.figure)
        return
    options.steps = options.steps or (20 if options.device == "cuda" else 2)
    if options.threads:
        torch.set_num_threads(options.threads)
    content = measured(options)
    if options.out:
        step_table.write(options.out, content)
    step_table.display(step_table.markdown(content))
    if options.figure:
        steps_figure.save(content, options.figure)


if __name__ == "__main__":
    main()
