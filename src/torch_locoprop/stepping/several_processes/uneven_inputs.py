"""Processes with unequal numbers of batches: the optimizer inside of DDP's context ``Join``.

A process that has run out of batches takes the same steps as the other processes: with their
gradients and without rows of its own. So all processes keep the same weights and states.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from torch_locoprop.config.groups import Group
from torch_locoprop.distributed import ddp
from torch_locoprop.recording.hooks import ModelHooks
from torch_locoprop.recording.layer_record import LayerRecord


class Joins(Joinable):
    """The part of an optimizer that ``Join([model, opt])`` calls."""

    param_groups: list[Group]
    _hooks: ModelHooks
    _layers: list[LayerRecord]
    # The configuration of the DDP module in the last context `Join` that has this optimizer.
    _seen_config: Any = None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what ``Join`` calls in a process that has run out of batches.

        Raises:
            RuntimeError: if no ``DistributedDataParallel`` has the model.
        """
        averaging = self._hooks.averaging
        averaging.wrapper = weakref.ref(self._ddp_module())
        averaging.processes = self.join_process_group
        self._seen_config = None
        return _StepWithoutRows(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first layer."""
        return self._layers[0].given[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group of the model's ``DistributedDataParallel``."""
        return self._ddp_module().process_group

    def _ddp_module(self) -> Any:
        known = self._hooks.averaging.ddp_module
        found = ddp.wrapper_of(self._hooks.layers) if known is None else known
        if found is None:
            raise RuntimeError(
                "Join was given an optimizer whose model is in no DistributedDataParallel. Wrap the "
                "model first."
            )
        return found

    def _share_gradients(self) -> None:
        """Give gradients and settings to processes that have run out of batches."""
        if self._join_config.is_first_joinable:
            raise RuntimeError("Give Join the model before the optimizer: Join([model, opt]).")
        config = self._ddp_module()._join_config  # each context makes a new one
        if self._seen_config is None:
            self._seen_config = config
        if self._seen_config is not config:
            raise RuntimeError(ddp.JOIN_WITHOUT_OPTIMIZER)
        names = [
            (group, name)
            for group in self.param_groups
            for name in sorted(group)
            if isinstance(group[name], float) or (name == "lr" and group[name] is not None)
        ]
        parameters = [p for group in self.param_groups for p in group["params"]]
        given = [float(group[name]) for group, name in names]
        processes, joined = self._hooks.averaging.processes, self._hooks.averaging.has_joined
        found = ddp.share_gradients(processes, parameters, given, has_joined=joined)
        for (group, name), number, old in zip(names, found, given, strict=True):
            if number == old:
                continue
            if isinstance(group[name], torch.Tensor):
                group[name].fill_(number)
            else:
                group[name] = number


class _StepWithoutRows(JoinHook):
    """Takes part in the steps of processes that still have batches."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Take one step, if the other processes do: if they average gradients in this pass."""
        optimizer, hooks = self._optimizer, self._optimizer._hooks
        if not hooks.averaging.ddp_module.require_forward_param_sync:
            return
        hooks.begin_without_rows()
        try:
            optimizer.step()
        finally:
            hooks.averaging.has_joined = False
        optimizer.zero_grad()
