"""Time the optimizer's step of processes under DDP, with work divided or not, replayed or not.

    python -m benchmarks.ddp_steps --method spectral --processes 2 --widths 16 64 256
    python -m benchmarks.ddp_steps --replayed

A model of eight square layers is trained on CPUs, with one thread and `--rows` rows for each process.
Printed are medians over steps, of the spectral step over those that do not renew XᵀX, alternating
between both ways, and their ratio. LocoProp-M and preconditioned iterations are divided only where that
sends less.

With ``--replayed`` one process trains the standard autoencoder in TF32, with NCCL on a GPU and gloo
without one. It takes the steps of one of several processes, with all their collectives. Printed are
medians of the step replayed as CUDA graphs, of the same step launched kernel by kernel, and of the
replayed step without DDP. All times end when the GPU is done.
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
from torch_locoprop.distributed import averaging
from torch_locoprop.stepping.several_processes import (
    divided_closed_forms,
    divided_outputs,
    divided_polar,
)
from torch_locoprop.study.models.architectures import build
from torch_locoprop.study.models.autoencoder import reconstruction_loss

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


# ---- replayed or not ---------------------------------------------------------------------------

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now() -> float:
    """Return the time after all work on the GPU is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of_autoencoder(
    method: str, rows: int, steps: int, *, several: bool, cuda_graph: bool
) -> list[float]:
    """Return the times of the steps of one run, in the second half of which CUDA graphs are replayed.

    Args:
        method: the name of a row of ``METHODS``.
        rows: of each batch.
        steps: number of steps.
        several: train under DDP, and solve the problems in the way of several processes.
        cuda_graph: replay steps on a GPU.
    """
    model, found = build("standard").to(DEVICE), []
    called: Any = DistributedDataParallel(model) if several else model
    settings = {"output_transfer": "sigmoid", **METHODS[method], "cuda_graph": cuda_graph}
    opt = LocoProp(model, **settings)
    with ExitStack() as stack:
        if several:
            group = called.process_group
            stack.enter_context(patch.object(averaging, "averaging_processes", lambda joins: group))
        for step in range(steps):
            x = torch.rand(rows, 784, device=DEVICE)
            reconstruction_loss(called(x), x).backward()
            start = now()
            opt.step()
            if 2 * step >= steps:
                found.append(now() - start)
            opt.zero_grad()
    assert opt._graphs.failure is None, opt._graphs.failure
    return found


def compare_replayed(methods: Sequence[str], rows: int, steps: int) -> None:
    torch.set_float32_matmul_precision("high")
    ways = ((True, True), (True, False), (False, True))
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    print(f"PyTorch {torch.__version__}, {DEVICE}, {backend}: DDP, DDP without CUDA graphs, no DDP")
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(
            backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1
        )
        for method in methods:
            times: dict[tuple[bool, bool], list[float]] = {way: [] for way in ways}
            for _ in range(REPETITIONS):
                for (several, cuda_graph), known in times.items():
                    known += seconds_of_autoencoder(
                        method, rows, steps, several=several, cuda_graph=cuda_graph
                    )
            medians = [1e3 * statistics.median(known) for known in times.values()]
            print(f"{method}: " + ", ".join(f"{each:.2f} ms" for each in medians), flush=True)
        distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=METHODS, default="spectral")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--replayed", action="store_true")
    parser.add_argument("--batch", type=int, default=1000, help="rows of a batch with --replayed")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run with --replayed")
    args = parser.parse_args()
    if args.replayed:
        methods = [each for each in METHODS if each != "closed-form"]
        compare_replayed(methods, args.batch, args.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(
            in_a_process,
            (args.processes, args.method, args.widths, args.rows, folder),
            nprocs=args.processes,
        )


if __name__ == "__main__":
    main()
