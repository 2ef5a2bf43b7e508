"""Collectives with tensors of unequal numbers of rows, for processes that divide rows among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

# The names of collectives of one tensor since PyTorch 2.13, and before.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or getattr(
    distributed, "all_gather_into_tensor", None
)
_reduce_scatter: Any = getattr(distributed, "reduce_scatter_single", None) or getattr(
    distributed, "reduce_scatter_tensor", None
)


def row_counts(d: int, processes: int) -> list[int]:
    """Return how many of d rows each process has, as ``Shard(0)`` divides them."""
    most = -(-d // processes)
    return [min(most, max(d - rank * most, 0)) for rank in range(processes)]


def of_all(groups: Sequence[Any], tensor: Tensor) -> Tensor:
    """Return the tensors, of one shape, of all processes: ``[processes, ...]``.

    Args:
        groups: the groups of this process, one for each dimension of a mesh.
        tensor: the tensor of this process.
    """
    found = tensor.unsqueeze(0)
    for group in reversed(groups):
        found = gathered(found, group)
    return found


def gathered(tensor: Tensor, group: Any) -> Tensor:
    """Return the tensors ``[r, ...]``, of one shape, of all processes of a group, as one tensor."""
    rows, *rest = tensor.shape
    found = tensor.new_empty(rows * distributed.get_world_size(group), *rest)
    if found.numel() > 0:
        _all_gather(found, tensor.contiguous(), group=group)
    return found


def padded_to(rows: Tensor, count: int) -> Tensor:
    """Return rows ``[r, ...]`` with rows of zeros behind them: ``[count, ...]``."""
    if len(rows) == count:
        return rows
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def scattered_sum(tensor: Tensor, group: Any) -> Tensor:
    """Return this process's part of the sum of tensors ``[processes · r, ...]``: ``[r, ...]``."""
    rows, *rest = tensor.shape
    found = tensor.new_empty(rows // distributed.get_world_size(group), *rest)
    _reduce_scatter(found, tensor.contiguous(), group=group)
    return found


def exchanged(parts: Tensor, sent: Sequence[int], taken: Sequence[int], group: Any) -> Tensor:
    """Return what all processes of a group have sent to this one, by an all-to-all.

    Args:
        parts: what this process sends, one process after the other.
        sent: the size of the part for each process.
        taken: the size of the part from each process.
        group: the process group.
    """
    found = parts.new_empty(sum(taken))
    distributed.all_to_all_single(found, parts, list(taken), list(sent), group=group)
    return found
