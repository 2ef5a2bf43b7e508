"""Forward pass, backward pass and optimizer step as one call, on a GPU as one CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torch_locoprop.distributed import ddp
from torch_locoprop.fast.dispatch import graphs, streams
from torch_locoprop.recording.weak_hook import WeakHook
from torch_locoprop.stepping.messages import Notices

# Entries of a parameter group that change from step to step without changing the recorded work.
_MOVING = ("lr", "initial_lr", "params", "steps")


class TrainingStep:
    """One step of an ordinary training loop: forward pass, backward pass, ``optimizer.step()``.

    On a GPU, three steps run eagerly. The next one is recorded as a CUDA graph, and further calls
    replay it: the host launches one graph instead of every kernel, and the local problems of
    :class:`~torch_locoprop.LocoProp` start while the backward pass still runs. The spectral step and
    ``solver="preconditioned-averaged"`` have two CUDA graphs, one of them for the steps that renew XᵀX.
    Results are those of the written-out loop, up to rounding.

    A call runs eagerly, as on a CPU,

    - for an optimizer that cannot be recorded. ``torch.optim`` needs ``capturable=True``;
      ``LocoProp.capturable`` is True for first-order solvers, the preconditioned ones and the spectral
      step, without a fallback or outer optimizer;
    - if an entry of the batch is not a tensor on the device of the parameters, or requires a gradient;
    - if a parameter has a gradient already, or the model has trained parameters that the optimizer
      does not have;
    - for a batch of another shape. After three of them in a row, that shape is recorded instead;
    - with several processes;
    - after a recording has failed, which a warning reports.

    Learning rate schedules act on replays, and dropout draws new numbers in each. The step is recorded
    again when other settings of the optimizer change, its state is loaded, parameters are frozen, or
    modules change between ``train()`` and ``eval()``.

    Python code in the model, its hooks and the loss does not run in a replay. If such code changes what
    is computed, make a new ``TrainingStep`` or write the loop out. Gradients are None after the call:
    for clipping, accumulation and gradient penalties, write the loop out as well.

    Example::

        step = TrainingStep(model, criterion, optimizer)
        for x, y in batches:
            loss = step(x, y)
            scheduler.step()

    Args:
        model: the model. It must not read the weight of a layer elsewhere as ``weight.detach()``.
        loss_fn: takes the model's output and the other entries of the batch, and returns a scalar.
        optimizer: trains the model's parameters.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor], optimizer: Optimizer
    ) -> None:
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self._rates = graphs.DeviceRates()
        self._notices = Notices()
        self._failed = False  # a recording has failed, so that no other is tried
        # The step by its phase: a solver may do other work in every tenth step.
        self._repeated: dict[object, graphs.Repeated[Tensor]] = {}
        self._buffers: list[Tensor] = []  # the batch of the repeated step
        self._work: list[object] = []  # key of what the repeated step does, see _work_now
        self._form: list[tuple[Any, ...]] = []  # form of the batches of the repeated step
        self._places: dict[int, Tensor] = {}  # tensors that the step reads, by index in the batch
        self._others = 0  # batches of another form since the last one of this form

    def __call__(self, inputs: Any, *targets: Any) -> Tensor:
        """Take a step on a batch and return its loss, detached.

        Args:
            inputs: what the model takes. The same tensor may also be a target, as for autoencoders.
            targets: what ``loss_fn`` takes besides the model's output.
        """
        batch = (inputs, *targets)
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        if self._failed or not self._can_record(batch, parameters):
            return self._take(batch)
        device = parameters[0].device
        with streams.on_device(device), self._rates.of(self._optimizer.param_groups, device):
            form = _form(batch)
            self._others = 0 if form == self._form else self._others + 1
            if self._repeated and 0 < self._others <= graphs.EAGER_STEPS:
                return self._take(batch)
            known = bool(self._repeated) and form == self._form
            if not known or self._work_now(parameters) != self._work:
                if not self._trains_all(parameters):
                    return self._take(batch)
                self._begin(batch, form)
            return self._repeat(batch, parameters)

    def _can_record(self, batch: Sequence[object], parameters: Sequence[Tensor]) -> bool:
        """Return True if the optimizer and this batch permit a recording of the step."""
        optimizer = self._optimizer
        devices = {p.device for p in parameters}
        if len(devices) != 1 or not all(map(graphs.can_record, devices)):
            return False
        if not is_capturable(optimizer):
            return False
        if ddp.are_several() or any(p.grad is not None for p in parameters):
            return False
        if _has_step_hooks(optimizer) or _reads_float32_rates(optimizer):
            return False
        return all(_is_plain(entry) and entry.device in devices for entry in batch)  # type: ignore[attr-defined]

    def _trains_all(self, parameters: Sequence[Tensor]) -> bool:
        """Return True if the optimizer has all parameters that get a gradient.

        A replay writes gradients where they were when it was recorded. Gradients that ``zero_grad``
        of another optimizer has set to None since then would be lost.
        """
        own = set(parameters)
        return all(p in own for m in self._modules() for p in m.parameters() if p.requires_grad)

    def _begin(self, batch: Sequence[Tensor], form: list[tuple[Any, ...]]) -> None:
        """Prepare to record steps on batches of this form, which get a fixed place."""
        self._places = {i: torch.empty_like(batch[i]) for i, *_ in form}
        self._buffers = [self._places[i] for i, *_ in form]
        self._form, self._others = form, 0
        self._repeated = {}

    def _repeated_now(self) -> graphs.Repeated[Tensor]:
        """Return the step of the optimizer's present phase."""
        phase = getattr(self._optimizer, "phase", None)
        if phase not in self._repeated:
            self._repeated[phase] = graphs.Repeated(
                eager=graphs.EAGER_STEPS,
                priority=-1,  # ahead of the layers' streams: they wait for the backward pass
            )
        return self._repeated[phase]

    def _repeat(self, batch: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """Take the step eagerly, record it or replay it, and return the loss."""
        repeated = self._repeated_now()
        for i, place in self._places.items():
            place.copy_(batch[i])
        is_replay, records = repeated.is_recorded, repeated.will_record
        try:
            loss = repeated(lambda: self._take(self._buffers)).clone()
        except BaseException as error:
            if not records:
                raise
            self._repeated = {}
            self._optimizer.zero_grad()  # no kernel has computed these gradients
            if not isinstance(error, RuntimeError):
                raise
            self._failed = True
            self._notices.once(
                "graph",
                f"The training step could not be recorded as a CUDA graph ({error}) and runs eagerly "
                "from now on.",
            )
        if self._failed:
            gc.collect()  # the autograd graph of the failed recording, which belongs to its stream
            return self._take(batch)
        if is_replay:
            self._note_replay(parameters)
        else:
            self._work = self._work_now(parameters)
        return loss

    def _take(self, batch: Sequence[Any]) -> Tensor:
        """Take one step eagerly; while a CUDA graph is recorded, its work becomes the graph's."""
        inputs, *targets = batch
        with streams.overlapping_backward():
            loss = self._loss_fn(self._model(inputs), *targets)
            if graphs.is_recording() and not _gradients_are_left_alone(loss):
                streams.start_nothing_early()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _note_replay(self, parameters: Sequence[Tensor]) -> None:
        """Do what a step does on the host, for autograd, for schedulers and for the optimizer."""
        torch.autograd.graph.increment_version(parameters)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check it
        if hasattr(self._optimizer, "count_replayed_step"):
            self._optimizer.count_replayed_step()

    def _modules(self) -> Iterator[nn.Module]:
        yield self._model
        if isinstance(self._loss_fn, nn.Module):
            yield self._loss_fn

    def _work_now(self, parameters: Sequence[Tensor]) -> list[object]:
        """Return a key of what a step does now; a recording whose key differs is stale.

        A CUDA graph reads and writes fixed addresses. The CUDA graph keeps the settings, the modes of
        the modules and the precision of products that it was recorded with.
        """
        device = parameters[0].device.type
        key: list[object] = [
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        ]
        tensors: list[Tensor | None] = [*parameters]
        for part in self._modules():
            for module in part.modules():
                key.append(module.training)
                tensors += module._parameters.values()
                tensors += module._buffers.values()
        key += [t is not None and t.requires_grad for t in tensors]
        for group in self._optimizer.param_groups:
            tensors.append(group["lr"])  # a tensor on the device
            key += [_value(entry) for name, entry in group.items() if name not in _MOVING]
        for p in parameters:
            key.append((p.shape, p.stride()))
            tensors += self._optimizer.state.get(p, {}).values()
        key += [t.data_ptr() if isinstance(t, Tensor) else t for t in tensors]
        return key


def is_capturable(optimizer: Optimizer) -> bool:
    """Return True if steps of the optimizer can be recorded as a CUDA graph."""
    return bool(getattr(optimizer, "capturable", False)) or all(
        group.get("capturable", False) for group in optimizer.param_groups
    )


def _form(batch: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return, for each tensor, the index of the first that is the same object, its shape and dtype."""
    ids = [id(tensor) for tensor in batch]
    return [(ids.index(id(tensor)), tensor.shape, tensor.dtype) for tensor in batch]


def _has_step_hooks(optimizer: Optimizer) -> bool:
    """Return True if a user's hook runs around ``optimizer.step``: a replay would not call it."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def _reads_float32_rates(optimizer: Optimizer) -> bool:
    """Return True for fused kernels on float64 parameters, whose learning rate must be float32."""
    return any(
        group.get("fused", False) and any(p.dtype == torch.float64 for p in group["params"])
        for group in optimizer.param_groups
    )


def _is_plain(entry: object) -> bool:
    """Return True if an entry of a batch can be copied to where a CUDA graph reads it."""
    return type(entry) is Tensor and entry.layout is torch.strided and not entry.requires_grad


def _value(setting: Any) -> object:
    """Return a setting of a group, or where it lies if it is a tensor on the device."""
    if not isinstance(setting, Tensor):
        return setting
    return setting.tolist() if setting.is_cpu else setting.data_ptr()


def _gradients_are_left_alone(loss: Tensor) -> bool:
    """Return True if each parameter has one contribution to its gradient and no hook sees it.

    Weight gradients may then be computed beside the backward pass. A sum, as for a penalty on weights,
    and a hook, as for clipping, would not wait for them.
    """
    seen: set[Node] = set()
    stack = [] if loss.grad_fn is None else [loss.grad_fn]
    while stack:
        for below, _ in stack.pop().next_functions:
            if below is None:
                continue
            is_leaf, is_known = below.name().endswith("AccumulateGrad"), below in seen
            if is_leaf and (is_known or _has_hooks(below.variable)):  # type: ignore[attr-defined]
                return False
            if not is_known:
                seen.add(below)
                stack.append(below)
    return True


def _has_hooks(parameter: Tensor) -> bool:
    """Return True if a hook other than the optimizer's own is called with the gradient."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    own = all(isinstance(hook, WeakHook) for hook in after.values())
    return bool(parameter._backward_hooks) or not own
