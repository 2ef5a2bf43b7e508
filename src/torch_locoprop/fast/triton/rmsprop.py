"""RMSProp on a GPU in one pass: reads gradient, state and tensor once, writes state and tensor.

The plain version is ``RmsProp.step``; on a GPU its eight kernels read and write everything anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_locoprop.fast.triton import availability
from torch_locoprop.paper.tensors import Number
from torch_locoprop.solvers.base import Numbers

BLOCK = 1024

FLOAT, SHARED, PER_MEMBER = 0, 1, 2  # where a number is: in the call, or on the device


class Moving(NamedTuple):
    """A tensor and its state, each contiguous."""

    tensor: Tensor
    square: Tensor
    momentum: Tensor


def fits(tensors: Sequence[Tensor], numbers: Sequence[Number]) -> bool:
    """Whether the kernel takes these, and reads the numbers where they are."""
    own = [number for number in numbers if isinstance(number, Tensor)]
    return availability.supports(tensors) and all(
        n.dtype == torch.float32 and n.device == tensors[0].device for n in own
    )


def step(
    old: Moving,
    new: Moving,
    gradient: Tensor,
    numbers: Numbers,
    rate: float,
    gamma: Number = 1.0,
    from_zero: bool = False,
) -> None:
    """Write a step from ``old`` into ``new``, which may be the same; η counts ``rate`` times.

    A number that is a tensor ``[K]`` holds one for each entry of the first dimension. The gradient
    counts γ times. From zero, the old tensor counts as zero and is not read.
    """
    count = max(members(numbers), gamma.numel() if isinstance(gamma, Tensor) else 1)
    each = old.tensor.numel() // count
    availability.kernels().rmsprop[(-(-each // BLOCK), count)](
        *old, *new, gradient, gamma, *numbers_of(numbers), rate, each,
        place(gamma), *places(numbers),
        FROM_ZERO=from_zero, BLOCK=BLOCK,
    )  # fmt: skip


def numbers_of(numbers: Numbers) -> tuple[Number, Number, Number, Number]:
    """η, μ, ρ, ε, as all kernels take them."""
    return numbers.lr, numbers.momentum, numbers.decay, numbers.eps


def members(numbers: Numbers) -> int:
    """How many problems have numbers of their own."""
    return max((n.numel() for n in numbers_of(numbers) if isinstance(n, Tensor)), default=1)


def places(numbers: Numbers) -> list[int]:
    """Where a kernel finds each of the numbers."""
    return [place(number) for number in numbers_of(numbers)]


def place(number: Number) -> int:
    """Where a kernel finds one number."""
    if not isinstance(number, Tensor):
        return FLOAT
    return SHARED if number.numel() == 1 else PER_MEMBER
