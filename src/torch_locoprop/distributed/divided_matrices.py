"""Functions of whole matrices, each computed by one process.

The matrices are divided among the processes by the work that they make. If every process has some rows
of each matrix, it sends them to the owner of the matrix, which computes the function and sends rows of
the result back; each way is one all-to-all for all matrices together. If every process has all of each
matrix, one all-gather brings all results to all processes.

Functions here take tensors and numbers; they know neither layers nor settings.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from torch_locoprop.distributed.fully_shard import Shards, gathered, padded_to

# Matrices of one exchange for each process. With more of them the work is divided more evenly, and more
# is in memory at the same time.
MATRICES = 4


def owners(work: Sequence[int], processes: int) -> list[int]:
    """Return the process that computes each matrix: the one with least work, from the largest on.

    Args:
        work: the work that each matrix makes.
        processes: the number of processes.
    """
    loads = [(0, process) for process in range(processes)]
    found = [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        load, found[i] = heapq.heappop(loads)
        heapq.heappush(loads, (load + work[i], found[i]))
    return found


def row_counts(d: int, processes: int) -> list[int]:
    """Return how many of d rows each process has, as ``Shard(0)`` divides them."""
    most = -(-d // processes)
    return [min(most, max(d - rank * most, 0)) for rank in range(processes)]


def applied(
    function: Callable[[int, Tensor], Tensor],
    rows: Sequence[Tensor],
    shards: Sequence[Shards],
    work: Sequence[int],
) -> list[Tensor]:
    """Return this process's rows of functions of whole matrices.

    Args:
        function: takes the number of a matrix and the matrix ``[d, n]``; returns a matrix of its shape.
        rows: for each matrix the rows that this process has, of one dtype.
        shards: how each matrix is divided, all among the same processes.
        work: the work that each matrix makes.
    """
    mesh, dimension = shards[0].mesh, shards[0].dimension
    group, rank = mesh.get_group(dimension), mesh.get_local_rank(dimension)
    processes = shards[0].processes
    owned: list[list[int]] = [[] for _ in range(processes)]
    for i, owner in enumerate(owners(work, processes)):
        owned[owner].append(i)
    counts = [row_counts(each.d, processes) for each in shards]
    mine = owned[rank]
    # Numbers that go to each process, for each of its matrices, and that come from each process.
    sent = [[rows[i].numel() for i in theirs] for theirs in owned]
    taken = [[counts[i][other] * rows[i].shape[-1] for i in mine] for other in range(processes)]
    to_owners = torch.cat([rows[i].flatten() for theirs in owned for i in theirs])
    parts = _exchanged(to_owners, sent, taken, group)
    found = [
        function(i, torch.cat([of_one[k].view(-1, rows[i].shape[-1]) for of_one in parts]))
        for k, i in enumerate(mine)
    ]
    divided = [torch.split(whole, counts[i]) for i, whole in zip(mine, found, strict=True)]
    back = [of_matrix[other].flatten() for other in range(processes) for of_matrix in divided]
    own = _exchanged(torch.cat([to_owners[:0], *back]), taken, sent, group)
    results: dict[int, Tensor] = {}
    for theirs, of_owner in zip(owned, own, strict=True):
        results |= dict(zip(theirs, of_owner, strict=True))
    return [results[i].view_as(each) for i, each in enumerate(rows)]


def computed(
    function: Callable[[int, Tensor], Tensor],
    matrices: Sequence[Tensor],
    group: Any,
    work: Sequence[int],
) -> list[Tensor]:
    """Return functions of matrices that all processes have.

    Args:
        function: takes the number of a matrix and the matrix ``[d, n]``; returns a matrix of its shape.
        matrices: the matrices, of one dtype, the same in all processes.
        group: the process group.
        work: the work that each matrix makes.
    """
    processes = distributed.get_world_size(group)
    owner_of = owners(work, processes)
    owned = [[i for i, owner in enumerate(owner_of) if owner == k] for k in range(processes)]
    sizes = [[matrices[i].numel() for i in theirs] for theirs in owned]
    most = max(map(sum, sizes))
    mine = [function(i, matrices[i]).flatten() for i in owned[distributed.get_rank(group)]]
    own = torch.cat([matrices[0].new_empty(0), *mine])
    of_each = gathered(padded_to(own, most), group).view(processes, most)
    results: dict[int, Tensor] = {}
    for theirs, of_owner, parts in zip(owned, of_each, sizes, strict=True):
        results |= dict(zip(theirs, torch.split(of_owner[: sum(parts)], parts), strict=True))
    return [results[i].view_as(each) for i, each in enumerate(matrices)]


def _exchanged(
    tensor: Tensor, sent: list[list[int]], taken: list[list[int]], group: object
) -> list[Sequence[Tensor]]:
    """Return what each process has sent to this one, by an all-to-all.

    Args:
        tensor: what this process sends, one process after the other.
        sent: the sizes of the parts of it for each process.
        taken: the sizes of the parts that each process sends to this one.
        group: the process group.
    """
    given, wanted = [sum(sizes) for sizes in sent], [sum(sizes) for sizes in taken]
    found = tensor.new_empty(sum(wanted))
    distributed.all_to_all_single(found, tensor, wanted, given, group=group)
    of_each = torch.split(found, wanted)
    return [torch.split(part, sizes) for part, sizes in zip(of_each, taken, strict=True)]
