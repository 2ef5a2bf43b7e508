"""Watch a long run on the CPU: does a step stay as fast, and the process as small, as at the start?

    python -m benchmarks.steady --threads 2

The last steps of a run take turns with the first steps of its twin, which starts then, so that a slow
moment of the machine meets both. The images are those of CURVES, whose margins are black in all:
a weight behind such a pixel has no gradient, and what a solver remembers of it decays to numbers with
which some processors are far slower (denormals).
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

from benchmarks.step_table import display, table, write
from torch_locoprop.study import methods
from torch_locoprop.study.data.curves import curves
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss
from torch_locoprop.study.training.machine import environment

MODEL, BATCH, BATCHES = "784-250-100-20", 200, 4
METHODS = ("locoprop-m", "locoprop-s")
STEPS, ENDS = 300, 50
LOOK_AT = (20, 120)


class Run:
    """A run of a method, step by step."""

    def __init__(self, method: str, images: Tensor, model: str) -> None:
        self.model = architectures.build(model)
        own = methods.get(method)
        self.optimizer = own.build(self.model, {**own.settings, "weight_decay": 1e-5})
        self.batches = images.chunk(BATCHES)
        self.taken = 0

    def step(self) -> float:
        """Return its milliseconds."""
        batch = self.batches[self.taken % BATCHES]
        self.taken += 1
        began = time.perf_counter()
        reconstruction_loss(self.model(batch), batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - began)

    def denormals(self) -> dict[str, int]:
        """How many numbers are denormal in each kind of state that has any."""
        counts: dict[str, int] = {}
        for state in self.optimizer.state.values():
            for kind, entry in state.items():
                counts[kind] = counts.get(kind, 0) + int(is_denormal(entry).sum())
        return {kind: count for kind, count in counts.items() if count}


def is_denormal(tensor: Tensor) -> Tensor:
    """Which numbers are not zero, and too small for all their digits."""
    return (tensor != 0) & (tensor.abs() < torch.finfo(tensor.dtype).tiny)


def resident_mib() -> float | None:
    """The memory of this process now, where the system tells."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 2**10


def watched(
    method: str, images: Tensor, steps: int = STEPS, model: str = MODEL, ends: int = ENDS
) -> dict[str, Any]:
    """Return milliseconds of the first and the last steps, and memory on the way."""
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
    """Return the table."""
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
    parser.add_argument("--threads", type=int, help="otherwise as many as torch likes")
    parser.add_argument("--out", type=Path, help="a JSON file for what was measured")
    parser.add_argument("--show", type=Path, help="such a file, to be shown instead")
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
