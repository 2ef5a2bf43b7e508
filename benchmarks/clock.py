"""Clocks that wait until a GPU has finished its work."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def now(device: str) -> float:
    """Return the time in seconds, after all work on the device is finished."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def milliseconds(work: Callable[[], object], times: int, device: str) -> float:
    """Return the mean milliseconds of `work`, called `times` times without waiting in between."""
    began = now(device)
    for _ in range(times):
        work()
    return 1e3 * (now(device) - began) / times
