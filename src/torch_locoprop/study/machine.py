"""The machine that a run runs on: what it is, its memory, its precision and its random numbers."""

from __future__ import annotations

import gc
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torch_locoprop


def environment(device: str) -> dict[str, Any]:
    """Return what a result has to record of where it was made."""
    gpu = device == "cuda"
    return {
        "torch_locoprop": torch_locoprop.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name() if gpu else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def forget_peak(device: torch.device) -> None:
    """Measure the most memory from now on; where that cannot be told, from the process's start."""
    gc.collect()  # earlier runs of this process would count
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def memory_mib(device: torch.device) -> float:
    """The most memory so far: of the device, or of this process where that is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    if sys.platform == "win32":
        return 0.0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Matrix products of the GPU in this precision, and as before afterwards."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee" if precision == "fp32" else "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def own_randomness(device: str) -> Iterator[None]:
    """Leave the caller's random numbers as they were."""
    numpy_state = np.random.get_state()
    gpu = [torch.cuda.current_device()] if device == "cuda" else []
    try:
        with torch.random.fork_rng(devices=gpu):
            yield
    finally:
        np.random.set_state(numpy_state)
