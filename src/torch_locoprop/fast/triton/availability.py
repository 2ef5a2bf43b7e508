"""Whether there are kernels for a device, and the kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

INTERPRETED = False  # by Triton's interpreter, on the CPU: for tests
SWITCHED_OFF = os.environ.get("TORCH_LOCOPROP_KERNELS") == "0"  # everything takes its plain way


def has_kernels(device: torch.device) -> bool:
    """Whether Triton is there and the device is one that it serves."""
    return (device.type == "cuda" or INTERPRETED) and not SWITCHED_OFF and _triton_is_there()


def supports(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels take these, which are on one device: all float32 and contiguous."""
    return (
        bool(tensors)
        and has_kernels(tensors[0].device)
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        and all(t.numel() < 2**31 for t in tensors)
    )


@cache
def _triton_is_there() -> bool:
    try:
        import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
    except ImportError:
        return False
    return True


def precision() -> str:
    """Of products, as Triton names it: TF32 where the user allows it, otherwise that of float32.

    The latter by three products in TF32 on a GPU that has them, which is far faster there, and whose
    error, 4e-7 of the result for 1000 terms, is between those of float32 in blocks and term by term.
    """
    if not torch.cuda.is_available() or torch.version.hip or _is_old(torch.cuda.current_device()):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def has_bf16() -> bool:
    """Whether products of bfloat16 are worth while."""
    return INTERPRETED or torch.cuda.is_bf16_supported(including_emulation=False)


def has_blocks(*matrices: Tensor) -> bool:
    """Whether the device fetches blocks of these by one instruction: all rows begin where it can."""
    return (INTERPRETED or _fetches_blocks(torch.cuda.current_device())) and all(
        t.data_ptr() % 16 == 0 and t.shape[-1] * t.element_size() % 16 == 0 for t in matrices
    )


@cache
def _fetches_blocks(device: int) -> bool:
    """Whether it is Hopper or newer, and Triton knows what to do then."""
    try:
        import triton.tools.tensor_descriptor  # type: ignore  # noqa: F401
    except ImportError:
        return False
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def blocks(matrix: Tensor, tall: int, broad: int) -> Any:
    """A matrix for kernels that fetch blocks of it."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [tall, broad])


@cache
def _is_old(device: int) -> bool:
    """Whether it is from before TF32."""
    return torch.cuda.get_device_capability(device) < (8, 0)


@cache
def kernels() -> ModuleType:
    """The kernels; Triton is imported only where there is a GPU to use it on."""
    from torch_locoprop.fast.triton import kernels

    return kernels
