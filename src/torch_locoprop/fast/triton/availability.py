"""Which devices and tensors the Triton kernels support, and access to the kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

INTERPRETED = False  # True: Triton's interpreter runs the kernels on the CPU (for tests)
SWITCHED_OFF = os.environ.get("TORCH_LOCOPROP_KERNELS") == "0"  # True: use the plain versions only


def has_kernels(device: torch.device) -> bool:
    """Return True if the kernels run on a device: on a GPU, if Triton is installed."""
    return (device.type == "cuda" or INTERPRETED) and not SWITCHED_OFF and _has_triton()


def supports(tensors: Sequence[Tensor]) -> bool:
    """Return True if the kernels support these tensors: float32, contiguous, fewer than 2³¹ entries.

    Args:
        tensors: tensors on one device.
    """
    return (
        bool(tensors)
        and has_kernels(tensors[0].device)
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        and all(t.numel() < 2**31 for t in tensors)
    )


@cache
def _has_triton() -> bool:
    try:
        import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
    except ImportError:
        return False
    return True


def precision() -> str:
    """Return Triton's name for the precision of matrix products.

    The precision is "tf32" if the user allows TF32. Otherwise it is "tf32x3" on GPUs with TF32: three
    products in TF32 are far faster than one in float32, and their error, 4e-7 of the result for 1000
    terms, is between that of float32 summed in blocks and summed term by term. On other devices it is
    "ieee".
    """
    if not torch.cuda.is_available() or torch.version.hip or _lacks_tf32():
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def has_bf16() -> bool:
    """Return True if the device computes matrix products of bfloat16 in hardware."""
    return INTERPRETED or torch.cuda.is_bf16_supported(including_emulation=False)


def can_use_descriptors(*matrices: Tensor) -> bool:
    """Return True if kernels can load tiles of these matrices by tensor descriptors.

    Tensor descriptors need a GPU with the instruction for them, and rows that begin at multiples of
    16 bytes.
    """
    return (INTERPRETED or _has_descriptors(torch.cuda.current_device())) and all(
        t.data_ptr() % 16 == 0 and t.shape[-1] * t.element_size() % 16 == 0 for t in matrices
    )


@cache
def _has_descriptors(device: int) -> bool:
    """Return True if the device is a Hopper GPU or newer, and Triton has tensor descriptors."""
    try:
        import triton.tools.tensor_descriptor  # type: ignore  # noqa: F401
    except ImportError:
        return False
    return not torch.version.hip and _capability(device) >= (9, 0)


def descriptor(matrix: Tensor, height: int, width: int) -> Any:
    """Return a tensor descriptor of a matrix, for loads of tiles ``[height, width]``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [height, width])


def _lacks_tf32() -> bool:
    return _capability(torch.cuda.current_device()) < (8, 0)


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def kernels() -> ModuleType:
    """Return the module of the kernels; the first call imports Triton."""
    from torch_locoprop.fast.triton import kernels

    return kernels
