"""Layers whose tensors are divided among processes by their output features.

``fully_shard`` (FSDP2) divides all layers in this way, and each process has its own input rows. Tensor
parallelism divides ``ColwiseParallel`` layers in this way, and all processes have the same input rows.

Output feature j of a layer has a local problem of its own, which needs row j of ``[W b]``, row j of the
gradient, and the input rows of all processes. :class:`Shards` says which rows this process has, and
brings together what the problems of all rows share: sums over rows of inputs, and over rows of weights.

Functions here take tensors and numbers; they know neither layers nor settings. Which shards a layer has
is read in ``placements.py``, and layers with divided inputs are in ``tensor_parallel.py``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_locoprop.distributed.collectives import (
    add_up,
    called,
    gathered,
    of_all,
    padded_to,
    row_counts,
    scattered_sum,
)
from torch_locoprop.layers.base import is_distributed

NAMES = ("weight", "bias")
NO_GRADIENT = -1  # ShardFacts.begins of a layer without a gradient, which does not move


@dataclass(frozen=True, eq=False)
class Shards:
    """The rows of a layer's tensors that this process has, and the exchange with other processes.

    The processes are a mesh. Along some dimensions of the mesh rows of tensors are divided, along
    others they are replicated (HSDP). Along the dimensions of ``fully_shard`` the processes have
    different input rows, along the dimension of tensor parallelism they have the same.
    """

    mesh: Any  # the device mesh of torch.distributed
    divided: tuple[int, ...]  # mesh dimensions that divide the tensors' rows, in this order
    data: tuple[int, ...]  # mesh dimensions along which processes have different input rows
    d: int  # size of the weight's first dimension in all processes together
    tensors: Mapping[str, nn.Parameter]  # the sharded parameters by name
    divides_features = False  # each process has some of the input features only

    def are_those_of(self, module: nn.Module) -> bool:
        """Return True if a module has these tensors, or unsharded ones in their place."""
        own = {name: p for name in NAMES if (p := module._parameters.get(name)) is not None}
        return own.keys() == self.tensors.keys() and all(
            p is self.tensors[name]
            or (p.shape == self.tensors[name].shape and not self._is_on_mesh(p))
            for name, p in own.items()
        )

    def _is_on_mesh(self, tensor: Any) -> bool:
        return is_distributed(tensor) and tensor.device_mesh == self.mesh

    @property
    def same_inputs(self) -> bool:
        """True if all processes have the same input rows: tensor parallelism alone."""
        return not self.data

    @property
    def own_count(self) -> int:
        """The number of rows of the weight that this process solves."""
        return self.pieces[-1]

    @property
    def pieces(self) -> list[int]:
        """The number of the weight's rows: all of them, then this process's after each division."""
        counts = [self.d]
        for i in self.divided:
            counts.append(row_counts(counts[-1], self.mesh.size(i))[self.mesh.get_local_rank(i)])
        return counts

    def own(self, whole: Tensor) -> Tensor:
        """Return this process's rows of a tensor ``[d, ...]``; that of a bias may have another d."""
        for i in self.divided:
            size = -(-len(whole) // int(self.mesh.size(i)))
            whole = whole[self.mesh.get_local_rank(i) * size :][:size]
        return whole

    @property
    def processes(self) -> int:
        """The number of processes among which the rows are divided."""
        return math.prod(self.mesh.size(i) for i in self.divided)

    def whole(self, rows: Tensor) -> Tensor:
        """Return the tensor ``[d, ...]`` of which every process has some rows, by all-gathers."""
        for i, count in reversed(list(zip(self.divided, self.pieces, strict=False))):
            most = row_counts(count, self.mesh.size(i))[0]
            rows = gathered(padded_to(rows, most), self.mesh.get_group(i))[:count]
        return rows

    def own_sum(self, whole: Tensor) -> Tensor:
        """Return this process's rows of the sum of tensors ``[d, ...]`` over all input rows.

        This is a reduce-scatter and, on a mesh that replicates rows, an all-reduce.
        """
        for i in self.divided:
            most = row_counts(len(whole), self.mesh.size(i))[0]
            first = most * self.mesh.get_local_rank(i)
            if i in self.data:
                count = len(whole[first:][:most])
                padded = padded_to(whole, most * self.mesh.size(i))
                whole = scattered_sum(padded, self.mesh.get_group(i))[:count]
            else:
                whole = whole[first:][:most]
        return self._sum(whole, [i for i in self.data if i not in self.divided])

    def add_up(self, of_rows: Tensor) -> Tensor:
        """Return the sum over the processes that have the other rows of the layer's tensors."""
        return self._sum(of_rows, self.divided)

    def all_true(self, condition: Tensor) -> Tensor:
        """Return a boolean scalar: True if it is True in all processes that have rows of the layer."""
        return self.add_up((~condition).to(torch.float32)) == 0

    def wrapped(self, rows: Tensor) -> Tensor:
        """Return this process's rows as a DTensor ``[d, ...]``."""
        return self._as_dtensor(rows, (self.d, *rows.shape[1:]), self._row_placements)

    @property
    def _row_placements(self) -> Any:
        """The placements of a DTensor of which each process has the rows that it solves."""
        like: Any = self.tensors["weight"]
        return like.placements

    def like_parameter(self, name: str, part: Tensor) -> Tensor:
        """Return this process's part of a parameter, or of its gradient, as a DTensor."""
        like: Any = self.tensors[name]
        return self._as_dtensor(part, like.shape, like.placements)

    def _as_dtensor(self, part: Tensor, shape: Sequence[int], placements: Any) -> Tensor:
        from torch.distributed.tensor import DTensor

        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def _sum(self, tensor: Tensor, dimensions: Sequence[int]) -> Tensor:
        """Return the sum over the processes along some dimensions of the mesh."""
        if not dimensions:
            return tensor
        total = tensor.clone(memory_format=torch.contiguous_format)
        for i in dimensions:
            add_up(total, self.mesh.get_group(i))
        return total

    # ---- from tensors as they are stored to rows, and back --------------------------------------

    def to_rows(self, name: str, tensor: Tensor) -> Tensor:
        """Return the rows that this process solves of a parameter or its gradient, a DTensor."""
        return local(tensor)

    def from_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return this process's part of a parameter as it is stored; the inverse of :meth:`to_rows`."""
        return rows

    def counted_once(self, name: str, part: Tensor) -> Tensor:
        """Return the entries of this process's part that it counts in a sum over all processes.

        Entries that several processes have are counted by one of them.
        """
        return part

    # ---- input rows ------------------------------------------------------------------------------

    def sum_over_inputs(self, of_rows: Tensor) -> Tensor:
        """Return the sum over all processes that have input rows of their own."""
        return self._sum(of_rows, self.data)

    def are_known(self, x: Tensor) -> bool:
        """Return True if this process has all features of its input rows x, a DTensor."""
        given: Any = x
        return all(each.is_replicate() for each in given.placements)

    def all_features(self, x: Tensor) -> Tensor:
        """Return input rows ``[r, n]`` with the features of all processes."""
        return x

    def all_inputs(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows ``[r, ...]`` of all processes, one after the other.

        Args:
            rows: the rows of this process.
            counts: the number of rows of each process.
        """
        if not self.data:
            return rows
        most = max(counts)
        parts = of_all(self._data_groups, padded_to(rows, most))
        if min(counts) == most:
            return parts.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @property
    def _data_groups(self) -> list[Any]:
        return [self.mesh.get_group(i) for i in self.data]

    @property
    def data_ranks(self) -> list[int]:
        """The ranks in the mesh of processes that have, together, all input rows of the batch."""
        places = torch.arange(self.mesh.size(), device="cpu").view(self.mesh.shape)
        for i in range(self.mesh.ndim):
            if i not in self.data:
                places = places.narrow(i, self.mesh.get_local_rank(i), 1)
        return [int(place) for place in places.flatten()]

    def is_aligned(self, name: str, gradient: Tensor) -> bool:
        """Return True if a gradient of a parameter has the placement of the parameter."""
        given: Any = gradient
        like: Any = self.tensors[name]
        return tuple(given.placements) == tuple(like.placements)

    def aligned(self, name: str, gradient: Tensor) -> Tensor:
        """Return a gradient of a parameter with the placement of the parameter."""
        if self.is_aligned(name, gradient):
            return gradient
        given: Any = gradient
        like: Any = self.tensors[name]
        aligned: Tensor = given.redistribute(placements=like.placements)
        return aligned


class ShardFacts(NamedTuple):
    """The facts that one process knows about a sharded layer in this step."""

    begins: int  # number of passes before the first recorded one, or NO_GRADIENT
    rows: int  # number of input rows
    kept: int  # number of input rows that were kept
    has_rows: bool  # rows, or XᵀX, were recorded
    has_gram: bool  # XᵀX was kept in place of rows
    role: str  # transfer and place in the model; must be the same in all processes


@dataclass(frozen=True)
class SharedShardFacts:
    """The facts that every process knows about a sharded layer after exchanging :class:`ShardFacts`."""

    of_each: tuple[tuple[int, int], ...]  # (rows, kept rows) of each process
    all_have_rows: bool  # every process has rows and the same role of the layer
    some_have_gram: bool  # at least one process keeps XᵀX in place of its rows
    begins: tuple[int, ...]  # ShardFacts.begins of each process
    groups: tuple[Any, ...] = ()  # the process groups of the mesh; a mesh may get new ones

    @property
    def processes(self) -> int:
        """The number of processes."""
        return len(self.of_each)

    @property
    def rows(self) -> int:
        """The number of rows of all processes."""
        return sum(rows for rows, _ in self.of_each)

    @property
    def kept(self) -> list[int]:
        """The number of rows that each process has kept."""
        return [kept for _, kept in self.of_each]

    @property
    def equal_rows(self) -> bool:
        """True if all processes have the same number of rows and have kept all of them."""
        rows = {number for each in self.of_each for number in each}
        return len(rows) == 1


def agree(
    shards: Sequence[Shards], layers: Sequence[ShardFacts], terms: float, device: torch.device
) -> tuple[list[SharedShardFacts], float]:
    """Exchange what the processes of a mesh know about their layers.

    Args:
        shards: the shards of each layer, all on one mesh.
        layers: this process's facts, for the same layers in every process.
        terms: number of terms that this process's loss sums.
        device: the device for the exchange.

    Returns:
        The shared facts of each layer, and the mean of ``terms`` over the processes.
    """
    own = [number for layer in layers for number in (*layer[:5], zlib.crc32(layer.role.encode()))]
    numbers = torch.tensor([*own, terms], dtype=torch.float64, device=device)
    groups = tuple(shards[0].mesh.get_all_groups())
    known = of_all(groups, numbers).tolist()
    found = []
    for i, own_shards in enumerate(shards):
        begins, rows, kept, have, grams, roles = zip(
            *(each[6 * i : 6 * i + 6] for each in known), strict=True
        )
        of_each = tuple((int(rows[j]), int(kept[j])) for j in own_shards.data_ranks)
        together = all(have) and len(set(roles)) == 1
        numbers_of_passes = tuple(map(int, begins))
        found.append(SharedShardFacts(of_each, together, any(grams), numbers_of_passes, groups))
    return found, sum(each[-1] for each in known) / len(known)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor; any other tensor itself."""
    if not is_distributed(tensor):
        return tensor
    sharded: Any = tensor
    part: Tensor = sharded.to_local().detach()
    return part


def full(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor, by an all-gather; any other tensor itself."""
    if not is_distributed(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    given: Any = tensor
    own, mesh, placements = local(tensor), given.device_mesh, given.placements
    layout = {"shape": given.shape, "stride": given.stride()}

    def gather(whole: Tensor, part: Tensor) -> None:
        sharded: Any = DTensor.from_local(part, mesh, placements, run_check=False, **layout)
        whole.copy_(sharded.full_tensor())

    return called(gather, own.new_empty(tensor.shape), own)
