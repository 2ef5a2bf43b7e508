"""Time LocoProp-M with other tile sizes of its kernels.

The fastest ones are the values in `torch_locoprop/fast/triton/matrix_products.py`.

    python -m benchmarks.parts --residual 128x128x32x8x3 --step 128x128x32x8x4 64x64x32x4x4
    python -m benchmarks.parts --precision fp32 --models wide --processes 8 --out parts.json
    python -m benchmarks.parts --show benchmarks/results/parts-*.json      # no measurement

The five numbers are: rows and columns of the product that one program computes, terms of the sum that
it loads at a time, warps, and pipeline stages. All combinations of the values of `--residual` and
`--step` are timed, one after another, each as a CUDA graph. With `--processes`, several processes
compile the kernels first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from benchmarks import step_table
from benchmarks.clock import milliseconds
from benchmarks.contestants import Task, get
from benchmarks.options import add_options
from benchmarks.steps import graphed
from torch_locoprop.fast.triton import availability, matrix_products
from torch_locoprop.fast.triton.matrix_products import TileSizes
from torch_locoprop.study.machine import environment, matmul_precision
from torch_locoprop.study.training.config import PRECISIONS

REPLAYS, ROUNDS = 30, 3


@dataclass(frozen=True)
class Pair:
    """The tile sizes of both kernels."""

    residual: TileSizes
    step: TileSizes

    def use(self, precision: str) -> None:
        """Make the library use these tile sizes."""
        with matmul_precision(precision):
            key = "bf16" if precision == "bf16" else availability.precision()
        matrix_products.RESIDUAL = {**matrix_products.RESIDUAL, key: self.residual}
        matrix_products.STEP = {**matrix_products.STEP, key: self.step}


def parts(text: str) -> TileSizes:
    """Convert the text `128x128x32x8x4` to tile sizes."""
    numbers = text.split("x")
    if len(numbers) != len(TileSizes._fields) or not all(n.isdecimal() for n in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {'x'.join(TileSizes._fields)}, five numbers"
        )
    return TileSizes(*map(int, numbers))


def shown(own: TileSizes) -> str:
    """Convert tile sizes to text, such as `128x128x32x8x4`."""
    return "x".join(map(str, own))


def timed(pair: Pair, models: list[str], precision: str, replays: int) -> dict[str, float]:
    """Return the milliseconds of a step of each model: the least of several rounds."""
    pair.use(precision)
    contestant = get("locoprop-m-bf16" if precision == "bf16" else "locoprop-m")
    found = {}
    with matmul_precision(precision):
        for model in models:
            step = graphed(contestant, Task(model, device="cuda"))
            assert step is not None
            for _ in range(5):
                step()
            found[model] = min(milliseconds(step, replays, "cuda") for _ in range(ROUNDS))
    return found


def _compile(pairs: list[Pair], options: argparse.Namespace) -> None:
    """Run each pair once in other processes: Triton keeps the compiled kernels on disk."""
    waiting, running = list(pairs), []
    while waiting or running:
        while waiting and len(running) < options.processes:
            pair = waiting.pop(0)
            sizes = ["--residual", shown(pair.residual), "--step", shown(pair.step)]
            more = ["--precision", options.precision, "--models", *options.models]
            command = [sys.executable, "-m", "benchmarks.parts", *sizes, *more, "--replays", "1"]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        running.pop(0).wait()


def markdown(content: dict[str, Any]) -> str:
    """Return the Markdown table."""
    models = list(content["rows"][0]["ms"])
    lines = [
        f"Milliseconds of a step, {content['precision']}, {content['environment']['machine']}",
        "",
        f"| residual | step | {' | '.join(models)} |",
        f"| --- | --- |{' ---: |' * len(models)}",
    ]
    for row in content["rows"]:
        times = " | ".join(f"{row['ms'][model]:.3f}" for model in models)
        lines.append(f"| {row['residual']} | {row['step']} | {times} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = "tile sizes, such as 128x128x32x8x3 (default: the library's)"
    parser.add_argument("--residual", nargs="+", type=parts, help=default)
    parser.add_argument("--step", nargs="+", type=parts, help=default)
    parser.add_argument("--models", nargs="+", default=["standard", "deep", "wide"])
    parser.add_argument("--precision", default="tf32", choices=PRECISIONS)
    parser.add_argument("--processes", type=int, default=1, help="processes that compile kernels")
    parser.add_argument(
        "--replays", type=int, default=REPLAYS, help="replays in each of three rounds"
    )
    add_options(parser, "out")
    add_options(parser, "show", nargs="+")
    options = parser.parse_args(arguments)
    if options.show:
        for path in options.show:
            step_table.display(markdown(json.loads(path.read_text())))
        return
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a GPU; torch finds no GPU here.")
    with matmul_precision(options.precision):
        key = "bf16" if options.precision == "bf16" else availability.precision()
    pairs = [
        Pair(*each)
        for each in product(
            options.residual or [matrix_products.RESIDUAL[key]],
            options.step or [matrix_products.STEP[key]],
        )
    ]
    if options.processes > 1:
        _compile(pairs, options)
    rows = [
        {
            "residual": shown(pair.residual),
            "step": shown(pair.step),
            "ms": timed(pair, options.models, options.precision, options.replays),
        }
        for pair in pairs
    ]
    content = {
        "rows": rows,
        "precision": options.precision,
        "environment": environment("cuda"),
    }
    if options.out:
        step_table.write(options.out, content)
    step_table.display(markdown(content))


if __name__ == "__main__":
    main()
