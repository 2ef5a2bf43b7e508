"""The check that a solution is finite, and its write, each in one kernel for all tensors of a size.

The plain versions are in ``fast/dispatch.py``; on a GPU they read every tensor several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torch_locoprop.fast.triton import availability

BLOCK = 1024  # entries that one program processes

T = TypeVar("T")
Pair = tuple[Tensor, Tensor]  # a new tensor and the old one that it replaces


def finite(tensors: Sequence[Tensor], members: int = 1) -> Tensor:
    """Return booleans ``[members]``: True for each member whose entries are all finite.

    Args:
        tensors: tensors ``[members, ...]``, or of any shape for one member.
        members: number of members of a population.
    """
    ok = torch.ones(members, dtype=torch.uint8, device=tensors[0].device)
    for of_size in _by_size(tensors, [tensor.numel() for tensor in tensors]):
        entries, grid = _launch(of_size[0], members)
        availability.kernels().finite[grid](ok, tuple(of_size), entries, BLOCK=BLOCK)
    return ok.view(torch.bool)


def write(ok: Tensor, pairs: Sequence[Pair]) -> None:
    """Write new tensors over old ones, for the members whose flag is true.

    Args:
        ok: flags ``[members]``.
        pairs: new and old tensors.
    """
    for of_size in _by_size(pairs, [new.numel() for new, _ in pairs]):
        entries, grid = _launch(of_size[0][0], ok.numel())
        news, olds = zip(*of_size, strict=True)
        availability.kernels().write[grid](ok.view(torch.uint8), news, olds, entries, BLOCK=BLOCK)


def _by_size(items: Iterable[T], sizes: Iterable[int]) -> list[list[T]]:
    """Return lists of items of equal sizes; items of size 0 are left out."""
    groups: dict[int, list[T]] = {}
    for item, size in zip(items, sizes, strict=True):
        groups.setdefault(size, []).append(item)
    return [group for size, group in groups.items() if size > 0]


def _launch(tensor: Tensor, members: int) -> tuple[int, tuple[int, int]]:
    """Return the number of entries of each member, and the grid of programs."""
    entries = tensor.numel() // members
    return entries, (-(-entries // BLOCK), members)
