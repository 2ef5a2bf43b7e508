"""Local problems whose rows are on several processes, under ``DistributedDataParallel``.

DDP averages the gradients of its processes. The local iterations after the first also need sums over
rows. Each process computes these sums over its own rows, and an all-reduce adds them up. Every process
therefore finds the same solution: that of one process with the whole batch.

Functions here take tensors and numbers; they know neither layers nor settings.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_locoprop.distributed import collectives
from torch_locoprop.distributed.live_objects import instances

DDP_FACTS = 8  # numbers that a process tells about a layer
# A process that has dropped rows sends this in place of its squared number of rows: with a negative
# sum, the processes do not count as having equal numbers of rows.
_SOME_DROPPED = -(2**50)

JOIN_WITHOUT_OPTIMIZER = (
    "The Join context of torch.distributed was entered without the optimizer, but a process that has "
    "run out of batches has to take part in the others' local problems. Give it both, the model first: "
    "Join([model, opt])."
)


class LayerFacts(NamedTuple):
    """The facts that one process knows about a layer in this step."""

    rows: int  # number of rows
    kept: int  # number of rows that were kept
    has_rows: bool  # rows, or XᵀX, were recorded
    has_gram: bool  # XᵀX was kept in place of rows
    role: str  # transfer and place in the model; must be the same in all processes
    shapes: str = ""  # shapes of inputs, if they do not follow from the number of rows


@dataclass(frozen=True)
class SharedFacts:
    """The facts that every process knows about a layer after the exchange of :class:`LayerFacts`."""

    group: Any  # the process group of torch.distributed
    rows: int  # number of rows of all processes
    all_have_rows: bool  # every process has rows and the same role of the layer
    some_have_gram: bool  # at least one process keeps XᵀX in place of its rows
    active: int  # number of processes that have a batch in this step
    divisor: int  # DDP divides sums of gradients over the processes by this
    has_joined: bool  # this process has run out of batches, inside of Join
    # All processes have the same number of rows, from inputs of the same shapes, and have kept all.
    equal_rows: bool

    @property
    def processes(self) -> int:
        """The number of processes."""
        return torch.distributed.get_world_size(self.group)

    def average(self, mean: Tensor) -> Tensor:
        """Return the mean over all processes that have a batch.

        Args:
            mean: this process's mean over its rows.
        """
        total = torch.zeros_like(mean) if self.has_joined else mean.clone()
        Exchange(self, mean=False).add_up([total])
        return total / self.active


@dataclass(frozen=True)
class Exchange:
    """Adds up, over all processes, sums that each computes over its own rows of one problem.

    Args:
        facts: what every process knows about the layer.
        mean: divide the sums as DDP divides gradients, for a loss that is a mean over rows.
    """

    facts: SharedFacts
    mean: bool

    @property
    def rows(self) -> int:
        """The number of rows of all processes."""
        return self.facts.rows

    @property
    def some_have_gram(self) -> bool:
        """True if at least one process keeps XᵀX in place of its rows."""
        return self.facts.some_have_gram

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over all processes (by its mean, if ``mean``)."""
        for tensor in tensors:
            whole = tensor.contiguous()
            collectives.add_up(whole, self.facts.group)
            if self.mean:
                whole /= self.facts.divisor
            if whole is not tensor:
                tensor.copy_(whole)

    def average(self, mean: Tensor) -> Tensor:
        """Return the mean over all processes.

        Args:
            mean: this process's mean over its rows.
        """
        return self.facts.average(mean)


def averaging_processes(*, joins: bool) -> Any:
    """Return the process group of the DDP module whose forward pass is running.

    Args:
        joins: the optimizer was given to the context ``Join``.

    Returns:
        The group; None if no DDP module is running, or if it has one process only.

    Raises:
        RuntimeError: the DDP module runs inside the context ``Join``, without the optimizer.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is None or torch.distributed.get_world_size(wrapper.process_group) == 1:
        return None
    if not joins and getattr(getattr(wrapper, "_join_config", None), "enable", False):
        raise RuntimeError(JOIN_WITHOUT_OPTIMIZER)
    return wrapper.process_group


def are_averaged() -> bool:
    """Return True if the DDP module whose forward pass is running will average gradients.

    Inside the context ``no_sync()`` DDP does not average.
    """
    wrapper: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return wrapper is None or bool(wrapper.require_backward_grad_sync)


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return True if all processes share the layers of a model, and so have the same rows.

    Return False under ``fully_shard``: its parameters are DTensors too, but its processes have
    different rows. Return False too if the mesh of the parameters has not all processes.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return False
    return any(
        isinstance(p, DTensor) and p.device_mesh.size() == torch.distributed.get_world_size()
        for p in model.parameters()
    )


def agree(
    group: Any,
    layers: Sequence[LayerFacts],
    terms: float | None,
    device: torch.device,
    *,
    by_all: bool,
) -> tuple[list[SharedFacts], float]:
    """Exchange what the processes know about their layers, in one all-reduce.

    Args:
        group: the process group.
        layers: this process's facts, for the same layers in every process.
        terms: number of terms that this process's loss sums; None if it has run out of batches.
        device: the device for the all-reduce.
        by_all: DDP divides by the number of all processes, also of those that ran out of batches.

    Returns:
        The shared facts of each layer, and the mean of ``terms`` over the processes with a batch.
    """
    own = [float(number) for layer in layers for number in _numbers(layer)]
    last = (0.0, 0.0) if terms is None else (terms, 1.0)
    sums = torch.tensor([*own, *last], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(sums, group=group)
    *of_layers, total, active = sums.tolist()
    world = torch.distributed.get_world_size(group)
    members = (int(active), world if by_all else int(active), terms is None)
    found = []
    for i in range(len(layers)):
        rows, with_rows, with_gram, roles, squares, of_rows, shapes, of_shapes = of_layers[
            DDP_FACTS * i : DDP_FACTS * (i + 1)
        ]
        equal_roles = world * squares == roles**2  # equality in Cauchy–Schwarz
        all_have_rows = equal_roles and with_rows == world
        equal_rows = world * of_rows == rows**2 and world * of_shapes == shapes**2
        facts = (int(rows), all_have_rows, with_gram > 0, *members, equal_rows)
        found.append(SharedFacts(group, *facts))
    return found, total / active


def _numbers(layer: LayerFacts) -> tuple[int, ...]:
    """Return the facts as numbers whose sums over processes are enough for :func:`agree`."""
    role = zlib.crc32(layer.role.encode()) % 9973
    of_rows = layer.rows**2 if layer.kept == layer.rows else _SOME_DROPPED
    shapes = zlib.crc32(layer.shapes.encode()) % 1048573  # sums of squares stay exact
    flags = layer.has_rows, layer.has_gram
    return layer.rows, *flags, role, role**2, of_rows, shapes, shapes**2


def share_gradients(
    group: Any, parameters: Sequence[nn.Parameter], settings: Sequence[float], *, has_joined: bool
) -> Sequence[float]:
    """Give the gradients to processes that have run out of batches, and have none.

    Args:
        group: the process group.
        parameters: the parameters, in the same order in all processes.
        settings: numbers that schedules may have changed in processes with a batch.
        has_joined: this process has run out of batches.

    Returns:
        The settings of processes with a batch.
    """
    world, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    known = [float(p.grad is not None) for p in parameters]
    given = [-torch.inf] * len(settings) if has_joined else settings
    place = 0.0 if has_joined else float(world - rank)
    numbers = torch.tensor(
        [float(has_joined), place, *known, *given], dtype=torch.float64, device=parameters[0].device
    )
    torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, group=group)
    some_joined, place, *rest = numbers.tolist()
    if not some_joined:
        return settings
    source = world - int(place)
    for p, has_gradient in zip(parameters, rest, strict=False):
        if not has_gradient:
            continue
        gradient = p.grad if rank == source and p.grad is not None else torch.empty_like(p)
        torch.distributed.broadcast(gradient, group=group, group_src=source)
        if has_joined:
            p.grad = gradient
    return rest[len(parameters) :]


def wrapper_of(layers: Collection[nn.Module]) -> DistributedDataParallel | None:
    """Return the DDP module that has all of these layers; None if there is none.

    Raises:
        RuntimeError: if there are several.
    """
    found = _wrappers_of(layers)
    if len(found) > 1:  # an earlier wrapper may be waiting for the garbage collector
        found = []
        gc.collect()
        found = _wrappers_of(layers)
    if len(found) > 1:
        raise RuntimeError(
            "Several DistributedDataParallel modules have this model, so the optimizer does not know "
            "which of them the Join context is for. Keep one of them."
        )
    return found[0] if found else None


def _wrappers_of(layers: Collection[nn.Module]) -> list[DistributedDataParallel]:
    wrappers = instances(DistributedDataParallel)
    return [each for each in wrappers if set(each.modules()).issuperset(layers)]


def are_several() -> bool:
    """Return True if ``torch.distributed`` runs several processes."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return torch.distributed.get_world_size() > 1
