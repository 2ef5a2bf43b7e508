"""CUDA graphs: recording work once and replaying it, for all who repeat the same work.

In an ordinary loop the host launches every kernel of every local iteration, and that takes longer than
the kernels do. A CUDA graph launches all of them at once, but reads fixed addresses only.

- :class:`Recording` is one recorded graph.
- :class:`Repeated` replays work that is the same every time: whole training steps, populations.
- :class:`StepGraphs` replays the local problems of ``opt.step()``. In most loops a backward pass leaves
  most inputs and gradients where it left them the time before, and the graph reads them there; those
  that move are copied to where the graph reads them.

What a step's work is, these classes are told (:class:`Work`): they know no layers and no settings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from operator import add
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Group = dict[str, Any]
Directions = dict[nn.Parameter, Tensor]
Solve = Callable[[], Directions]

# Steps of one kind that run eagerly before it is recorded: libraries choose their kernels in them.
EAGER_STEPS = 3
# A tensor that has moved more often than this is copied from then on. One move is allowed, because
# a recording leaves other memory free. Whatever takes memory between steps may move tensors, such
# as an evaluation.
MOVES = 1
# Recordings of one kind that read tensors where they are; any further recording reads copies alone.
RECORDINGS = 4
# Kinds of steps to remember: a batch is smaller now and then, or a step has no local problems.
KINDS = 4


class Recording(Generic[T]):
    """A CUDA graph of work on the current device, and what the work returned."""

    def __init__(self, work: Callable[[], T], priority: int = 0) -> None:
        self._graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        own = torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]
        try:
            # Other threads, such as those that load data, may continue whatever they do.
            with torch.cuda.graph(self._graph, stream=own, capture_error_mode="thread_local"):
                self.result = work()
        finally:
            torch.cuda.set_stream(before)  # a recording that failed does not do so

    def replay(self) -> None:
        """Run the recorded kernels."""
        self._graph.replay()


class Repeated(Generic[T]):
    """Work that is the same in every call: run eagerly at first, then replayed as a CUDA graph.

    Args:
        work: a function that reads and writes the same tensors each time.
        eager: number of calls before the recording.
        priority: of the stream that records; -1 puts it ahead of the layers' streams.
    """

    def __init__(self, work: Callable[[], T], eager: int, priority: int = 0) -> None:
        self._work, self._eager, self._priority = work, eager, priority
        self._recording: Recording[T] | None = None

    @property
    def is_recorded(self) -> bool:
        """True if the next call replays a recording."""
        return self._recording is not None

    @property
    def will_record(self) -> bool:
        """True if the next call records the work."""
        return self._recording is None and self._eager == 0

    def __call__(self) -> T:
        """Run or replay the work; what a replay returns is overwritten by the next one."""
        if self.will_record:
            self._recording = Recording(self._work, self._priority)
        if self._recording is None:
            self._eager -= 1
            return _on_side_stream(self._work)
        self._recording.replay()
        return self._recording.result


def _on_side_stream(work: Callable[[], T]) -> T:
    """Run work as a recording requires it to have run before: on a stream that is not the default."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = work()
    torch.cuda.current_stream().wait_stream(stream)
    return result


def is_recording() -> bool:
    """Return True while the current stream records a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def can_record(device: torch.device) -> bool:
    """Return True if work on the device can be recorded now: not inside another recording."""
    return device.type == "cuda" and not is_recording()


class Work(NamedTuple):
    """What a step does on the device."""

    key: list[object]  # equal for steps that are the same work
    held: list[Tensor]  # the tensors that the key names by identity
    moving: list[nn.Parameter]  # the parameters that the step moves
    left: list[Tensor]  # what backward passes have left: inputs of all layers, then gradients
    is_fixed: Callable[[], bool]  # whether the host has no part in it; alike for equal keys
    reading: Callable[[Sequence[Tensor]], AbstractContextManager[None]]  # other tensors for `left`


@dataclass(eq=False)
class _Kind:
    """Steps that are the same work."""

    key: list[object]
    held: list[Tensor]  # kept alive, so that no other tensor gets the identity of one of them
    taken: int = 0
    recorded: int = 0
    recording: Recording[Directions] | None = None
    last: list[int] = field(default_factory=list)  # addresses of what the last backward pass left
    moves: list[int] = field(default_factory=list)  # how often each of these has moved
    places: list[int] = field(default_factory=list)  # addresses that the recording reads,
    copies: dict[int, Tensor] = field(default_factory=dict)  # except those with a copy, by index

    def watch(self, left: Sequence[Tensor]) -> None:
        """Count which tensors have moved since the step before."""
        places = [tensor.data_ptr() for tensor in left]
        before, moves = self.last or places, self.moves or [0] * len(left)
        moved = [now != then for now, then in zip(places, before, strict=True)]
        self.last, self.moves = places, list(map(add, moves, moved))

    def ready(self, work: Work, solve: Solve) -> Recording[Directions]:
        """Return a recording that reads what is left now: the last one, or a new one."""
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
        with work.reading([self.copies.get(i, tensor) for i, tensor in enumerate(work.left)]):
            self.places, self.recording = self.last, Recording(solve)
        return self.recording


class StepGraphs:
    """Takes the local steps of one optimizer: eagerly at first, then by replay."""

    def __init__(self) -> None:
        self._kinds: list[_Kind] = []  # the newest first
        self._rates = DeviceRates()
        self.failure: str | None = None  # why steps are not recorded any more

    def take(self, work: Work | None, solve: Solve) -> Directions:
        """Solve all problems, by replay if the same work was recorded.

        Args:
            work: what the step does; None is never recorded.
            solve: solves all problems and returns directions for an outer optimizer.
        """
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
            self.forget()  # frees memory, the lack of which may be the reason
            return solve()
        recording.replay()
        return _copied(recording.result)

    def forget(self) -> None:
        """Drop all recordings."""
        self._kinds.clear()

    def rates_on_device(
        self, groups: Sequence[Group], device: torch.device
    ) -> AbstractContextManager[None]:
        """Put the groups' learning rates where a recording reads them, see :class:`DeviceRates`."""
        return self._rates.of(groups, device)

    def _kind_of(self, work: Work) -> _Kind | None:
        """Return the kind of such steps, now the newest; None if the host has a part in them."""
        for place, kind in enumerate(self._kinds):
            if kind.key == work.key:
                self._kinds.insert(0, self._kinds.pop(place))
                return kind
        if not work.is_fixed():
            return None
        self._kinds.insert(0, _Kind(work.key, work.held))
        del self._kinds[KINDS:]
        return self._kinds[0]


class DeviceRates:
    """Learning rates as tensors on the device, so that a recording follows schedules."""

    def __init__(self) -> None:
        self._rates: dict[Hashable, tuple[Tensor, float]] = {}  # with the value written last

    @contextmanager
    def of(self, groups: Sequence[Group], device: torch.device) -> Iterator[None]:
        """Replace each ``group["lr"]`` by a tensor on the device while the context is open.

        Used from the first step on, recorded or not, so that all steps round alike.
        """
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
        wide = any(p.dtype == torch.float64 for p in group["params"][:1])
        dtype, lr = torch.float64 if wide else torch.float32, float(group["lr"])
        rate, written = self._rates.get((index, dtype, device), (None, None))
        if rate is None:
            rate = torch.empty((), dtype=dtype, device=device)
        if written != lr:
            self._rates[index, dtype, device] = rate.fill_(lr), lr
        return rate


def _copied(directions: Mapping[nn.Parameter, Tensor]) -> Directions:
    """Return copies, made in one launch; the next replay overwrites the originals."""
    if not directions:
        return {}
    copies = torch._foreach_mul(list(directions.values()), 1.0)
    return dict(zip(directions, copies, strict=True))
