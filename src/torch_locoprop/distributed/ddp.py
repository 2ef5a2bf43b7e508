"""Processes that train one model under ``DistributedDataParallel``.

DDP averages the gradients of its processes. A local problem also needs what the rows add in its
iterations. Added up over the processes, that is the sum over all their rows, so every process finds the
same solution, which is the solution of one process with the whole batch.

Functions here take tensors and numbers; they know neither layers nor settings.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class LayerFacts(NamedTuple):
    """What one process knows of a layer in this step."""

    rows: int
    has_rows: bool
    has_gram: bool  # instead of rows
    role: str  # transfer and place in the model, which must be the same in all processes


@dataclass(frozen=True)
class Together:
    """What all processes together know of a layer before they solve its problem."""

    group: Any  # of torch.distributed
    rows: int  # of all processes
    all_have_rows: bool  # every process has rows and sees the layer in the same role
    some_have_gram: bool  # a process keeps XᵀX instead of its rows

    @property
    def processes(self) -> int:
        """The number of processes."""
        return torch.distributed.get_world_size(self.group)

    def average(self, mean: Tensor) -> Tensor:
        """Return the mean over the processes of what is a mean over rows in each."""
        mean = mean.clone()
        Exchange(self, mean=True).add_up([mean])
        return mean


@dataclass(frozen=True)
class Exchange:
    """Adds up, over the processes, what each has of its own rows of one problem."""

    together: Together
    mean: bool  # divide by the number of processes: a row counts its share in its process's mean

    @property
    def rows(self) -> int:
        """The number of rows of all processes together."""
        return self.together.rows

    @property
    def some_have_gram(self) -> bool:
        """True if a process keeps XᵀX in place of its rows."""
        return self.together.some_have_gram

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place and in all processes, by its sum over them."""
        for tensor in tensors:
            whole = tensor.contiguous()
            torch.distributed.all_reduce(whole, group=self.together.group)
            if self.mean:
                whole /= self.together.processes
            if whole is not tensor:
                tensor.copy_(whole)

    def average(self, mean: Tensor) -> Tensor:
        """Return the mean over the processes of what is a mean over rows in each."""
        return self.together.average(mean)


def averaging_processes() -> Any:
    """Return the process group of the DDP module whose forward pass runs now; None if there is none."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is None or torch.distributed.get_world_size(wrapper.process_group) == 1:
        return None
    return wrapper.process_group


def agree(
    group: Any, layers: Sequence[LayerFacts], terms: float, device: torch.device
) -> tuple[list[Together], float]:
    """Exchange, in one reduction, what all processes know of their layers.

    Args:
        group: the process group.
        layers: this process's facts, for the same layers in every process.
        terms: number of terms that this process's loss sums.
        device: where the reduction runs.

    Returns:
        What all know of each layer, and the mean of the numbers of terms.
    """
    own = [float(number) for layer in layers for number in _numbers(layer)]
    sums = torch.tensor([*own, terms], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(sums, group=group)
    *all_known, terms = sums.tolist()
    world = torch.distributed.get_world_size(group)
    found = []
    for i in range(len(layers)):
        rows, with_rows, with_gram, roles, squares = all_known[5 * i : 5 * i + 5]
        alike = world * squares == roles**2
        found.append(Together(group, int(rows), alike and with_rows == world, with_gram > 0))
    return found, terms / world


def _numbers(layer: LayerFacts) -> tuple[int, ...]:
    """Return the facts as numbers that can be summed; equal roles show in the sum of squares."""
    role = zlib.crc32(layer.role.encode()) % 9973
    return layer.rows, layer.has_rows, layer.has_gram, role, role**2


def are_several() -> bool:
    """Return True if ``torch.distributed`` runs several processes."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return torch.distributed.get_world_size() > 1
