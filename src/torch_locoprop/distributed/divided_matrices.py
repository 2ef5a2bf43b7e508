"""Functions of whole matrices, each computed by one process.

The matrices are divided among the processes by the work that they make. If every process has some rows
of each matrix, it sends them to the owner of the matrix, which computes the function and sends rows of
the result back; each way is one all-to-all for all matrices together, or two if rows are divided along
two dimensions of a mesh. If every process has all of each matrix, one all-gather brings all results to
all processes.

Functions here take tensors and numbers; they know neither layers nor settings.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from torch_locoprop.distributed.collectives import exchanged, gathered, padded_to, row_counts
from torch_locoprop.distributed.fully_shard import Shards

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
        shards: how each matrix is divided, all along the same dimensions of the same mesh.
        work: the work that each matrix makes.
    """
    found = _applied(function, dict(enumerate(rows)), shards, work, len(shards[0].divided))
    return [found[i] for i in range(len(rows))]


def _applied(
    function: Callable[[int, Tensor], Tensor],
    rows: dict[int, Tensor],
    shards: Sequence[Shards],
    work: Sequence[int],
    divisions: int,
) -> dict[int, Tensor]:
    """Return :func:`applied` for matrices that were divided some times, by number.

    The last division is undone first: each process of its dimension then has some of the matrices, with
    all rows that the dimension has of them.
    """
    if divisions == 0 or not rows:
        return {i: function(i, matrix) for i, matrix in rows.items()}
    mesh, dimension = shards[0].mesh, shards[0].divided[divisions - 1]
    group, rank = mesh.get_group(dimension), mesh.get_local_rank(dimension)
    processes = int(mesh.size(dimension))
    owned: list[list[int]] = [[] for _ in range(processes)]
    for i, owner in zip(rows, owners([work[i] for i in rows], processes), strict=True):
        owned[owner].append(i)
    counts = {i: row_counts(shards[i].pieces[divisions - 1], processes) for i in rows}
    mine = owned[rank]
    # Numbers that go to each process, for each of its matrices, and that come from each process.
    sent = [[rows[i].numel() for i in theirs] for theirs in owned]
    taken = [[counts[i][other] * rows[i].shape[-1] for i in mine] for other in range(processes)]
    to_owners = torch.cat([rows[i].flatten() for theirs in owned for i in theirs])
    parts = _exchanged(to_owners, sent, taken, group)
    joined = {
        i: torch.cat([of_one[k].view(-1, rows[i].shape[-1]) for of_one in parts])
        for k, i in enumerate(mine)
    }
    found = _applied(function, joined, shards, work, divisions - 1)
    divided = [torch.split(found[i], counts[i]) for i in mine]
    back = [of_matrix[other].flatten() for other in range(processes) for of_matrix in divided]
    own = _exchanged(torch.cat([to_owners[:0], *back]), taken, sent, group)
    return {
        i: result.view_as(rows[i])
        for theirs, of_owner in zip(owned, own, strict=True)
        for i, result in zip(theirs, of_owner, strict=True)
    }


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
    of_each = torch.split(exchanged(tensor, given, wanted, group), wanted)
    return [torch.split(part, sizes) for part, sizes in zip(of_each, taken, strict=True)]
