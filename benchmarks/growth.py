"""Measure how time and memory of LocoProp's step grow with batch size, width, depth and T.

    python -m benchmarks.growth --quick                                   # small, on a CPU
    python -m benchmarks.growth --device cuda --precision tf32 --out growth-h200.json
    python -m benchmarks.growth --show growth-h200.json --figure growth-h200.png     # no measurement

One of the four is varied at a time, the others stay at the base size. Every layer is `width × width`.
The figure shows the cost of LocoProp minus the cost of BackProp for the same model, and the formulas of
the paper's Table 1, each scaled to equal the measurement at the base size:

    time  Σ b·T·d₁·d₂        memory  Σ d₁·d₂ + b·(d₁ + d₂)
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks import growth_figure
from benchmarks.growth_figure import METHODS
from benchmarks.options import add_options
from benchmarks.step_table import display, write
from torch_locoprop.study.figures import costs
from torch_locoprop.study.machine import environment
from torch_locoprop.study.training.config import RunConfig


@dataclass(frozen=True)
class Size:
    """The size of a measurement: batch size, width, number of layers, and local iterations T."""

    batch: int = 1000
    width: int = 1000
    depth: int = 8
    T: int = 10

    def config(self, method: str, device: str, precision: str) -> RunConfig:
        """Return the configuration of a method at this size: an autoencoder with equal layers."""
        model = "-".join([str(self.width)] * (self.depth // 2 + 1))
        return RunConfig(
            method,
            {"local_steps": self.T} if method in METHODS else {},
            model=model,
            batch_size=self.batch,
            device=device,
            precision=precision,
        )


FULL = {
    "batch": (100, 300, 1000, 3000, 10_000),
    "width": (250, 500, 1000, 2000, 4000, 8000),
    "depth": (4, 8, 16, 32, 64),
    "T": (1, 2, 5, 10, 20, 50),
}
SMALL = Size(batch=200, width=128, depth=8, T=10)
QUICK = {
    "batch": (50, 100, 200, 400, 800),
    "width": (64, 128, 256, 512),
    "depth": (4, 8, 16, 32),
    "T": (1, 2, 5, 10, 20, 50),
}
STEPS = costs.WARM_UP + costs.LEAST_STEPS + costs.STEPS_FOR_MEMORY
"""The least number of steps that a measurement takes."""


@dataclass(frozen=True)
class Point:
    """The cost of a method at one size.

    Args:
        method: the method's name in the study.
        size: the size.
        step_ms: measured milliseconds of a step; None if the measurement would have taken too long.
        peak_mib: measured peak memory.
        operations: multiply-adds of a step by Table 1.
        numbers: stored numbers by Table 1.
    """

    method: str
    size: Size
    step_ms: float | None
    peak_mib: float | None
    operations: float
    numbers: float


def sizes(base: Size, ranges: dict[str, tuple[int, ...]]) -> list[Size]:
    """Return the base and all sizes of the ranges, each with one value changed."""
    varied = [replace(base, **{name: value}) for name in ranges for value in ranges[name]]
    return list(dict.fromkeys([base, *varied]))


def measured(
    base: Size, ranges: dict[str, tuple[int, ...]], device: str, precision: str, max_seconds: float
) -> list[Point]:
    """Measure BackProp and LocoProp at every size.

    The base is measured first. From its time the time of every other measurement is estimated; those
    that would take more than `max_seconds` are left out.
    """
    points: list[Point] = []
    if device == "cuda":  # libraries allocate workspaces once, which the first point would include
        costs.measured(base.config(costs.BASELINE, device, precision))
    for size in sizes(base, ranges):
        for method in (costs.BASELINE, *METHODS):
            config = size.config(method, device, precision)
            if _seconds(config, size, points) > max_seconds:
                points.append(Point(method, size, None, None, *_formulas(config, size)))
                continue
            cost = costs.measured(config)
            points.append(
                Point(method, size, cost.step_ms, cost.peak_mib, cost.operations, cost.numbers)
            )
    return points


def _formulas(config: RunConfig, size: Size) -> tuple[float, float]:
    layers = costs.layers_of(config.model)
    return (
        costs.computation_formula(config.method, layers, size.batch, size.T),
        costs.memory_formula(config.method, layers, size.batch),
    )


def _seconds(config: RunConfig, size: Size, points: list[Point]) -> float:
    """Return the estimated seconds of a measurement: the base's, scaled by the multiply-adds."""
    base = next((p for p in points if p.method == config.method), None)
    if base is None or base.step_ms is None:
        return 0.0
    work, known = (
        each.batch * each.width**2 * each.depth * (1 if config.method == costs.BASELINE else each.T)
        for each in (size, base.size)
    )
    return STEPS * base.step_ms / 1e3 * work / known


def _content(options: argparse.Namespace) -> dict[str, Any]:
    base, ranges = (SMALL, QUICK) if options.quick else (Size(), FULL)
    points = measured(base, ranges, options.device, options.precision, options.max_seconds)
    return {
        "base": asdict(base),
        "ranges": ranges,
        "precision": options.precision,
        "environment": environment(options.device),
        "points": [asdict(point) for point in points],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="use a small base size and small ranges"
    )
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32"))
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=60.0,
        help="leave out measurements that would take longer",
    )
    add_options(parser, "device", "threads", "out", "show", "figure")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    content = json.loads(options.show.read_text()) if options.show else _content(options)
    if options.out:
        write(options.out, content)
    display(growth_figure.markdown(content))
    if options.figure:
        growth_figure.save(content, options.figure.parent, options.figure.stem)


if __name__ == "__main__":
    main()
