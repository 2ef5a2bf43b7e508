"""The collectives of local problems, also with tensors of unequal numbers of rows.

The part of a step that CUDA graphs may replay calls its collectives by :func:`called`, outside of CUDA
graphs. Replays call them again, with the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from torch_locoprop.fast.dispatch import graphs

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


def called(collective: Callable[..., object], result: Tensor, *given: Tensor) -> Tensor:
    """Call ``collective(result, *given)``, and return the result.

    While a CUDA graph is recorded, the collective gets buffers. A recording keeps the tensors of its
    collectives: if these were inputs or gradients of a pass, the next pass could not put its own at the
    same addresses.

    Args:
        collective: writes ``result``, from ``given`` or in place.
        result: a contiguous tensor.
        given: tensors that the collective reads.
    """
    if not graphs.is_divisible():
        collective(result, *(tensor.contiguous() for tensor in given))
        return result
    written, *read = (graphs.buffer(tensor, i) for i, tensor in enumerate((result, *given)))
    for buffer, tensor in zip(read or [written], given or [result], strict=True):
        buffer.copy_(tensor)
    graphs.outside(partial(collective, written, *read))
    return result.copy_(written)


def add_up(tensor: Tensor, group: Any) -> None:
    """Replace a contiguous tensor, in place, by its sum over all processes of a group."""
    called(partial(distributed.all_reduce, group=group), tensor)


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
    return called(partial(_all_gather, group=group), found, tensor) if found.numel() > 0 else found


def padded_to(rows: Tensor, count: int) -> Tensor:
    """Return rows ``[r, ...]`` with rows of zeros behind them: ``[count, ...]``."""
    if len(rows) == count:
        return rows
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def scattered_sum(tensor: Tensor, group: Any) -> Tensor:
    """Return this process's part of the sum of tensors ``[processes · r, ...]``: ``[r, ...]``."""
    rows, *rest = tensor.shape
    found = tensor.new_empty(rows // distributed.get_world_size(group), *rest)
    return called(partial(_reduce_scatter, group=group), found, tensor)


def exchanged(parts: Tensor, sent: Sequence[int], taken: Sequence[int], group: Any) -> Tensor:
    """Return what all processes of a group have sent to this one, by an all-to-all.

    Args:
        parts: what this process sends, one process after the other.
        sent: the size of the part for each process.
        taken: the size of the part from each process.
        group: the process group.
    """

    def exchange(result: Tensor, given: Tensor) -> None:
        distributed.all_to_all_single(result, given, list(taken), list(sent), group=group)

    return called(exchange, parts.new_empty(sum(taken)), parts)
