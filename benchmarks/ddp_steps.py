"""Time the optimizer's step of processes under DDP, with its work divided among them and not.

    python -m benchmarks.ddp_steps --processes 2 --widths 16 64 256

A model of eight square layers takes spectral steps on CPUs, with one thread for each process. Printed
are medians over steps that do not renew XᵀX, alternating between both ways, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from unittest.mock import patch

import torch
from torch import distributed, nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from torch_locoprop import LocoProp
from torch_locoprop.stepping import divided_polar

LAYERS, ROWS, EARLY, STEPS, REPETITIONS = 8, 32, 11, 20, 3
NEVER = 10**9  # a side that no matrix has


def seconds(width: int, pays_from: int) -> list[float]:
    """Return the times of the steps of one run.

    Args:
        width: inputs and outputs of each layer.
        pays_from: the side of a matrix from which on polar factors are divided.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS))
    )
    wrapped, opt, found = DistributedDataParallel(model), LocoProp(model), []
    for step in range(STEPS):
        wrapped(torch.randn(ROWS, width)).square().mean().backward()
        distributed.barrier()
        start = time.perf_counter()
        with patch.object(divided_polar, "PAYS_FROM", pays_from):
            opt.step()
        distributed.barrier()
        if step >= EARLY:
            found.append(time.perf_counter() - start)
        opt.zero_grad()
    return found


def in_a_process(rank: int, processes: int, widths: Sequence[int], folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes
    )
    for width in widths:
        times: dict[int, list[float]] = {1: [], NEVER: []}
        for _ in range(REPETITIONS):
            for pays_from, found in times.items():
                found += seconds(width, pays_from)
        if rank == 0:
            divided, replicated = (1e3 * statistics.median(found) for found in times.values())
            ratio = replicated / divided
            print(f"{width}: {divided:.2f} ms divided, {replicated:.2f} ms not, {ratio:.2f}x")
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(in_a_process, (args.processes, args.widths, folder), nprocs=args.processes)


if __name__ == "__main__":
    main()
