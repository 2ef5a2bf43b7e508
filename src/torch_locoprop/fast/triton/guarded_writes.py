"""Whether a solution is finite, and its writing if it is, in two kernels for tensors of one size.

The plain versions are in ``guards.py``; on a GPU they read everything several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_locoprop.fast.triton import availability

BLOCK = 1024

Pair = tuple[Tensor, Tensor]  # what is new, and where it goes


def finite(tensors: Sequence[Tensor], members: int = 1) -> Tensor:
    """Whether nothing in them is infinite or not a number, for each member: bool ``[members]``."""
    ok = torch.ones(members, dtype=torch.uint8, device=tensors[0].device)
    for alike in _of_one_size(tensors):
        each, grid = _shares(alike[0], members)
        availability.kernels().finite[grid](ok, tuple(alike), each, BLOCK=BLOCK)
    return ok.view(torch.bool)


def write(ok: Tensor, pairs: Sequence[Pair]) -> None:
    """Write what is new where ``ok [members]`` says so."""
    sizes: dict[int, list[Pair]] = {}
    for pair in pairs:
        sizes.setdefault(pair[0].numel(), []).append(pair)
    for alike in (same for size, same in sizes.items() if size > 0):
        each, grid = _shares(alike[0][0], ok.numel())
        news, olds = zip(*alike, strict=True)
        availability.kernels().write[grid](ok.view(torch.uint8), news, olds, each, BLOCK=BLOCK)


def _of_one_size(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    sizes: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        sizes.setdefault(tensor.numel(), []).append(tensor)
    return [alike for size, alike in sizes.items() if size > 0]


def _shares(tensor: Tensor, members: int) -> tuple[int, tuple[int, int]]:
    """A member's share of a tensor, and the programs for all."""
    each = tensor.numel() // members
    return each, (-(-each // BLOCK), members)
