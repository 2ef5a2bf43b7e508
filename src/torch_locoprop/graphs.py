"""The local problems of a step as a CUDA graph, for steps that are the same work again and again.

In an ordinary loop the host launches every kernel of every local iteration, and that takes longer than
the kernels do. A graph launches all of them at once, but knows fixed addresses only. So whatever a
backward pass leaves elsewhere each time, inputs and gradients, is copied to where the graph reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.assembly import Method, local_problems_before, method_for
from torch_locoprop.groups import LAYER_SETTINGS, Group
from torch_locoprop.served import Call, ServedLayer
from torch_locoprop.settings import Components
from torch_locoprop.transfers import Linear

Directions = dict[nn.Parameter, Tensor]
Solve = Callable[[], Directions]

# Steps of one kind before it is recorded: libraries choose their kernels.
EAGER_STEPS = 3
# Kinds of steps to know: a batch is smaller now and then, or has no local problems.
KINDS = 4


class Recording:
    """A CUDA graph of work on the current device, and what it returns."""

    def __init__(self, solve: Solve) -> None:
        self._graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            # Other threads, such as those that load data, may go on with whatever they do.
            with torch.cuda.graph(self._graph, stream=own, capture_error_mode="thread_local"):
                self.result = solve()
        finally:
            torch.cuda.set_stream(before)  # a capture that failed does not do so

    def replay(self) -> None:
        self._graph.replay()


def can_record(device: torch.device) -> bool:
    """Whether work on the device can be recorded now: not inside a recording of the user's own."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


@dataclass
class _Kind:
    """Steps that are the same work."""

    taken: int = 0
    recording: Recording | None = None
    reads: Sequence[Tensor] = ()  # where the graph reads what backward passes leave


class StepGraphs:
    """Takes the local steps of one optimizer: as they stand at first, and then by replay."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._rates: dict[tuple[int, torch.dtype], Tensor] = {}
        self.failure: str | None = None  # why nothing is recorded any more

    def take(self, key: Hashable | None, layers: Sequence[ServedLayer], solve: Solve) -> Directions:
        """Solve all problems; steps with equal keys, which None has not, are the same work."""
        if key is None or self.failure is not None:
            return solve()
        kind = self._kinds.pop(key, None) or _Kind()
        self._kinds[key] = kind  # as the newest
        if len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]
        kind.taken += 1
        if kind.taken <= EAGER_STEPS:
            return solve()
        if kind.recording is None:
            try:
                kind.reads, kind.recording = _recorded(layers, solve)
            except RuntimeError as error:
                self.failure = str(error)
                self._kinds.clear()  # and the memory that may have been lacking
                return solve()
        else:
            torch._foreach_copy_(list(kind.reads), _left_by_backward(layers))
        kind.recording.replay()
        return {p: direction.clone() for p, direction in kind.recording.result.items()}

    @contextmanager
    def rates_on_device(self, groups: Sequence[Group], device: torch.device) -> Iterator[None]:
        """Learning rates where a graph reads them; from the first step on, to round alike in all."""
        given = [group["lr"] for group in groups]
        try:
            for group in groups:
                if not isinstance(group["lr"], Tensor) or group["lr"].device != device:
                    # Groups at one rate share its tensor: some kernels ask for that.
                    group["lr"] = self._rate(given.index(group["lr"]), group, device)
            yield
        finally:
            for group, lr in zip(groups, given, strict=True):
                group["lr"] = lr

    def _rate(self, index: int, group: Group, device: torch.device) -> Tensor:
        wide = group["params"][0].dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
        rate = self._rates.get((index, dtype))
        if rate is None or rate.device != device:
            rate = self._rates[index, dtype] = torch.empty((), dtype=dtype, device=device)
        return rate.fill_(float(group["lr"]))


def key_of(
    layers: Sequence[ServedLayer],
    group_of: Mapping[nn.Parameter, Group],
    components: Components,
    state: Mapping[Tensor, Mapping[str, Tensor]],
    terms: float,
) -> Hashable | None:
    """Equal for steps that are the same work on the device; None if this one may be its own."""
    keys: list[Hashable] = [terms, *_precisions()]
    groups: dict[int, tuple[Hashable, ...]] = {}
    for layer in layers:
        group = group_of[layer.given[0]]
        method = method_for(layer, group, components)
        states = [state[p] for p in layer.with_gradient.values()]
        if not _is_plain(layer) or not _is_fixed(layer, method, group, states):
            return None
        parts = (method.variant, method.solver, method.regularizer, layer.transfer)
        keys += [layer.name, method.local_steps, *map(id, parts)]
        keys += [(_place(p), _form(p.grad)) for p in layer.tensors.values()]
        keys += [(name, _place(entry)) for own in states for name, entry in own.items()]
        keys += [_place(each) for each in layer.counts.values() if isinstance(each, Tensor)]
        for own in (group_of[p] for p in layer.given):
            if id(own) not in groups:
                settings = map(_known, map(own.get, _SETTINGS))
                groups[id(own)] = (_place(own["lr"]), *settings)
            keys.append(groups[id(own)])
        for call in layer.calls:
            kept = None if call.kept is None else len(call.kept)
            keys += [call.shape, kept, *map(_form, _inputs(call))]
    return tuple(keys)


_SETTINGS = (*LAYER_SETTINGS, "momentum", "decay", "eps", "weight_decay", "local_lr")


def _is_fixed(
    layer: ServedLayer, method: Method, group: Group, states: Sequence[Mapping[str, Tensor]]
) -> bool:
    """Whether nothing in the solution of a layer's problem is left to the host."""
    variant, solver = method.variant, method.solver
    parts = (variant.loss, variant.target, method.regularizer, solver, layer.transfer or Linear())
    settled = solver.name == "sgd" or any(states)  # the first state is put in its place by the host
    fixed = solver.is_fixed_work(local_problems_before(group))
    return settled and fixed and not layer.needs and all(map(_is_ours, parts))


def _known(setting: Any) -> Any:
    """A setting by its value, or by its place where that is on the device."""
    if not isinstance(setting, Tensor):
        return setting
    return float(setting) if setting.is_cpu else _place(setting)


def _precisions() -> tuple[str, str]:
    """Those of matrix products and convolutions, which a graph keeps as they were."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return cuda.fp32_precision, cudnn.fp32_precision


def _is_plain(layer: ServedLayer) -> bool:
    """Whether all that a graph would copy for the layer is there and can be copied."""
    tensors = [tensor for call in layer.calls for tensor in _inputs(call)]
    tensors += [p.grad for p in layer.with_gradient.values() if p.grad is not None]
    plain = all(type(t) is Tensor and t.layout == torch.strided for t in tensors)
    return plain and bool(layer.calls)


def _is_ours(part: object) -> bool:
    """Whether the class is this library's: of others' it is not known what they do on the host."""
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


def _form(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _place(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), _form(tensor)


def _inputs(call: Call) -> list[Tensor]:
    """The tensors of a call that its local problem reads."""
    if call.gram is None:
        return [call.x]
    rows = call.gram.rows
    return [call.gram.square, call.gram.total, *([rows] if isinstance(rows, Tensor) else [])]


def _reading(call: Call, inputs: Iterator[Tensor]) -> Call:
    """The call with other tensors for those of ``_inputs``."""
    if call.gram is None:
        return replace(call, x=next(inputs))
    gram = replace(call.gram, square=next(inputs), total=next(inputs))
    if isinstance(gram.rows, Tensor):
        gram = replace(gram, rows=next(inputs))
    return replace(call, gram=gram)


def _left_by_backward(layers: Sequence[ServedLayer]) -> list[Tensor]:
    """Inputs of all layers, then gradients."""
    inputs = [tensor for layer in layers for call in layer.calls for tensor in _inputs(call)]
    return [*inputs, *(p.grad for p in _moving(layers) if p.grad is not None)]


def _moving(layers: Sequence[ServedLayer]) -> list[nn.Parameter]:
    return [p for layer in layers for p in layer.with_gradient.values()]


def _recorded(layers: Sequence[ServedLayer], solve: Solve) -> tuple[list[Tensor], Recording]:
    """A recording of the step, not taken yet, and the copies that it reads."""
    reads, moving = [tensor.clone() for tensor in _left_by_backward(layers)], _moving(layers)
    inputs = iter(reads)
    calls = [list(layer.calls) for layer in layers]
    gradients = [p.grad for p in moving]
    try:
        for layer in layers:
            layer.calls[:] = [_reading(call, inputs) for call in layer.calls]
        for p, gradient in zip(moving, reads[-len(moving) :], strict=True):
            p.grad = gradient
        return reads, Recording(solve)
    finally:
        for layer, own in zip(layers, calls, strict=True):
            layer.calls[:] = own
        for p, old in zip(moving, gradients, strict=True):
            p.grad = old
