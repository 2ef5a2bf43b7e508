"""The local problems of a step as a CUDA graph, for steps that are the same work again and again.

In an ordinary loop the host launches every kernel of every local iteration, and that takes longer than
the kernels do. A graph launches all of them at once, but knows fixed addresses only. In most loops a
backward pass leaves most inputs and gradients where it left them the time before, and the graph reads
them there. Those that move are copied to where the graph reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_locoprop.config.groups import LAYER_SETTINGS, Group
from torch_locoprop.config.settings import Components
from torch_locoprop.paper.transfers import Linear
from torch_locoprop.recording.layer_record import Call, ServedLayer
from torch_locoprop.solvers import FirstOrder
from torch_locoprop.stepping.build_problem import local_problems_before, method_for

Trained = dict[ServedLayer, dict[str, nn.Parameter]]  # of each layer, the tensors to be moved
States = Mapping[Tensor, Mapping[str, Tensor]]
Directions = dict[nn.Parameter, Tensor]
Solve = Callable[[], Directions]

# Steps of one kind before it is recorded: libraries choose their kernels.
EAGER_STEPS = 3
# What has moved more often than this is copied from then on: once it may, for recorded work leaves
# other room. Whatever else takes memory between steps may move things, such as an evaluation.
MOVES = 1
# Recordings of one kind that read what stays in its place; any further one reads copies alone.
RECORDINGS = 4
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


class Work(NamedTuple):
    """What a step does on the device."""

    key: list[object]  # equal for steps that are the same work
    held: list[Tensor]  # those that the key names by identity
    layers: Sequence[ServedLayer]
    moving: list[nn.Parameter]
    left: list[Tensor]  # by backward passes: the inputs of all layers, then the gradients
    is_fixed: Callable[[], bool]  # whether nothing is left to the host; alike for equal keys


@dataclass(eq=False)
class _Kind:
    """Steps that are the same work."""

    key: list[object]
    held: list[Tensor]  # so that no other has the identity of one of them
    taken: int = 0
    recorded: int = 0
    recording: Recording | None = None
    last: list[int] = field(default_factory=list)  # where the last step's backward left things
    moves: list[int] = field(default_factory=list)  # how often each was elsewhere than before
    places: list[int] = field(default_factory=list)  # where the graph reads them,
    copies: dict[int, Tensor] = field(default_factory=dict)  # but for some, by their index

    def watch(self, left: Sequence[Tensor]) -> None:
        """See what has moved since the step before."""
        places = [tensor.data_ptr() for tensor in left]
        before, moves = self.last or places, self.moves or [0] * len(left)
        moved = [now != then for now, then in zip(places, before, strict=True)]
        self.last, self.moves = places, list(map(add, moves, moved))

    def ready(self, work: Work, solve: Solve) -> Recording:
        """A recording that reads what is left now: that of before, or another."""
        if self.recording is not None and all(
            now == then or i in self.copies
            for i, (now, then) in enumerate(zip(self.last, self.places, strict=True))
        ):
            if self.copies:
                left = [work.left[i] for i in self.copies]
                torch._foreach_copy_(list(self.copies.values()), left)
            return self.recording
        self.recording = None  # its memory can serve the next one
        self.recorded += 1
        copied = [self.recorded > RECORDINGS or moves > MOVES for moves in self.moves]
        self.copies = {i: work.left[i].clone() for i, own in enumerate(copied) if own}
        self.places, self.recording = self.last, _recorded(work, solve, self.copies)
        return self.recording


class StepGraphs:
    """Takes the local steps of one optimizer: as they stand at first, and then by replay."""

    def __init__(self) -> None:
        self._kinds: list[_Kind] = []  # the newest first
        self._rates: dict[Hashable, tuple[Tensor, float]] = {}  # with what was written there last
        self.failure: str | None = None  # why nothing is recorded any more

    def take(self, work: Work | None, solve: Solve) -> Directions:
        """Solve all problems, by replay if the same work was recorded; None is like no other."""
        if work is None or self.failure is not None:
            return solve()
        kind = self._kind_of(work)
        if kind is None:
            return solve()
        kind.taken += 1
        kind.watch(work.left)
        if kind.taken <= EAGER_STEPS:
            return solve()
        try:
            recording = kind.ready(work, solve)
        except RuntimeError as error:
            self.failure = str(error)
        if self.failure is not None:
            del kind
            self.forget()  # and the memory that may have been lacking
            return solve()
        recording.replay()
        return _copied(recording.result)

    def forget(self) -> None:
        """Let go of all recordings."""
        self._kinds.clear()

    def _kind_of(self, work: Work) -> _Kind | None:
        """The kind of such steps, which is the newest now; None if the host has a part in them."""
        for place, kind in enumerate(self._kinds):
            if kind.key == work.key:
                self._kinds.insert(0, self._kinds.pop(place))
                return kind
        if not work.is_fixed():
            return None
        self._kinds.insert(0, _Kind(work.key, work.held))
        del self._kinds[KINDS:]
        return self._kinds[0]

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
        dtype, lr = torch.float64 if wide else torch.float32, float(group["lr"])
        rate, written = self._rates.get((index, dtype, device), (None, None))
        if rate is None:
            rate = torch.empty((), dtype=dtype, device=device)
        if written != lr:
            self._rates[index, dtype, device] = rate.fill_(lr), lr
        return rate


def work_of(
    trained: Trained, groups: Sequence[Group], components: Components, state: States, terms: float
) -> Work | None:
    """The work of a step; None if it may be like no other.

    The key has whatever ``method_for`` and the solution ask of layers, groups and tensors. Those that
    stay are known by identity and address, the module's by their form too: any ``.data`` may be put
    there. Gradients and inputs are known by their form alone: ``_Kind`` looks where they lie.

    All this is asked in every step, while the device waits: hence lists and loops, and no detours.
    """
    key: list[object] = [terms, _PRODUCTS.fp32_precision, _CONVOLUTIONS.fp32_precision]
    tensors: list[Tensor] = []
    inputs: list[Tensor] = []
    counts: list[Tensor] = []
    moving: list[nn.Parameter] = []
    for layer, own in trained.items():
        if layer.needs or not layer.calls:
            return None
        key += (layer.name, *own, layer.transfer, layer.is_output)
        key += (layer.decided, layer.explicit, layer.note, layer.obstacle)
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
        phase = components.solver(group).phase(local_problems_before(group))
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
    is_fixed = partial(_is_fixed, trained, groups, components, state)
    return Work(key, held, list(trained), moving, left, is_fixed)


# Whose precision a graph keeps as it was.
_PRODUCTS = torch.backends.cuda.matmul
_CONVOLUTIONS = torch.backends.cudnn.conv  # type: ignore[attr-defined]

_PLAIN = {bool, int, float, str, type(None)}
_SETTINGS = (*LAYER_SETTINGS, "momentum", "decay", "eps", "weight_decay", "local_lr")


def _is_fixed(
    trained: Trained, groups: Sequence[Group], components: Components, state: States
) -> bool:
    """Whether nothing in the solution of the layers' problems is left to the host."""
    group_of = {p: group for group in groups for p in group["params"]}
    for layer, own in trained.items():
        group = group_of[layer.given[0]]
        method = method_for(layer, group, components)
        variant, solver, transfer = method.variant, method.solver, layer.transfer or Linear()
        parts = (variant.loss, variant.target, method.regularizer, solver, transfer)
        # The first state is put in its place by the host: that of each tensor, or of all together.
        quantity = all if isinstance(solver, FirstOrder) else any
        settled = solver.name == "sgd" or quantity(bool(state[p]) for p in own.values())
        weight = layer.kind.matrix("weight", layer.tensors["weight"].detach())
        number, bent = local_problems_before(group), variant.loss.uses_transfer
        fixed = solver.is_fixed_work(number, weight, bent)
        if not settled or not fixed or not all(map(_is_ours, parts)):
            return False
    return True


def _known(setting: Any) -> Any:
    """A setting by its value, or by its place where that is on the device."""
    if not isinstance(setting, Tensor):
        return setting
    return float(setting) if setting.is_cpu else _place(setting)


def _is_ours(part: object) -> bool:
    """Whether the class is this library's: of others' it is not known what they do on the host."""
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device


def _inputs(call: Call) -> list[Tensor]:
    """The tensors of a call that its local problem reads."""
    if call.gram is None:
        return [call.x] if call.output is None else [call.x, call.output]
    if not call.gram.is_known:
        return []
    rows = call.gram.rows
    return [call.gram.square, call.gram.total, *([rows] if isinstance(rows, Tensor) else [])]


def _reading(call: Call, inputs: Iterator[Tensor]) -> Call:
    """The call with other tensors for those of ``_inputs``."""
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


def _copied(directions: Directions) -> Directions:
    """All in one launch. Where they stand, the next replay writes its own."""
    if not directions:
        return {}
    copies = torch._foreach_mul(list(directions.values()), 1.0)
    return dict(zip(directions, copies, strict=True))


def _recorded(work: Work, solve: Solve, copies: Mapping[int, Tensor]) -> Recording:
    """A recording of the step, not taken yet, that reads the copies there are."""
    layers, moving = work.layers, work.moving
    reads = [copies.get(i, tensor) for i, tensor in enumerate(work.left)]
    inputs = iter(reads)
    calls = [list(layer.calls) for layer in layers]
    gradients = [p.grad for p in moving]
    try:
        for layer in layers:
            layer.calls[:] = [_reading(call, inputs) for call in layer.calls]
        for p, gradient in zip(moving, reads[-len(moving) :], strict=True):
            p.grad = gradient
        return Recording(solve)
    finally:
        for layer, own in zip(layers, calls, strict=True):
            layer.calls[:] = own
        for p, old in zip(moving, gradients, strict=True):
            p.grad = old
