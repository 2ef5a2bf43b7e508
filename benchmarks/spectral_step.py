"""The spectral step on a CPU, relative to its matrix products and to the step of torch's Muon.

    python -m benchmarks.spectral_step --out benchmarks/results/spectral-step-cpu.json

A round is a cycle of ten steps of each: one of them renews C and its inverse. The optimizer's `step()`
is timed, without the passes. `products` are the products, the Cholesky factor and its inverse of the
same ten steps, on matrices of the same shapes and dtypes, by the same library (oneDNN or MKL). `alone`
is the step of each layer alone, without stacks of small layers of one shape. `--preset spectral` times
the step without agreement and growth, which `LocoProp(model)` has. Times are CPU times of one
thread, rounds take turns, and ratios are medians over the rounds, so that other programs on the machine
matter little.

On CPUs that lack some instructions, products in bfloat16 need ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.default_methods import MuonAndAdamW
from benchmarks.default_models import autoencoder
from torch_locoprop import LocoProp
from torch_locoprop.fast import dispatch
from torch_locoprop.paper.spectral import damped_inverse, has_fast_bf16
from torch_locoprop.stepping import stacked_steps
from torch_locoprop.study.machine import environment

MODELS = {
    "small": ((196, 64, 16), 50),
    "demo": ((784, 250, 100, 20), 200),
    "standard": ((784, 1000, 500, 250, 30), 1000),
    "8 of 16": ((16,) * 5, 64),
    "8 of 64": ((64,) * 5, 64),
    "4 of 64": ((64,) * 3, 64),
    "2 of 64": ((64,) * 2, 64),
    "8 of 128": ((128,) * 5, 64),
    "2 of 128": ((128,) * 2, 64),
    "8 of 256": ((256,) * 5, 64),
}
"""Widths from the input to the code, and rows of a batch. The last models have layers of one shape."""
CYCLE = 10


class Products:
    """The matrix products of a layer's spectral steps, on random matrices."""

    def __init__(self, layer: nn.Linear, rows: int, bf16: bool) -> None:
        d, n = layer.out_features, layer.in_features + 1
        self._x, gradient = torch.randn(rows, n), torch.randn(d, n)
        self._found, self._inverse = gradient, torch.randn(n, n)
        dtype = torch.bfloat16 if bf16 and has_fast_bf16(gradient) else torch.float32
        self._factor = torch.randn(min(d, n), max(d, n)).to(dtype)
        self._square = torch.randn(min(d, n), min(d, n)).to(dtype)

    def step(self, renews: bool) -> None:
        """Compute the products of one step."""
        if renews:
            damped_inverse(self._x.mT @ self._x / len(self._x), 0.1, None)
        _ = dispatch.product(self._found, self._inverse)
        for _ in range(5):
            _ = dispatch.product(self._factor, self._factor.mT)
            _ = dispatch.product(self._square, self._square)
            _ = dispatch.product(self._square, self._factor)


def gradients(model: nn.Module, x: Tensor) -> None:
    """Compute the gradients of a mean squared error, which LocoProp's hooks record."""
    model.zero_grad()
    (model(x) - x).square().mean().backward()


def timed(step: Callable[[int], Any], before: Callable[[], None]) -> float:
    """Return the CPU milliseconds of a cycle of steps."""
    total = 0.0
    for number in range(CYCLE):
        before()
        began = time.thread_time()
        step(number)
        total += time.thread_time() - began
    return 1e3 * total


def measured(name: str, rounds: int, preset: str = "general") -> dict[str, Any]:
    """Return the medians of a model: milliseconds of a step, and ratios."""
    widths, rows = MODELS[name]
    x = torch.rand(rows, widths[0])
    ours, other, theirs = (autoencoder(widths, "tanh") for _ in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt, alone = LocoProp(ours, preset=preset), LocoProp(other, preset=preset)
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    muon = MuonAndAdamW(matrices, [p for p in theirs.parameters() if p.dim() < 2], 0.01)
    layers = [layer for layer in ours if isinstance(layer, nn.Linear)]
    products = [Products(layer, rows, bf16=True) for layer in layers]

    def multiply(number: int) -> None:
        for each in products:
            each.step(number == 0)

    def step_alone(number: int) -> None:
        with patch.object(stacked_steps, "LARGEST", 0):
            alone.step()

    turns: dict[str, tuple[Callable[[int], Any], Callable[[], None]]] = {
        "spectral": (lambda number: opt.step(), lambda: gradients(ours, x)),
        "products": (multiply, lambda: None),
        "alone": (step_alone, lambda: gradients(other, x)),
        "muon": (lambda number: muon.step(), lambda: gradients(theirs, x)),
    }
    times: dict[str, list[float]] = {key: [] for key in turns}
    for number in range(rounds + 2):  # the first two warm up; the first ten steps all renew C
        for key, turn in turns.items():
            found = timed(*turn)
            if number >= 2:
                times[key].append(found / CYCLE)
    ratios = {
        f"over {key}": round(
            median(a / b for a, b in zip(times["spectral"], times[key], strict=True)), 3
        )
        for key in ("products", "muon", "alone")
    }
    row = {"model": name, "preset": preset}
    return {**row, **{f"{k} ms": round(median(t), 3) for k, t in times.items()}, **ratios}


def main() -> None:
    """Measure all models, print the rows and write them to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--preset", choices=("general", "spectral"), default="general")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.models:
        rows.append(measured(name, options.rounds, options.preset))
        print(rows[-1], flush=True)
    content = {
        "command": "python -m benchmarks.spectral_step",
        "environment": environment("cpu"),
        "rows": rows,
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
