"""Check on a CPU that a step stays as fast, and memory as small, as at the start of a run.

    python -m benchmarks.steady --threads 2

The last steps of a run alternate with the first steps of a second run with the same settings, so that a
slow moment of the machine affects both. The images are CURVES, whose margins are black in all images.
A weight of such a pixel has no gradient, and its solver state decays to denormal numbers, with which
some processors are much slower.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import add_options
from benchmarks.step_table import display, table, write
from torch_locoprop.study import methods
from torch_locoprop.study.data.curves import curves
from torch_locoprop.study.machine import environment
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss

MODEL, BATCH, BATCHES = "784-250-100-20", 200, 4
METHODS = ("locoprop-m", "locoprop-s")
STEPS, ENDS = 300, 50
LOOK_AT = (20, 120)


class Run:
    """A training run of one method of the study."""

    def __init__(self, method: str, images: Tensor, model: str) -> None:
        self.model = architectures.build(model)
        own = methods.get(method)
        self.optimizer = own.build(self.model, {**own.settings, "weight_decay": 1e-5})
        self.batches = images.chunk(BATCHES)
        self.taken = 0

    def step(self) -> float:
        """Take one training step and return its milliseconds."""
        batch = self.batches[self.taken % BATCHES]
        self.taken += 1
        began = time.perf_counter()
        reconstruction_loss(self.model(batch), batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - began)

    def denormals(self) -> dict[str, int]:
        """Return the number of denormal numbers in each kind of solver state that has any."""
        counts: dict[str, int] = {}
        for state in self.optimizer.state.values():
            for kind, entry in state.items():
                counts[kind] = counts.get(kind, 0) + int(is_denormal(entry).sum())
        return {kind: count for kind, count in counts.items() if count}


def is_denormal(tensor: Tensor) -> Tensor:
    """Return a mask of the denormal numbers: not zero, and below the smallest normal number."""
    return (tensor != 0) & (tensor.abs() < torch.finfo(tensor.dtype).tiny)


def resident_mib() -> float | None:
    """Return the resident memory of this process, or None if the system does not report it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 2**10


def watched(
    method: str, images: Tensor, steps: int = STEPS, model: str = MODEL, ends: int = ENDS
) -> dict[str, Any]:
    """Time the first and the last steps of a run, and read the memory after some steps.

    Args:
        method: a method of the study.
        images: training images `[N, pixels]`.
        steps: length of the run.
        model: widths of the autoencoder.
        ends: number of steps that are timed at each end.
    """
    run, resident = Run(method, images, model), {}
    while run.taken < steps - ends:
        run.step()
        if run.taken in LOOK_AT:
            gc.collect()
            resident[str(run.taken)] = resident_mib()
    twin = Run(method, images, model)
    pairs = [(twin.step(), run.step()) for _ in range(ends)]
    return {
        "method": method,
        "steps": run.taken,
        "first_ms": median(first for first, _ in pairs),
        "last_ms": median(last for _, last in pairs),
        "resident_mib": resident,
        "denormals": run.denormals(),
    }


def markdown(content: dict[str, Any]) -> str:
    """Return the Markdown table."""
    head = ["", f"first {ENDS} steps, ms", f"last {ENDS} of {STEPS}", "ratio"]
    head += ["denormals in the state", *(f"resident MiB after {step}" for step in LOOK_AT)]
    return table(head, map(_line, content["runs"]))


def _line(run: dict[str, Any]) -> list[str]:
    first, last = run["first_ms"], run["last_ms"]
    denormals = [f"{kind}: {count:,}" for kind, count in run["denormals"].items()]
    resident = [run["resident_mib"].get(str(step)) for step in LOOK_AT]
    return [
        *(run["method"], f"{first:.2f}", f"{last:.2f}", f"{last / first:.2f}"),
        ", ".join(denormals) or "0",
        *("–" if value is None else f"{value:.1f}" for value in resident),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser, "threads", "out", "show")
    options = parser.parse_args(arguments)
    if options.show:
        display(markdown(json.loads(options.show.read_text())))
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    images = curves(BATCH * BATCHES, seed=0)
    runs = [watched(method, images) for method in METHODS]
    content = {"model": MODEL, "batch": BATCH, "runs": runs, "environment": environment("cpu")}
    if options.out:
        write(options.out, content)
    display(markdown(content))


if __name__ == "__main__":
    main()
