"""Time the two kernels of a local iteration, and the least work that each of them needs.

    python -m benchmarks.kernels --out kernels.json
    python -m benchmarks.kernels --show benchmarks/results/kernels-h200-tf32.json

Each kernel is launched several times in a CUDA graph, for one layer or for one layer of a population.
`residual` computes a matrix product and writes the change of the transferred pre-activations. `step`
computes a matrix product, and reads and writes weights and solver state. For comparison, the product of
`residual` is computed by cuBLAS, and as many numbers as `step` reads and writes are read and written by
elementwise operations.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import step_table
from benchmarks.options import add_options
from torch_locoprop.fast.triton.local_iterations import ByRows, Step
from torch_locoprop.fast.triton.rmsprop import TensorAndState
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import Matching
from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.targets import MirrorDescent
from torch_locoprop.paper.transfers import Tanh
from torch_locoprop.solvers.base import Numbers
from torch_locoprop.study.machine import environment, matmul_precision
from torch_locoprop.study.training.config import PRECISIONS

LAUNCHES, ROUNDS = 10, 5
NUMBERS = Numbers(1e-9, 0.9, 0.99, 1e-5)


class Shape(NamedTuple):
    """A layer `[d, n]` with a number of rows, in a population of some members."""

    members: int
    d: int
    n: int
    rows: int = 1000


SHAPES = {
    "standard, the first layer": Shape(1, 1000, 784),
    "a layer of 3000 × 2000": Shape(1, 3000, 2000),
    "32 members, the first layer": Shape(32, 1000, 784),
    "32 members, the second layer": Shape(32, 500, 1000),
}


def iteration(shape: Shape, device: str) -> tuple[LocalProblem, dict[str, TensorAndState]]:
    """Return a local problem of LocoProp-M with tanh, and the tensors that its iterations move."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return 0.05 * torch.randn(*sizes, generator=generator, device=device)

    members, d, n, rows = shape
    start = {"weight": drawn(members, d, n), "bias": drawn(members, d)}
    problem = LocalProblem(
        linear_map=Dense(), x=drawn(members, rows, n), start=start, fixed={},
        backprop={name: drawn(*t.shape) for name, t in start.items()}, target=MirrorDescent(),
        loss=Matching(), transfer=Tanh(), gamma=1.0, eta=NUMBERS.lr,
        regularizer=REGULARIZERS["none"],
    )  # fmt: skip
    at = {
        name: TensorAndState(*(drawn(*t.shape) for _ in TensorAndState._fields))._replace(
            square=torch.ones_like(t)
        )
        for name, t in start.items()
    }
    return problem, at


def works(shape: Shape, device: str) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name."""
    problem, at = iteration(shape, device)
    rows, weight, first = ByRows(problem, at), at["weight"], problem.backprop["weight"]

    def passes() -> None:
        for tensor in weight:
            tensor.mul_(1.0)
        first.sum()

    return {
        "residual": rows.residual,
        "its product by cuBLAS": lambda: weight.tensor @ problem.x.mT,
        "step": lambda: rows.step(NUMBERS, Step(1.0, None)),
        "as many reads and writes": passes,
    }


def microseconds(work: Callable[[], object]) -> float:
    """Return the microseconds of one launch: the median over several replays of a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            work()
    graph.replay()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began) / LAUNCHES)
    return median(times)


def markdown(content: dict[str, Any]) -> str:
    """Return the Markdown table: microseconds, and TFLOP/s where a product is computed."""
    names = list(next(iter(content["layers"].values()))["us"])
    cells = []
    for layer, found in content["layers"].items():
        own = [
            f"{us:.1f}" + (f" ({1e3 * found['gflop'] / us:.0f})" if "reads" not in name else "")
            for name, us in found["us"].items()
        ]
        cells.append([layer, *own])
    where = content["environment"]
    notes = [f"Microseconds (TFLOP/s), {content['precision']}, {where['machine']}."]
    notes += [content["note"]] if "note" in content else []
    return "\n\n".join([step_table.table(["", *names], cells), *notes])


def measured(precision: str) -> dict[str, Any]:
    """Time all functions for all shapes on the GPU; return the content of the JSON file."""
    layers = {}
    with matmul_precision(precision):
        for name, shape in SHAPES.items():
            us = {each: microseconds(work) for each, work in works(shape, "cuda").items()}
            gflop = 2e-9 * shape.members * shape.d * shape.n * shape.rows
            layers[name] = {"shape": shape._asdict(), "gflop": gflop, "us": us}
    return {"layers": layers, "precision": precision, "environment": environment("cuda")}


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments, measure or read a file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--precision", default="tf32", choices=PRECISIONS)
    add_options(parser, "out", "show")
    options = parser.parse_args(arguments)
    if not options.show and not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a GPU; torch finds no GPU here.")
    content = json.loads(options.show.read_text()) if options.show else measured(options.precision)
    if options.out:
        step_table.write(options.out, content)
    step_table.display(markdown(content))


if __name__ == "__main__":
    main()
