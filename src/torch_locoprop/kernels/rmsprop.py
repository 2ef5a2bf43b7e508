"""RMSProp on a GPU in one pass: reads gradient, state and tensor once, writes state and tensor.

The plain version is ``RmsProp.step``; on a GPU its eight kernels read and write everything anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torch_locoprop.spread import Number

BLOCK = 1024
INTERPRETED = False  # by Triton's interpreter, on the CPU: for tests

FLOAT, SHARED, PER_MEMBER = 0, 1, 2  # where a number is: in the call, or on the device


def fits(tensors: list[Tensor], numbers: Sequence[Number]) -> bool:
    """Whether the kernel takes these: float32, contiguous, on a GPU, with Triton there."""
    device = tensors[0].device
    return (
        (device.type == "cuda" or INTERPRETED)
        and _triton() is not None
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        and all(n.dtype == torch.float32 for n in numbers if isinstance(n, Tensor))
        and all(n.device == device for n in numbers if isinstance(n, Tensor))
    )


def step_(
    tensor: Tensor,
    gradient: Tensor,
    square: Tensor,
    momentum: Tensor,
    numbers: tuple[Number, Number, Number, Number],
    rate: float,
) -> None:
    """Move the tensor and both states in place; numbers are η, μ, ρ, ε, and η counts ``rate`` times.

    A number that is a tensor ``[K]`` holds one for each entry of the first dimension.
    """
    kernel = _kernel()
    members = max((n.numel() for n in numbers if isinstance(n, Tensor)), default=1)
    each = tensor.numel() // members
    places = [_place(number) for number in numbers]
    grid = (-(-each // BLOCK), members)
    arguments = (tensor, gradient, square, momentum, *numbers, rate, each)
    kernel[grid](*arguments, *places, BLOCK=BLOCK)


def _place(number: Number) -> int:
    if not isinstance(number, Tensor):
        return FLOAT
    return SHARED if number.numel() == 1 else PER_MEMBER


@cache
def _triton() -> Any:
    try:
        import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    return triton


@cache
def _kernel() -> Any:
    """Compile the kernel; Triton is imported only where there is a GPU to use it on."""
    from torch_locoprop.kernels._rmsprop_triton import rmsprop

    return rmsprop
