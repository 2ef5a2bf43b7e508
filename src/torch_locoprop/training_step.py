"""Forward pass, backward pass and optimizer step as one call, on a GPU as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_locoprop.fast.dispatch import graphs, streams

# Entries of a parameter group that change from step to step without changing the recorded work.
_MOVING = ("lr", "initial_lr", "params", "steps")


class TrainingStep:
    """One training step of a loop with fixed shapes.

    On a GPU, with an optimizer whose step is a fixed sequence of device operations, the first three
    calls run eagerly; then forward pass, backward pass and step are recorded as one CUDA graph and
    replayed. The local problems of :class:`~torch_locoprop.LocoProp` then start while the backward
    pass still runs. Elsewhere a call does the same work eagerly: on a CPU, for batches of another
    shape than the first, and
    with optimizers that cannot be recorded.

    An optimizer can be recorded if it has a true attribute ``capturable``, as LocoProp has for
    first-order solvers without a fallback or outer optimizer, or ``capturable=True`` in all its
    groups, as ``torch.optim`` has it. Schedulers work as usual. Gradients are None after the call,
    so nothing can be done to them between backward pass and step: for clipping or accumulation
    write the loop out.

    Example::

        step = TrainingStep(model, criterion, optimizer)
        for x, y in batches:
            loss = step(x, y)
            scheduler.step()

    Args:
        model: the model; its forward pass must not depend on values on the host.
        loss_fn: takes the model's output and all tensors of the batch but the first.
        optimizer: trains the model's parameters.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor], optimizer: Optimizer
    ) -> None:
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self._device = next(model.parameters()).device
        self._rates = graphs.DeviceRates()
        self._key: list[object] | None = None
        self._batch: list[Tensor] = []
        self._repeated: graphs.Repeated[Tensor] | None = None

    def __call__(self, *batch: Tensor) -> Tensor:
        """Take a step on a batch and return its loss, detached.

        Args:
            batch: the model's input, then what ``loss_fn`` takes besides the output. One tensor may be
                given twice, as for autoencoders.
        """
        if not self._can_record(batch):
            return self._take(batch)
        with self._rates.of(self._optimizer.param_groups, self._device):
            if self._shapes(batch) != self._shapes(self._batch) and self._batch:
                return self._take(batch)
            repeated = self._repeated
            if repeated is None or (repeated.is_recorded and self._recorded_work() != self._key):
                repeated = self._begin(batch)
            for own, given in zip(self._batch, batch, strict=True):
                if own is not given:
                    own.copy_(given, non_blocking=True)
            is_replay = repeated.is_recorded
            loss = repeated().clone()
            if repeated.is_recorded and not is_replay:
                self._key = self._recorded_work()
        if is_replay and hasattr(self._optimizer, "count_replayed_step"):
            self._optimizer.count_replayed_step()
        return loss

    def _can_record(self, batch: Sequence[object]) -> bool:
        groups = self._optimizer.param_groups
        capturable = getattr(self._optimizer, "capturable", False) or all(
            group.get("capturable", False) for group in groups
        )
        return capturable and graphs.can_record(self._device) and _are_tensors(batch)

    def _begin(self, batch: Sequence[Tensor]) -> graphs.Repeated[Tensor]:
        """Prepare to record: inputs get a fixed place, tensors given twice the same one."""
        places: dict[int, Tensor] = {}
        self._batch = [
            places.setdefault(id(t), t.detach().to(self._device, copy=True)) for t in batch
        ]
        self._repeated = graphs.Repeated(
            lambda: self._take(self._batch),
            eager=graphs.EAGER_STEPS,
            priority=-1,  # ahead of the layers' streams: they wait for the backward pass
        )
        return self._repeated

    def _take(self, batch: Sequence[Tensor]) -> Tensor:
        x, *others = batch
        with streams.overlapping_backward():
            loss = self._loss_fn(self._model(x), *others)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _recorded_work(self) -> list[object]:
        """Return a key that changes when a recording would replay stale work."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        key: list[object] = [self._model.training, torch.backends.cuda.matmul.fp32_precision]
        key += [(p.data_ptr(), p.requires_grad) for p in parameters]
        for p in parameters:
            entries = self._optimizer.state.get(p, {}).values()
            key += [t.data_ptr() for t in entries if isinstance(t, Tensor)]
        for group in self._optimizer.param_groups:
            key += [value for name, value in group.items() if name not in _MOVING]
        return key

    @staticmethod
    def _shapes(batch: Sequence[Tensor]) -> list[Any]:
        return [(t.shape, t.dtype) for t in batch]


def _are_tensors(batch: Sequence[object]) -> bool:
    return all(type(t) is Tensor and t.layout is torch.strided for t in batch)
