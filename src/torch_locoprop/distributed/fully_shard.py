"""Layers whose tensors are divided among processes by their output features.

``fully_shard`` (FSDP2) does so with all layers, and its processes have input rows of their own. Tensor
parallelism does so with ``ColwiseParallel`` layers, and its processes have the same input rows.

Output feature j of a layer has a local problem of its own, which needs row j of ``[W b]``, row j of the
gradient, and the input rows of all processes. :class:`Shards` says which rows this process has, and
brings together what the problems of all rows share: sums over rows of inputs, and over rows of weights.

Functions here take tensors and numbers; they know neither layers nor settings.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from torch_locoprop.layers.base import is_distributed

NAMES = ("weight", "bias")
NO_GRADIENT = -1  # in place of a number of passes: the layer does not move

# The names of collectives of one tensor since PyTorch 2.13, and before.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or getattr(
    distributed, "all_gather_into_tensor", None
)
_reduce_scatter: Any = getattr(distributed, "reduce_scatter_single", None) or getattr(
    distributed, "reduce_scatter_tensor", None
)


@dataclass(frozen=True, eq=False)
class Shards:
    """The rows of a layer's tensors that this process has, and the way to the others.

    A mesh of two dimensions replicates the rows along one of them (HSDP). All of its processes have
    input rows of their own.
    """

    mesh: Any  # the device mesh of torch.distributed
    dimension: int  # of the mesh, along which rows of tensors are divided
    d: int  # size of the weight's first dimension in all processes together
    tensors: Mapping[str, nn.Parameter]  # the sharded parameters by name
    same_inputs: bool = False  # all processes have the same input rows: tensor parallelism

    def are_those_of(self, module: nn.Module) -> bool:
        """Return True if a module has these tensors, or unsharded ones in their place."""
        own = {name: p for name in NAMES if (p := module._parameters.get(name)) is not None}
        return own.keys() == self.tensors.keys() and all(
            p is self.tensors[name]
            or (not is_distributed(p) and p.shape == self.tensors[name].shape)
            for name, p in own.items()
        )

    def own(self, whole: Tensor) -> Tensor:
        """Return this process's rows of a tensor ``[d, ...]``; that of a bias may have another d."""
        size = -(-len(whole) // self.processes)
        return whole[self.mesh.get_local_rank(self.dimension) * size :][:size]

    @property
    def processes(self) -> int:
        """The number of processes among which the rows are divided."""
        return int(self.mesh.size(self.dimension))

    def whole(self, rows: Tensor) -> Tensor:
        """Return the tensor ``[d, ...]`` of which every process has some rows, by an all-gather."""
        padded = padded_to(rows, -(-self.d // self.processes))
        return gathered(padded, self.mesh.get_group(self.dimension))[: self.d]

    def own_sum(self, whole: Tensor) -> Tensor:
        """Return this process's rows of the sum over all processes of tensors ``[d, ...]``.

        This is a reduce-scatter and, on a mesh of several dimensions, an all-reduce along the others.
        """
        most = -(-self.d // self.processes)
        padded = padded_to(whole, most * self.processes).contiguous()
        found = padded.new_empty(most, *whole.shape[1:])
        _reduce_scatter(found, padded, group=self.mesh.get_group(self.dimension))
        for dimension in range(self.mesh.ndim):
            if dimension != self.dimension:
                distributed.all_reduce(found, group=self.mesh.get_group(dimension))
        return found[: len(self.own(whole))]

    def add_up(self, of_rows: Tensor) -> Tensor:
        """Return the sum over the processes that have the other rows of the layer's tensors."""
        total = of_rows.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=self.mesh.get_group(self.dimension))
        return total

    def all_true(self, condition: Tensor) -> Tensor:
        """Return a boolean scalar: True if it is True in all processes that have rows of the layer."""
        return self.add_up((~condition).to(torch.float32)) == 0

    def wrapped(self, rows: Tensor, d: int) -> Tensor:
        """Return this process's rows as a DTensor ``[d, ...]`` with the placement of the weight."""
        from torch.distributed.tensor import DTensor

        like: Any = self.tensors["weight"]
        shape = torch.Size((d, *rows.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            rows, self.mesh, like.placements, run_check=False, shape=shape, stride=stride
        )

    # ---- input rows ------------------------------------------------------------------------------

    def sum_over_inputs(self, of_rows: Tensor) -> Tensor:
        """Return the sum over all processes that have input rows of their own."""
        if self.same_inputs:
            return of_rows
        total = of_rows.clone(memory_format=torch.contiguous_format)
        for group in self.mesh.get_all_groups():
            distributed.all_reduce(total, group=group)
        return total

    def all_inputs(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows ``[r, ...]`` of all processes, one after the other.

        Args:
            rows: the rows of this process.
            counts: the number of rows of each process.
        """
        if self.same_inputs:
            return rows
        most = max(counts)
        parts = of_all(self.mesh, padded_to(rows, most))
        if min(counts) == most:
            return parts.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def all_facts(self, fact: Any) -> list[Any]:
        """Return the picklable object that each process gives, in the order of :meth:`all_inputs`."""
        found = [fact]
        for group in () if self.same_inputs else reversed(self.mesh.get_all_groups()):
            parts: list[Any] = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(parts, found, group=group)
            found = [each for part in parts for each in part]
        return found

    def aligned(self, gradient: Tensor) -> Tensor:
        """Return a gradient with the placement of the weight."""
        given: Any = gradient
        weight: Any = self.tensors["weight"]
        if tuple(given.placements) == tuple(weight.placements):
            return gradient
        aligned: Tensor = given.redistribute(placements=weight.placements)
        return aligned


class ShardFacts(NamedTuple):
    """What one process knows about a sharded layer in this step."""

    begins: int  # number of passes before those that it has recorded, or NO_GRADIENT
    rows: int  # number of input rows
    kept: int  # number of input rows that were kept
    has_rows: bool  # rows, or XᵀX, were recorded
    has_gram: bool  # XᵀX was kept in place of rows
    role: str  # transfer and place in the model; must be the same in all processes


@dataclass(frozen=True)
class SharedShardFacts:
    """What every process knows about a sharded layer after the exchange of :class:`ShardFacts`."""

    of_each: tuple[tuple[int, int], ...]  # rows, and rows that were kept, of each process
    all_have_rows: bool  # every process has rows and the same role of the layer
    some_have_gram: bool  # at least one process keeps XᵀX in place of its rows
    begins: tuple[int, ...]  # of each process: passes before those that count, or NO_GRADIENT

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
    mesh: Any,
    layers: Sequence[ShardFacts],
    terms: float,
    device: torch.device,
    *,
    same_inputs: bool = False,
) -> tuple[list[SharedShardFacts], float]:
    """Exchange what the processes of a mesh know about their layers.

    Args:
        mesh: the device mesh of the layers.
        layers: this process's facts, for the same layers in every process.
        terms: number of terms that this process's loss sums.
        device: the device for the exchange.
        same_inputs: all processes have the same input rows, which count once.

    Returns:
        The shared facts of each layer, and the mean of ``terms`` over the processes.
    """
    own = [number for layer in layers for number in (*layer[:5], zlib.crc32(layer.role.encode()))]
    numbers = torch.tensor([*own, terms], dtype=torch.float64, device=device)
    known = of_all(mesh, numbers).tolist()
    found = []
    for i in range(len(layers)):
        begins, rows, kept, have, grams, roles = zip(
            *(each[6 * i : 6 * i + 6] for each in known), strict=True
        )
        of_each = tuple(zip(map(int, rows), map(int, kept), strict=True))
        of_each = of_each[:1] if same_inputs else of_each
        together = all(have) and len(set(roles)) == 1
        found.append(SharedShardFacts(of_each, together, any(grams), tuple(map(int, begins))))
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
    sharded: Any = tensor.detach()
    whole: Tensor = sharded.full_tensor()
    return whole


def managed_modules(model: nn.Module) -> set[nn.Module]:
    """Return all modules inside of modules to which ``fully_shard`` was applied."""
    if not any(is_distributed(p) for p in model.parameters()):
        return set()
    from torch.distributed.fsdp import FSDPModule

    roots = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return {module for root in roots for module in root.modules()}


def shards_of(module: nn.Module, managed: bool) -> Shards | str | None:
    """Return the shards of a layer, or why it has no local problem; None if it is not sharded.

    Args:
        module: the layer.
        managed: True if ``fully_shard`` was applied to the layer, or to a module around it.
    """
    own: dict[str, Any] = {n: p for n in NAMES if (p := module._parameters.get(n)) is not None}
    if not any(is_distributed(p) for p in own.values()):
        return None
    if not all(is_distributed(p) for p in own.values()):
        return "only one of its weight and bias is sharded"
    from torch.distributed.tensor import Replicate, Shard

    weight = own["weight"]
    for p in own.values():
        if (p.device_mesh, p.placements) != (weight.device_mesh, weight.placements):
            return "its weight and bias are sharded in different ways"
    sharded = [i for i, each in enumerate(weight.placements) if each == Shard(0)]
    if len(sharded) != 1 or any(each not in (Replicate(), Shard(0)) for each in weight.placements):
        return f"its weight is sharded as {weight.placements}, not once by its first dimension"
    if weight.device.type != weight.device_mesh.device_type:  # CPUOffloadPolicy
        return f"its weight is on {weight.device}, its mesh has {weight.device_mesh.device_type}s"
    if not managed and weight.device_mesh.ndim > 1:
        return "its weight is a DTensor on a mesh of several dimensions, without fully_shard"
    return Shards(weight.device_mesh, sharded[0], weight.shape[0], own, same_inputs=not managed)


def is_replicated(tensor: Tensor) -> bool:
    """Return True if all processes have all of a DTensor."""
    from torch.distributed.tensor import Replicate

    sharded: Any = tensor
    return all(each == Replicate() for each in sharded.placements)


def of_all(mesh: Any, tensor: Tensor) -> Tensor:
    """Return the tensors, of one shape, of all processes of a mesh: ``[processes, ...]``."""
    found = tensor.unsqueeze(0)
    for group in reversed(mesh.get_all_groups()):
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
