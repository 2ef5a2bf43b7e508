"""RMSProp on a GPU in one pass: reads gradient, state and tensor once, writes state and tensor.

The plain version is ``RmsProp.step``; on a GPU its eight kernels read and write everything anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_locoprop.kernels import on_device
from torch_locoprop.solvers.base import Numbers
from torch_locoprop.spread import Number

BLOCK = 1024

FLOAT, SHARED, PER_MEMBER = 0, 1, 2  # where a number is: in the call, or on the device


class Moving(NamedTuple):
    """A tensor and its state, each contiguous."""

    tensor: Tensor
    square: Tensor
    momentum: Tensor


def fits(tensors: Sequence[Tensor], numbers: Sequence[Number]) -> bool:
    """Whether the kernel takes these: float32, contiguous, on a GPU, with Triton there."""
    device = tensors[0].device
    return (
        on_device.has_kernels(device)
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        and all(t.numel() < 2**31 for t in tensors)
        and all(n.dtype == torch.float32 for n in numbers if isinstance(n, Tensor))
        and all(n.device == device for n in numbers if isinstance(n, Tensor))
    )


def step(
    old: Moving,
    new: Moving,
    gradient: Tensor,
    numbers: Numbers,
    rate: float,
    first: Tensor | None = None,
    scale: float | Tensor = 1.0,
) -> None:
    """Write a step from ``old`` into ``new``, which may be the same; η counts ``rate`` times.

    A number that is a tensor ``[K]`` holds one for each entry of the first dimension. With ``first``,
    the gradient counts ``scale`` times beside it.
    """
    count = members(numbers)
    each = old.tensor.numel() // count
    known = gradient if first is None else first  # a pointer that is not read
    on_device.kernels().rmsprop[(-(-each // BLOCK), count)](
        *old, *new, gradient, known, scale, *numbers_of(numbers), rate, each, *places(numbers),
        HAS_FIRST=first is not None, BLOCK=BLOCK,
    )  # fmt: skip


def numbers_of(numbers: Numbers) -> tuple[Number, Number, Number, Number]:
    """η, μ, ρ, ε, as all kernels take them."""
    return numbers.lr, numbers.momentum, numbers.decay, numbers.eps


def members(numbers: Numbers) -> int:
    """How many problems have numbers of their own."""
    return max((n.numel() for n in numbers_of(numbers) if isinstance(n, Tensor)), default=1)


def places(numbers: Numbers) -> list[int]:
    """Where a kernel finds each of the numbers."""
    return [_place(number) for number in numbers_of(numbers)]


def _place(number: Number) -> int:
    if not isinstance(number, Tensor):
        return FLOAT
    return SHARED if number.numel() == 1 else PER_MEMBER
