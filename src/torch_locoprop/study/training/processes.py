"""Several processes that train one model together, started by ``torchrun``.

Each process has the whole model and an equal share of every batch; DistributedDataParallel averages the
gradients. The first process alone reads and writes files. An error in one process, such as a full disk,
is raised in all of them, so that none waits for the others.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from torch_locoprop.study.training.stop_signals import StopRequest

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes of a run, one by default; every process calls each method, in the same order.

    Args:
        rank: The number of this process, from 0.
        size: The number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def are_several(self) -> bool:
        """True if there is more than one process."""
        return self.size > 1

    @property
    def is_first(self) -> bool:
        """True in the process that reads and writes files and prints."""
        return self.rank == 0

    def on_first(self, work: Callable[[], T]) -> T:
        """Do the work in the first process alone, and return its result or raise its error in all."""
        if not self.are_several:
            return work()
        outcome = _outcome(work) if self.is_first else (None, None)
        box = [outcome]
        distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        result, error = outcome if self.is_first else box[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def on_all(self, work: Callable[[], T]) -> T:
        """Do the work in every process; an error in any of them is raised in all."""
        if not self.are_several:
            return work()
        result, error = _outcome(work)
        errors: list[Exception | None] = [None] * self.size
        distributed.all_gather_object(errors, error)
        for each in errors:
            if each is not None:
                raise error or each
        return result  # type: ignore[return-value]

    def largest(self, number: int) -> int:
        """Return the largest of the numbers of all processes."""
        if not self.are_several:
            return number
        seen = torch.tensor(number)
        distributed.all_reduce(seen, distributed.ReduceOp.MAX)
        return int(seen)

    def stop(self, request: StopRequest) -> bool:
        """Return True if any process is asked to stop; the request is then set in all of them."""
        number = self.largest(request.number or 0)
        if number:  # else a signal that came during the exchange would be forgotten
            request.number = number
        return request.is_set

    def add_up(self, total: Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        if self.are_several:
            distributed.all_reduce(total)

    def share(self, batch: Tensor) -> Tensor:
        """Return this process's part of a batch, whose length the number of processes divides."""
        return batch.chunk(self.size)[self.rank]

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training, which averages gradients over all processes."""
        return DistributedDataParallel(model) if self.are_several else model


ALONE = Processes()


def started() -> Processes:
    """Return the processes that ``torchrun`` has started; one without ``torchrun``."""
    if not (distributed.is_available() and distributed.is_torchelastic_launched()):
        return ALONE
    return Processes(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Join the processes that ``torchrun`` has started within this context.

    Processes that a script has joined already stay so after it.

    Args:
        device: ``cpu`` or ``cuda``; each process of a machine has a GPU of its own.
    """
    processes = started()
    if not processes.are_several or distributed.is_initialized():
        yield processes
        return
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        yield processes
    finally:
        # DDP modules are in reference cycles. One that outlives the group keeps its threads, which
        # abort the process at its end.
        gc.collect()
        distributed.destroy_process_group()


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of the work, or its error."""
    try:
        return work(), None
    except Exception as error:
        return None, error
