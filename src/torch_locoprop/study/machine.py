"""The machine of a run: its description and code, peak memory, precision, random numbers."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torch_locoprop


def environment(device: str) -> dict[str, Any]:
    """Return the versions and the machine that a result records.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    gpu = device == "cuda"
    return {
        "torch_locoprop": torch_locoprop.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name() if gpu else platform.machine(),
        "threads": torch.get_num_threads(),
    }


@cache
def revision(package: Path = Path(__file__).parents[1]) -> str:
    """Return the revision of the code in git, which ends in ``-dirty`` if files have changed since.

    Args:
        package: the folder of the package.

    Returns:
        The revision; ``unknown`` if git is missing or does not track the package, as in a virtual
        environment inside another repository.
    """
    tracked = ["git", "ls-files", "--error-unmatch", "__init__.py"]
    described = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        for command in (tracked, described):
            found = subprocess.run(command, capture_output=True, text=True, cwd=package, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def forget_peak(device: torch.device) -> None:
    """Start a new measurement of peak memory.

    Where the system cannot do this, peak memory is measured from the start of the process.
    """
    gc.collect()  # else tensors of earlier runs in this process would count
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def memory_mib(device: torch.device) -> float:
    """Return the peak memory in MiB: of the GPU, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    if sys.platform == "win32":
        return 0.0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Compute matrix products on the GPU in ``fp32`` or TF32 within this context."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee" if precision == "fp32" else "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def own_randomness(device: str) -> Iterator[None]:
    """Restore the random number generators of the caller after this context."""
    numpy_state = np.random.get_state()
    gpu = [torch.cuda.current_device()] if device == "cuda" else []
    try:
        with torch.random.fork_rng(devices=gpu):
            yield
    finally:
        np.random.set_state(numpy_state)


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the random number generators as tensors and numbers."""
    _, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor(np.asarray(keys, np.int64)),
        "numpy_rest": rest,
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Set the random number generators to the states that ``random_states`` returned."""
    torch.set_rng_state(states["torch"])
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, *states["numpy_rest"]))
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
