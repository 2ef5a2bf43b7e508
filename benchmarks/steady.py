"""Watch a long run on the CPU: does a step stay as fast, and the process as small, as at the start?

    python -m benchmarks.steady --threads 2

The images are those of CURVES, whose margins are black in all of them: a weight behind a pixel that is
always zero has no gradient, and what a solver remembers of it decays to numbers with which some
processors are far slower (denormals). The same weights have none of them where torch flushes them to zero.
"""

from __future__ import annotations

import argparse
import gc
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.step_table import display, table, write
from torch_locoprop.study import methods, models
from torch_locoprop.study.autoencoder import reconstruction_loss
from torch_locoprop.study.curves import curves
from torch_locoprop.study.machine import environment

MODEL, BATCH = "784-250-100-20", 200
METHODS = ("locoprop-m", "locoprop-s")
STEPS, ENDS = 300, 50
LOOK_AT = (20, 120)


def resident_mib() -> float | None:
    """The memory of this process now, where the system tells."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 2**10


def denormals(optimizer: torch.optim.Optimizer) -> int:
    """How many numbers of its state are denormal."""
    count = 0
    for state in optimizer.state.values():
        for entry in state.values():
            if torch.is_tensor(entry) and entry.is_floating_point():
                tiny = torch.finfo(entry.dtype).tiny
                # By bits: where denormals are flushed, they compare as zero.
                count += int(((entry.abs() < tiny) & (_bits(entry) != 0)).sum())
    return count


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """All bits but the sign's."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(whole) & torch.iinfo(whole).max


def watched(method: str, steps: int, flush: bool, model: str = MODEL) -> dict[str, Any]:
    """Return milliseconds of the first and the last steps, and memory on the way."""
    torch.set_flush_denormal(flush)
    try:
        network = models.build(model)
        pixels = models.sizes_of(model)[0]
        images = curves(4 * BATCH, seed=0)[:, :pixels]
        own = methods.get(method)
        optimizer = own.build(network, {**own.settings, "weight_decay": 1e-5})
        times, resident = [], {}
        for step in range(1, steps + 1):
            batch = images[BATCH * (step % 4) :][:BATCH]
            began = time.perf_counter()
            reconstruction_loss(network(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(1e3 * (time.perf_counter() - began))
            if step in LOOK_AT:
                gc.collect()
                resident[str(step)] = resident_mib()
        return {
            "method": method,
            "flush_denormal": flush,
            "steps": steps,
            "first_ms": median(times[5 : 5 + ENDS]),
            "last_ms": median(times[-ENDS:]),
            "resident_mib": resident,
            "denormals": denormals(optimizer),
        }
    finally:
        torch.set_flush_denormal(False)


def markdown(content: dict[str, Any]) -> str:
    """Return the table."""
    head = [
        "",
        f"first {ENDS} steps, ms",
        f"last {ENDS}",
        "ratio",
        "denormals in the state at the end",
    ]
    head += [f"resident MiB after {step}" for step in LOOK_AT] + ["grown by"]
    return table(head, map(_line, content["runs"]))


def _line(run: dict[str, Any]) -> list[str]:
    name = run["method"] + (", flushed to zero" if run["flush_denormal"] else "")
    first, last = run["first_ms"], run["last_ms"]
    resident = [run["resident_mib"].get(str(step)) for step in LOOK_AT]
    grown = ["–" if None in pair else f"{pair[1] - pair[0]:+.1f}" for pair in pairwise(resident)]
    return [
        *(name, f"{first:.2f}", f"{last:.2f}", f"{last / first:.2f}", f"{run['denormals']:,}"),
        *("–" if value is None else f"{value:.1f}" for value in resident),
        *grown,
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, help="otherwise as many as torch likes")
    parser.add_argument("--out", type=Path, help="a JSON file for what was measured")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    runs = [watched(method, options.steps, flush) for method in METHODS for flush in (False, True)]
    content = {"model": MODEL, "batch": BATCH, "runs": runs, "environment": environment("cpu")}
    if options.out:
        write(options.out, content)
    display(markdown(content))


if __name__ == "__main__":
    main()
