"""RMSProp on a GPU in one kernel: it reads gradient, state and tensor once, and writes the new ones.

The plain version is ``RmsProp.step``; on a GPU each of its eight kernels reads and writes tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_locoprop.fast.triton import availability
from torch_locoprop.paper.tensors import Number
from torch_locoprop.solvers.base import Numbers

BLOCK = 1024  # entries that one program processes

# Where a kernel finds a number: in its arguments, or in a tensor with one entry for all members or with
# one for each.
FLOAT, SHARED, PER_MEMBER = 0, 1, 2


class TensorAndState(NamedTuple):
    """A tensor and its RMSProp state, all contiguous and of one shape."""

    tensor: Tensor
    square: Tensor
    momentum: Tensor


def fits(tensors: Sequence[Tensor], numbers: Sequence[Number]) -> bool:
    """Return True if the kernels support these tensors and numbers.

    Args:
        tensors: the tensors, on one device.
        numbers: the numbers; those that are tensors must be float32 and on the same device.
    """
    on_device = [number for number in numbers if isinstance(number, Tensor)]
    return availability.supports(tensors) and all(
        n.dtype == torch.float32 and n.device == tensors[0].device for n in on_device
    )


def step(
    old: TensorAndState,
    new: TensorAndState,
    gradient: Tensor,
    numbers: Numbers,
    rate: float,
    gamma: Number = 1.0,
    from_zero: bool = False,
) -> None:
    """Take a step of RMSProp from ``old`` to ``new``.

    Args:
        old: the tensor and its state before the step.
        new: where the results are written; may be ``old``.
        gradient: the gradient.
        numbers: the solver's numbers; a tensor ``[K]`` has one for each member of a population.
        rate: a factor of the learning rate.
        gamma: a factor of the gradient.
        from_zero: if True, the old tensor counts as zero, so that the new one is a displacement.
    """
    count = max(members(numbers), gamma.numel() if isinstance(gamma, Tensor) else 1)
    entries = old.tensor.numel() // count
    availability.kernels().rmsprop[(-(-entries // BLOCK), count)](
        *old, *new, gradient, gamma, *numbers_of(numbers), rate, entries,
        place(gamma), *places(numbers),
        FROM_ZERO=from_zero, BLOCK=BLOCK,
    )  # fmt: skip


def numbers_of(numbers: Numbers) -> tuple[Number, Number, Number, Number]:
    """Return η, μ, ρ, ε, in the order in which all kernels take them."""
    return numbers.lr, numbers.momentum, numbers.decay, numbers.eps


def members(numbers: Numbers) -> int:
    """Return the number of members with numbers of their own; 1 if all share them."""
    return max((n.numel() for n in numbers_of(numbers) if isinstance(n, Tensor)), default=1)


def places(numbers: Numbers) -> list[int]:
    """Return where a kernel finds η, μ, ρ and ε: FLOAT, SHARED or PER_MEMBER for each."""
    return [place(number) for number in numbers_of(numbers)]


def place(number: Number) -> int:
    """Return where a kernel finds a number: FLOAT, SHARED or PER_MEMBER."""
    if not isinstance(number, Tensor):
        return FLOAT
    return SHARED if number.numel() == 1 else PER_MEMBER
