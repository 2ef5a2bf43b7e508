"""Local problems whose rows are on several processes, under ``DistributedDataParallel``.

DDP averages the gradients of its processes. The local iterations after the first also need sums over
rows. Each process computes these sums over its own rows, and an all-reduce adds them up. Every process
therefore finds the same solution: that of one process with the whole batch.

Functions here take tensors and numbers; they know neither layers nor settings.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class LayerFacts(NamedTuple):
    """What one process knows about a layer in this step."""

    rows: int  # number of rows
    has_rows: bool  # rows, or XᵀX, were recorded
    has_gram: bool  # XᵀX was kept in place of rows
    role: str  # transfer and place in the model; must be the same in all processes


@dataclass(frozen=True)
class SharedFacts:
    """What every process knows about a layer after the exchange of :class:`LayerFacts`."""

    group: Any  # the process group of torch.distributed
    rows: int  # number of rows of all processes
    all_have_rows: bool  # every process has rows and the same role of the layer
    some_have_gram: bool  # at least one process keeps XᵀX in place of its rows

    @property
    def processes(self) -> int:
        """The number of processes."""
        return torch.distributed.get_world_size(self.group)

    def average(self, mean: Tensor) -> Tensor:
        """Return the mean over all processes.

        Args:
            mean: this process's mean over its rows.
        """
        mean = mean.clone()
        Exchange(self, mean=True).add_up([mean])
        return mean


@dataclass(frozen=True)
class Exchange:
    """Adds up, over all processes, sums that each computes over its own rows of one problem.

    Args:
        facts: what every process knows about the layer.
        mean: divide the sums by the number of processes, for a loss that is a mean over rows.
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
            torch.distributed.all_reduce(whole, group=self.facts.group)
            if self.mean:
                whole /= self.facts.processes
            if whole is not tensor:
                tensor.copy_(whole)

    def average(self, mean: Tensor) -> Tensor:
        """Return the mean over all processes.

        Args:
            mean: this process's mean over its rows.
        """
        return self.facts.average(mean)


def averaging_processes() -> Any:
    """Return the process group of the DDP module whose forward pass is running.

    Returns:
        The group; None if no DDP module is running, or if it has one process only.

    Raises:
        RuntimeError: the DDP module runs inside the context ``Join``.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is None or torch.distributed.get_world_size(wrapper.process_group) == 1:
        return None
    if getattr(getattr(wrapper, "_join_config", None), "enable", False):
        raise RuntimeError(
            "The Join context of torch.distributed does not work with this optimizer: a process that "
            "has run out of batches would have to take part in the others' local problems. Give all "
            "processes the same number of batches, for example with DistributedSampler; a batch may "
            "be empty."
        )
    return wrapper.process_group


def are_averaged() -> bool:
    """Return True if the DDP module whose forward pass is running will average gradients.

    Inside its context ``no_sync()`` it will not.
    """
    wrapper: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return wrapper is None or bool(wrapper.require_backward_grad_sync)


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return True if all processes share the layers of a model, and so have the same rows.

    Parameters that ``fully_shard`` distributes are DTensors too, but its processes have other rows. So
    have processes outside of the mesh of a parameter.
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
    group: Any, layers: Sequence[LayerFacts], terms: float, device: torch.device
) -> tuple[list[SharedFacts], float]:
    """Exchange what the processes know about their layers, in one all-reduce.

    Args:
        group: the process group.
        layers: this process's facts, for the same layers in every process.
        terms: number of terms that this process's loss sums.
        device: the device for the all-reduce.

    Returns:
        The shared facts of each layer, and the mean of ``terms`` over the processes.
    """
    own = [float(number) for layer in layers for number in _numbers(layer)]
    sums = torch.tensor([*own, terms], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(sums, group=group)
    *of_layers, terms = sums.tolist()
    world = torch.distributed.get_world_size(group)
    found = []
    for i in range(len(layers)):
        rows, with_rows, with_gram, roles, squares = of_layers[5 * i : 5 * i + 5]
        equal_roles = world * squares == roles**2  # by the Cauchy–Schwarz inequality
        all_have_rows = equal_roles and with_rows == world
        found.append(SharedFacts(group, int(rows), all_have_rows, with_gram > 0))
    return found, terms / world


def _numbers(layer: LayerFacts) -> tuple[int, ...]:
    """Return the facts as numbers whose sums over processes are enough for :func:`agree`."""
    role = zlib.crc32(layer.role.encode()) % 9973
    return layer.rows, layer.has_rows, layer.has_gram, role, role**2


def are_several() -> bool:
    """Return True if ``torch.distributed`` runs several processes."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return torch.distributed.get_world_size() > 1
