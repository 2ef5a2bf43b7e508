"""What processes that train one model tell each other of their rows.

``DistributedDataParallel`` averages the gradients of its processes. A local problem also needs what the
rows add in its iterations; added up over the processes, it is that of all their rows together, so all
of them find the same solution, which is that of one process with the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Together:
    """What all processes know of a layer before they solve its problem."""

    group: Any  # of torch.distributed
    rows: int  # of all
    all_have_rows: bool  # and take the layer for the same
    some_have_gram: bool  # instead of them

    @property
    def processes(self) -> int:
        return torch.distributed.get_world_size(self.group)


@dataclass(frozen=True)
class Exchange:
    """Adds up over processes what each has of its own rows."""

    together: Together
    mean: bool  # over the processes, where a row counts its share in the mean of its process

    def __call__(self, tensors: Iterable[Tensor]) -> None:
        """In place, in all processes at once."""
        for tensor in tensors:
            whole = tensor.contiguous()
            torch.distributed.all_reduce(whole, group=self.together.group)
            if self.mean:
                whole /= self.together.processes
            if whole is not tensor:
                tensor.copy_(whole)


def averaged(tensor: Tensor, together: Together | None) -> Tensor:
    """The mean over the processes, for what is a mean over rows in each."""
    if together is not None:
        tensor = tensor.clone()
        Exchange(together, mean=True)([tensor])
    return tensor


def averaging() -> Any:
    """The processes whose gradients the forward pass that is going on will have averaged."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is None or torch.distributed.get_world_size(wrapper.process_group) == 1:
        return None
    return wrapper.process_group
