"""The processes that average the gradients of one model, as its forward passes show.

What the processes of ``DistributedDataParallel`` exchange is in ``ddp.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from functools import cached_property
from typing import Any

from torch import nn

from torch_locoprop.distributed.ddp import are_averaged, averaging_processes
from torch_locoprop.distributed.pipeline import Pipeline, pipeline_of


class Averaging:
    """Keeps which processes average the gradients of a model, and the state of ``Join``.

    Args:
        layers: the layers with a local problem.
    """

    def __init__(self, layers: Collection[nn.Module]) -> None:
        self.processes: Any = None  # the process group that averages gradients, once seen
        self.averaged = True  # the last forward pass was not under no_sync()
        self.wrapper: weakref.ref[Any] | None = None  # the DDP module, if it may run inside of Join
        self.has_joined = False  # inside of Join, this process has run out of batches
        self._layers = layers

    @cached_property
    def pipeline(self) -> Pipeline:
        """The facts about pipeline stages that contain the layers; searched for once."""
        return pipeline_of(self._layers)

    @property
    def is_alone(self) -> bool:
        """True if DDP does not average the gradients of the last forward pass: under ``no_sync()``.

        Schedules of a pipeline use that context too, and average after their last backward pass.
        """
        return self.processes is not None and not (self.averaged or self.pipeline.is_used)

    @property
    def ddp_module(self) -> Any:
        """The DDP module that may run inside of ``Join``; None if there is none."""
        return None if self.wrapper is None else self.wrapper()

    @property
    def divides_by_all(self) -> bool:
        """True if DDP divides gradients by all processes, also by those without a batch."""
        return getattr(self.ddp_module, "_divide_by_initial_world_size", True)

    def notice_forward_pass(self) -> None:
        """Note the processes of the DDP module whose forward pass is running, if there is one.

        Raises:
            RuntimeError: the DDP module runs inside the context ``Join``, without the optimizer.
        """
        running = averaging_processes(joins=self.wrapper is not None)
        if running is not None:
            self.processes, self.averaged = running, are_averaged()
