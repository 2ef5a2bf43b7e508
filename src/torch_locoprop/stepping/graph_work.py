"""Describes what a step does on the device, by a key: steps with equal keys do the same work.

The CUDA graphs that are recorded and replayed by this key are in ``fast/cuda_graph.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.config.components import Components
from torch_locoprop.config.groups import Group
from torch_locoprop.config.settings import GRAPH_KEY_SETTINGS
from torch_locoprop.distributed.fully_shard import local
from torch_locoprop.fast.dispatch import graphs
from torch_locoprop.paper.transfers import Linear
from torch_locoprop.recording.call import Call
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.solvers import AveragedPreconditioned, FirstOrder, Preconditioned, Spectral
from torch_locoprop.stepping.method import MISSED, Plan, is_ours, number_of, problems_before
from torch_locoprop.stepping.outer_state import own_entries
from torch_locoprop.stepping.several_processes.layer_part import part_of

Trained = dict[LayerRecord, dict[str, nn.Parameter]]  # the tensors of each layer that a step moves
Directions = dict[nn.Parameter, Tensor]  # gradients for an outer optimizer
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
    """Return a description of a step's work; None if the step must not be recorded.

    The key contains everything about layers, groups and tensors that the solution depends on.
    Parameters, states and counters enter it by their id and address; parameters also by their shape,
    which an assignment to ``.data`` may change. Gradients and inputs enter by shape only, because the
    recorder compares their addresses. With several processes the key contains all that they have told
    each other in this step, so a replay calls the collectives that an eager step would call. This
    function runs in every step while the device waits, so it is written for speed.

    Args:
        trained: the layers of the step, with the tensors that it moves.
        plan: the methods of all layers.
        groups: the groups of local problems.
        components: what the names in the groups stand for.
        state: solver states by parameter.
        terms: number of terms of a loss that sums, otherwise 1.
    """
    key: list[object] = [terms, _PRODUCTS.fp32_precision, _CONVOLUTIONS.fp32_precision]
    tensors: list[Tensor] = []
    inputs: list[Tensor] = []
    counts: list[Tensor] = []
    moving: list[nn.Parameter] = []
    for layer, own in trained.items():
        if layer.needs - {"g_norm"} or not layer.calls:
            return None
        key += (layer.name, *own, *layer.role, layer.lacks_rows)
        key += (layer.counts.get(MISSED), layer.shared_facts)
        for call in layer.calls:
            read = _inputs(call)
            key += (call.shape, None if call.kept is None else len(call.kept), len(read))
            inputs += read
        tensors += layer.tensors.values()
        counts += [count for count in layer.counts.values() if isinstance(count, Tensor)]
        moving += own.values()
    gradients = _gradients(trained)
    if gradients is None:
        return None
    left = inputs + gradients
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
        entries = own_entries(state[p])
        key.append(list(entries))
        held += entries.values()
    key += map(id, held)
    parts = list(map(local, held))
    key += map(Tensor.data_ptr, parts)
    key += [(t.shape, t.stride(), t.dtype, t.device) for t in parts[: len(tensors)] + left]
    is_fixed = partial(_is_fixed, trained, plan, state)
    moved = list(map(local, moving))
    return graphs.Work(key, held, moved, left, is_fixed, partial(_reading, trained))


def is_capturable(
    groups: Sequence[Group], components: Components, layers: Sequence[LayerRecord]
) -> bool:
    """Return True if a whole training step can be one CUDA graph, whatever the number of the step.

    Such a recording needs first-order solvers, the preconditioned ones or the spectral step, all rows
    in every step, and only components of this library: a user's component may make decisions on the
    host.
    """
    if any(group["every"] != 1 or group["max_rows"] is not None for group in groups):
        return False
    if any("fisher" in layer.needs or layer.shards is not None for layer in layers):
        return False
    solvers = [components.solver(group) for group in groups]
    known = FirstOrder | Preconditioned | AveragedPreconditioned | Spectral
    if not all(isinstance(solver, known) for solver in solvers):
        return False
    variants = [components.variant(group) for group in groups]
    parts = [*solvers, *(components.regularizer(group) for group in groups)]
    parts += [part for variant in variants for part in (variant.loss, variant.target)]
    parts += [layer.transfer for layer in layers if layer.transfer is not None]
    return all(map(is_ours, parts))


def _is_fixed(trained: Trained, plan: Plan, state: States) -> bool:
    """Return True if the host has no part in the solution of the layers' problems."""
    for layer, own in trained.items():
        method = plan.method_now(layer)
        variant, solver, transfer = method.variant, method.solver, layer.transfer or Linear()
        parts = (variant.loss, variant.target, method.regularizer, solver, transfer)
        # The host puts the first state in place.
        has_state = [bool(own_entries(state[p])) for p in own.values()]
        settled = solver.stateless or (any if solver.joint_state else all)(has_state)
        weight = layer.kind.matrix("weight", layer.like)
        number, bent = number_of(layer, plan.group(layer)), variant.loss.uses_transfer
        fixed = solver.is_fixed_work(number, weight, bent)
        if not settled or not fixed or not all(map(is_ours, parts)):
            return False
        part = part_of(layer, method)
        if part is not None and part.gathers_images(layer, own):
            return False
    return True


def _gradients(trained: Trained) -> list[Tensor] | None:
    """Return the gradients, of sharded layers this process's parts.

    None if the processes have to add up a gradient first.
    """
    found = []
    for layer, own in trained.items():
        for name, p in own.items():
            gradient = p.grad
            assert gradient is not None
            if layer.shards is not None:
                if not layer.shards.is_aligned(name, gradient):
                    return None
                gradient = local(gradient)
            found.append(gradient)
    return found


@contextmanager
def _reading(trained: Trained, reads: Sequence[Tensor]) -> Iterator[None]:
    """Replace the recorded inputs and the gradients by other tensors inside the context.

    Args:
        trained: the layers of the step, with the tensors that it moves.
        reads: tensors for the inputs of all calls, then for the gradients.
    """
    inputs = iter(reads)
    calls = [list(layer.calls) for layer in trained]
    gradients = {p: p.grad for own in trained.values() for p in own.values()}
    try:
        for layer in trained:
            layer.calls[:] = [_with_inputs(call, inputs) for call in layer.calls]
        others = dict(zip(gradients, reads[-len(gradients) :], strict=True))
        for p, gradient in like_parameters(others, trained).items():
            p.grad = gradient
        yield
    finally:
        for layer, own in zip(trained, calls, strict=True):
            layer.calls[:] = own
        for p, old in gradients.items():
            p.grad = old


def like_parameters(parts: Mapping[nn.Parameter, Tensor], trained: Trained) -> Directions:
    """Return gradients that are sharded as their parameters, from this process's parts of them."""
    found = dict(parts)
    for layer, own in trained.items() if parts else ():
        if layer.shards is not None:
            found |= {
                p: layer.shards.like_parameter(name, parts[p])
                for name, p in own.items()
                if p in parts
            }
    return found


def _inputs(call: Call) -> list[Tensor]:
    """Return the tensors of a call that its local problem reads."""
    if call.gram is None:
        return [call.x] if call.output is None else [call.x, call.output]
    if not call.gram.is_known:
        return []
    return call.gram.tensors


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
    return call._replace(gram=call.gram.with_tensors([next(inputs) for _ in call.gram.tensors]))


def _known(setting: Any) -> Any:
    """Return a setting by its value, or by its address if it is a tensor on the device."""
    if not isinstance(setting, Tensor):
        return setting
    return float(setting) if setting.is_cpu else _place(setting)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device
