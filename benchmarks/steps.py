"""Time one whole training step of LocoProp and of other optimizers: forward, backward, update.

    python -m benchmarks.steps --threads 2 --out steps.json
    python -m benchmarks.steps --device cuda --precision tf32 --models standard deep wide
    python -m benchmarks.steps --methods products sgd locoprop-m exact-s-muon
    python -m benchmarks.steps --show benchmarks/results/steps-*.json      # no measurement
    python -m benchmarks.steps --show benchmarks/results/steps-cpu.json --figure steps-cpu.png

The methods take turns, round after round, so that a slow moment of the machine affects all of them.
The table shows medians over all steps. Methods that do expensive work in every k-th step only are timed
over whole cycles of k steps, and the table shows their means. `loop` is the plain training loop. `CUDA
graph` is the whole step replayed as a CUDA graph on a GPU, for methods that allow it. `products` are
the matrix products of LocoProp-M alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import step_table
from benchmarks.clock import milliseconds, now
from benchmarks.contestants import CONTESTANTS, FLOOR, Contestant, Ready, Task, get
from benchmarks.options import add_options
from torch_locoprop.fast.cuda_graph import EAGER_STEPS
from torch_locoprop.study.figures.memory import peak_bytes
from torch_locoprop.study.machine import environment, matmul_precision
from torch_locoprop.study.models.autoencoder import reconstruction_loss
from torch_locoprop.training_step import TrainingStep

# Steps at the start of a turn on a GPU that are not timed: the other methods have changed which memory
# is free, so CUDA graphs are recorded again.
SETTLING = 4


@dataclass
class Row:
    """The measurements of one method; None where there is none.

    Args:
        key: the method's key.
        name: its name in the table.
        loop_ms: milliseconds of a step in a plain loop.
        quartiles_ms: lower and upper quartile of these, over steps or, on a GPU, over rounds.
        optimizer_ms: milliseconds of the optimizer's part.
        graph_ms: milliseconds of a step as a CUDA graph.
        needed_gflop: operations of the method's products, by formula.
        counted_gflop: operations of the products that were computed.
        peak_mib: peak memory beside the model and the images.
        missing: why the method was not measured.
    """

    key: str
    name: str
    loop_ms: float | None = None
    quartiles_ms: list[float] | None = None
    optimizer_ms: float | None = None
    graph_ms: float | None = None
    needed_gflop: float | None = None
    counted_gflop: float | None = None
    peak_mib: float | None = None
    missing: str | None = None


@dataclass
class Turns:
    """A method that is ready to be timed, and its milliseconds so far."""

    row: Row
    contestant: Contestant
    device: str
    ready: Ready
    graph: Callable[[], object] | None
    loop: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)

    def warm_up(self) -> None:
        """Take the steps that are not timed: they allocate states and record CUDA graphs."""
        for _ in range(self.contestant.warm_up):
            self.ready.step()
        if self.graph is not None:
            for _ in range(max(EAGER_STEPS + 2, self.contestant.warm_up)):
                self.graph()

    def take(self, steps: int) -> None:
        """Time some steps in every way."""
        if self.device == "cuda":
            for _ in range(SETTLING if self.contestant.cycle == 1 else 0):
                self.ready.step()
            # Without waiting between steps: the host may run ahead of the device, as in training.
            self.loop.append(milliseconds(self.ready.step, steps, self.device))
        whole, optimizer = self._in_parts(steps)
        self.optimizer += optimizer
        if self.device != "cuda":
            self.loop += whole
        if self.graph is not None:
            self.replayed.append(milliseconds(self.graph, steps, self.device))

    def _in_parts(self, steps: int) -> tuple[list[float], list[float]]:
        """Return the milliseconds of each step, and of the optimizer's part of each."""
        wholes, parts = [], []
        for _ in range(steps):
            began = now(self.device)
            if self.ready.gradients is not None:
                self.ready.gradients()
            between = now(self.device)
            self.ready.update()
            end = now(self.device)
            wholes.append(1e3 * (end - began))
            parts.append(1e3 * (end - between))
        return wholes, parts if self.ready.gradients is not None else []

    def typical(self, times: list[float]) -> float | None:
        """Return the median, or the mean if the method's steps differ within a cycle."""
        if not times:
            return None
        return median(times) if self.contestant.cycle == 1 else mean(times)

    def quartiles(self) -> list[float] | None:
        """Return the lower and upper quartile of the loop's times, if all steps are alike."""
        if self.contestant.cycle > 1 or len(self.loop) < 2:
            return None
        lower, _, upper = quantiles(self.loop, n=4, method="inclusive")
        return [lower, upper]


def steps_in_a_round(cycle: int, rounds: int, steps: int) -> int:
    """Return the steps of a round, at least `steps`, such that all rounds together are whole cycles."""
    whole = math.lcm(rounds, cycle)
    return math.ceil(rounds * steps / whole) * whole // rounds


def _ready(contestant: Contestant, task: Task) -> Ready:
    return contestant.prepare(task, *task.prepared())


def graphed(contestant: Contestant, task: Task) -> Callable[[], object] | None:
    """Return the step as a CUDA graph, or None on a CPU or if the method does not allow it."""
    if task.device != "cuda":
        return None
    ready = _ready(contestant, task)
    if contestant == CONTESTANTS[FLOOR]:
        ready.step()  # libraries allocate workspaces in the first call
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ready.step()
        return lambda _=ready: graph.replay()  # keeps the matrices that the CUDA graph reads
    if not getattr(ready.optimizer, "capturable", False):
        return None
    assert ready.optimizer is not None
    assert ready.model is not None
    assert ready.images is not None
    step = TrainingStep(ready.model, reconstruction_loss, ready.optimizer)
    images = ready.images[: task.batch]
    return lambda: step(images, images)


def _peak_mib(contestant: Contestant, task: Task) -> float:
    model, images = task.prepared()
    steps = 6 if task.device == "cuda" else 2  # on a GPU, enough to record CUDA graphs

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
"""Formulas for products that torch's counter does not know."""


def _counted_gflop(contestant: Contestant, task: Task) -> float:
    ready = _ready(contestant, task)
    with FlopCounterMode(display=False, custom_mapping=ADDED) as counter:
        ready.step()
    return counter.get_total_flops() / 1e9


def compared(task: Task, keys: Iterable[str], rounds: int, steps: int) -> list[Row]:
    """Measure the methods of these keys and return their rows."""
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
    together = 1 if task.device == "cuda" else rounds  # on a GPU, a round is timed as a whole
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
    """Return the load average of the last minute; it includes this program."""
    return round(os.getloadavg()[0], 2)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all models and return the content of the JSON file."""
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


def _draw(content: dict[str, Any], path: Path) -> None:
    """Save the figure; only this needs matplotlib."""
    from benchmarks import steps_figure

    steps_figure.save(content, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["standard"])
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(CONTESTANTS),
        help="keys of the table, or methods of the study",
    )
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--local-steps", type=int, default=10, help="local iterations T")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, help="steps in a round (default: 2, on a GPU 20)")
    add_options(parser, "device", "threads", "out", "figure")
    add_options(parser, "show", nargs="+")
    options = parser.parse_args(arguments)
    if options.show:
        if options.figure and len(options.show) > 1:
            parser.error("--figure draws one file: give one file to --show.")
        step_table.show(options.show)
        if options.figure:
            _draw(json.loads(options.show[0].read_text()), options.figure)
        return
    options.steps = options.steps or (20 if options.device == "cuda" else 2)
    if options.threads:
        torch.set_num_threads(options.threads)
    content = measured(options)
    if options.out:
        step_table.write(options.out, content)
    step_table.display(step_table.markdown(content))
    if options.figure:
        _draw(content, options.figure)


if __name__ == "__main__":
    main()
