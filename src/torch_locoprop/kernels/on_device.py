"""Whether there are kernels for a device, and the kernels."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

INTERPRETED = False  # by Triton's interpreter, on the CPU: for tests
SWITCHED_OFF = False  # everything takes its plain way


def has_kernels(device: torch.device) -> bool:
    """Whether Triton is there and the device is one that it serves."""
    return (device.type == "cuda" or INTERPRETED) and not SWITCHED_OFF and _triton_is_there()


@cache
def _triton_is_there() -> bool:
    try:
        import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def kernels() -> ModuleType:
    """The kernels; Triton is imported only where there is a GPU to use it on."""
    from torch_locoprop.kernels import _triton

    return _triton
