"""What a step does on the device, as a key for CUDA graphs: equal keys are equal work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.config.components import Components
from torch_locoprop.config.groups import Group
from torch_locoprop.config.settings import GRAPH_KEY_SETTINGS
from torch_locoprop.fast.dispatch import graphs
from torch_locoprop.paper.transfers import Linear
from torch_locoprop.recording.call import Call
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.solvers import FirstOrder, Spectral
from torch_locoprop.stepping.method import Plan, problems_before

Trained = dict[LayerRecord, dict[str, nn.Parameter]]  # of each layer, the tensors to be moved
States = Mapping[Tensor, Mapping[str, Tensor]]

# A CUDA graph keeps the precision that products and convolutions had when it was recorded.
_PRODUCTS = torch.backends.cuda.matmul
_CONVOLUTIONS = torch.backends.cudnn.conv  # type: ignore[attr-defined]

_PLAIN = {bool, int, float, str, type(None)}
_SETTINGS = (*GRAPH_KEY_SETTINGS, "local_lr")


def work_of(
    trained: Trained,
    plan: Plan,
    groups: Sequence[Group],
    components: Components,
    state: States,
    terms: float,
) -> graphs.Work | None:
    """Return the work of a step; None if no other step may be like it.

    The key has whatever the solution asks of layers, groups and tensors. Tensors that stay are
    known by identity and address, the module's also by shape: any ``.data`` may be put there.
    Gradients and inputs are known by shape alone: the recorder looks where they lie. All this runs
    in every step while the device waits, hence lists and loops and no detours.
    """
    key: list[object] = [terms, _PRODUCTS.fp32_precision, _CONVOLUTIONS.fp32_precision]
    tensors: list[Tensor] = []
    inputs: list[Tensor] = []
    counts: list[Tensor] = []
    moving: list[nn.Parameter] = []
    for layer, own in trained.items():
        if layer.needs or not layer.calls:
            return None
        key += (layer.name, *own, *layer.role)
        for call in layer.calls:
            read = _inputs(call)
            key += (call.shape, None if call.kept is None else len(call.kept), len(read))
            inputs += read
        tensors += layer.tensors.values()
        counts += [count for count in layer.counts.values() if isinstance(count, Tensor)]
        moving += own.values()
    left = inputs + [p.grad for p in moving if p.grad is not None]
    for tensor in left:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return None
    for group in groups:
        settings = map(group.get, _SETTINGS)
        key += [each if type(each) in _PLAIN else _known(each) for each in settings]
        phase = components.solver(group).phase(problems_before(group))
        key += (_place(group["lr"]), phase, group["steps"] % group["every"] == 0)
        key += map(id, group["params"])
    held = tensors + counts
    for p in moving:
        entries = state[p]
        key.append(list(entries))
        held += entries.values()
    key += map(id, held)
    key += map(Tensor.data_ptr, held)
    key += [(t.shape, t.stride(), t.dtype, t.device) for t in tensors + left]
    is_fixed = partial(_is_fixed, trained, plan, state)
    return graphs.Work(key, held, moving, left, is_fixed, partial(_reading, list(trained), moving))


def is_capturable(
    groups: Sequence[Group], components: Components, layers: Sequence[LayerRecord]
) -> bool:
    """Return True if a whole training step can be one CUDA graph, whatever the number of the step.

    That takes first-order solvers or the spectral step, all rows in every step, and only components of
    this library: those of a user may do anything on the host.
    """
    if any(group["every"] != 1 or group["max_rows"] is not None for group in groups):
        return False
    if any("fisher" in layer.needs for layer in layers):
        return False
    solvers = [components.solver(group) for group in groups]
    if not all(isinstance(solver, FirstOrder | Spectral) for solver in solvers):
        return False
    variants = [components.variant(group) for group in groups]
    parts = [*solvers, *(components.regularizer(group) for group in groups)]
    parts += [part for variant in variants for part in (variant.loss, variant.target)]
    parts += [layer.transfer for layer in layers if layer.transfer is not None]
    return all(map(_is_ours, parts))


def _is_fixed(trained: Trained, plan: Plan, state: States) -> bool:
    """Return True if the host has no part in the solution of the layers' problems."""
    for layer, own in trained.items():
        method = plan.method_now(layer)
        variant, solver, transfer = method.variant, method.solver, layer.transfer or Linear()
        parts = (variant.loss, variant.target, method.regularizer, solver, transfer)
        # The host puts the first state in place: that of each tensor, or of all together.
        quantity = all if method.is_first_order else any
        settled = solver.stateless or quantity(bool(state[p]) for p in own.values())
        weight = layer.kind.matrix("weight", layer.tensors["weight"].detach())
        number, bent = problems_before(plan.group(layer)), variant.loss.uses_transfer
        fixed = solver.is_fixed_work(number, weight, bent)
        if not settled or not fixed or not all(map(_is_ours, parts)):
            return False
    return True


@contextmanager
def _reading(
    layers: Sequence[LayerRecord], moving: Sequence[nn.Parameter], reads: Sequence[Tensor]
) -> Iterator[None]:
    """Let layers and parameters have other tensors in the place of what backward passes left."""
    inputs = iter(reads)
    calls = [list(layer.calls) for layer in layers]
    gradients = [p.grad for p in moving]
    try:
        for layer in layers:
            layer.calls[:] = [_with_inputs(call, inputs) for call in layer.calls]
        for p, gradient in zip(moving, reads[-len(moving) :], strict=True):
            p.grad = gradient
        yield
    finally:
        for layer, own in zip(layers, calls, strict=True):
            layer.calls[:] = own
        for p, old in zip(moving, gradients, strict=True):
            p.grad = old


def _inputs(call: Call) -> list[Tensor]:
    """Return the tensors of a call that its local problem reads."""
    if call.gram is None:
        return [call.x] if call.output is None else [call.x, call.output]
    if not call.gram.is_known:
        return []
    rows = call.gram.rows
    return [call.gram.square, call.gram.total, *([rows] if isinstance(rows, Tensor) else [])]


def _with_inputs(call: Call, inputs: Iterator[Tensor]) -> Call:
    """Return the call with other tensors for those of :func:`_inputs`."""
    if call.gram is None:
        read = call._replace(x=next(inputs), a=None)
        if call.output is None:
            return read
        a = next(inputs)
        return read._replace(a=a, a_version=a._version)
    if not call.gram.is_known:
        return call
    gram = replace(call.gram, square=next(inputs), total=next(inputs))
    if isinstance(gram.rows, Tensor):
        gram = replace(gram, rows=next(inputs))
    return call._replace(gram=gram)


def _known(setting: Any) -> Any:
    """Return a setting by its value, or by its address if it is a tensor on the device."""
    if not isinstance(setting, Tensor):
        return setting
    return float(setting) if setting.is_cpu else _place(setting)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device


def _is_ours(part: object) -> bool:
    """Return True if the class is this library's: others may do anything on the host."""
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]
