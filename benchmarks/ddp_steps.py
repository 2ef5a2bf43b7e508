"""Time the optimizer's step of processes under DDP, with its work divided among them and not.

    python -m benchmarks.ddp_steps --method spectral --processes 2 --widths 16 64 256

A model of eight square layers is trained on CPUs, with one thread and `--rows` rows for each process.
Printed are medians over steps, of the spectral step over those that do not renew XᵀX, alternating
between both ways, and their ratio. LocoProp-M and preconditioned iterations are divided only where that
sends less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed, nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from torch_locoprop import LocoProp
from torch_locoprop.stepping.several_processes import (
    divided_closed_forms,
    divided_outputs,
    divided_polar,
)

LAYERS, EARLY, STEPS, REPETITIONS = 8, 11, 20, 3
METHODS: dict[str, dict[str, Any]] = {
    "spectral": {},
    "closed-form": {"variant": "locoprop-s", "solver": "exact"},
    "locoprop-s": {"variant": "locoprop-s"},
    "locoprop-m": {"variant": "locoprop-m", "output_transfer": "linear"},
    "preconditioned": {"solver": "preconditioned", "output_transfer": "linear"},
}


def seconds(method: str, width: int, rows: int, *, divided: bool) -> list[float]:
    """Return the times of the steps of one run.

    Args:
        method: the name of a row of ``METHODS``.
        width: inputs and outputs of each layer.
        rows: of the batch of each process.
        divided: divide the work, of small layers too.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS))
    )
    wrapped, found = DistributedDataParallel(model), []
    opt = LocoProp(model, **METHODS[method])
    for step in range(STEPS):
        wrapped(torch.randn(rows, width)).square().mean().backward()
        distributed.barrier()
        start = time.perf_counter()
        with ExitStack() as stack:
            for module in (divided_closed_forms, divided_outputs, divided_polar):
                stack.enter_context(patch.object(module, "PAYS_FROM", 1))
                if not divided:
                    stack.enter_context(patch.object(module, "is_divided", lambda posed: False))
            opt.step()
        distributed.barrier()
        if step >= EARLY:
            found.append(time.perf_counter() - start)
        opt.zero_grad()
    return found


def in_a_process(
    rank: int, processes: int, method: str, widths: Sequence[int], rows: int, folder: str
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes
    )
    for width in widths:
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(REPETITIONS):
            for divided, found in times.items():
                found += seconds(method, width, rows, divided=divided)
        if rank == 0:
            with_division, without = (1e3 * statistics.median(each) for each in times.values())
            ratio = without / with_division
            print(f"{width}: {with_division:.2f} ms divided, {without:.2f} ms not, {ratio:.2f}x")
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=METHODS, default="spectral")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(
            in_a_process,
            (args.processes, args.method, args.widths, args.rows, folder),
            nprocs=args.processes,
        )


if __name__ == "__main__":
    main()
