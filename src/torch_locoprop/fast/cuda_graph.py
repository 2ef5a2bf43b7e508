"""CUDA graphs: work that is recorded once and replayed whenever the same work comes again.

In an ordinary loop the host launches every kernel of every local iteration, which takes longer than the
kernels run. A CUDA graph launches all of them at once, but it reads and writes fixed addresses.

- :class:`Recording` is recorded work: one CUDA graph, or several with collectives between them.
- :class:`Repeated` replays work that is the same in every call: whole training steps, populations.
- :class:`StepGraphs` replays the local problems of ``opt.step()``. In most loops a backward pass puts
  most inputs and gradients at the same addresses as the pass before, and the CUDA graph reads them
  there. The others are copied to fixed addresses.

Collectives of several processes are no part of a CUDA graph. Code calls them through :func:`outside`,
which divides a recording at each of them. A replay calls the collectives of an eager step, with tensors
of the same sizes, in the same order. So a process may replay a step that others run eagerly or record.

These classes know no layers and no settings: a :class:`Work`, which is made in
``stepping/graph_work.py``, describes what a step does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from operator import add
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from torch_locoprop.fast.cuda_capture import Part, capture

DEVICE_TYPES = ("cuda",)  # types of devices with streams and CUDA graphs; tests emulate others

T = TypeVar("T")
Group = dict[str, Any]
Directions = dict[nn.Parameter, Tensor]
Solve = Callable[[], Directions]

# Number of steps of one kind that run eagerly before one is recorded. Libraries such as cuBLAS choose
# their kernels in these steps.
EAGER_STEPS = 3
# A tensor whose address has changed more often than this is copied from then on. One change is allowed
# because the recording itself changes which memory is free. Any other use of memory between steps, such
# as an evaluation, may change addresses too.
MAX_MOVES = 1
# Number of recordings of one kind that read tensors in place; all later ones read copies only.
MAX_RECORDINGS_IN_PLACE = 4
# Number of kinds of steps that are kept: for example, the last batch of an epoch may be smaller.
MAX_KINDS = 4


class _Recorded(threading.local):
    """What a thread records at the moment."""

    split: Callable[[Part], None] | None = None  # the function of `capture`
    buffers: dict[object, Tensor]  # those of `buffer`


_recorded = _Recorded()


def outside(work: Part) -> None:
    """Run work that no CUDA graph can contain, such as a collective.

    While this thread records, the work does not run: it becomes the part of the recording between two
    CUDA graphs. So the host must not read what the work writes.

    Args:
        work: reads and writes the same tensors in every call. It is kept as long as the recording, and
            so are these tensors.
    """
    if _recorded.split is None:
        work()
    else:
        _recorded.split(work)


def is_divisible() -> bool:
    """Return True while this thread makes a :class:`Recording`, which :func:`outside` divides."""
    return _recorded.split is not None


def buffer(like: Tensor, number: int) -> Tensor:
    """Return a contiguous tensor for work outside of CUDA graphs, which the present recording keeps.

    All tensors of one shape share a buffer. So what a recording keeps does not grow with the number of
    collectives, and memory of the tensors themselves is free for others as in an eager step.

    Args:
        like: a tensor of the same shape, dtype and device.
        number: tells apart the buffers of one piece of work.
    """
    key = number, like.shape, like.dtype, like.device
    if key not in _recorded.buffers:
        _recorded.buffers[key] = torch.empty_like(like, memory_format=torch.contiguous_format)
    return _recorded.buffers[key]


@contextmanager
def split_by(split: Callable[[Part], None]) -> Iterator[None]:
    """Let :func:`outside` call ``split`` in this thread, inside the context."""
    _recorded.split, _recorded.buffers = split, {}
    try:
        yield
    finally:
        _recorded.split, _recorded.buffers = None, {}


class Recording(Generic[T]):
    """CUDA graphs of work on the current device: one, or one between every two calls of ``outside``.

    Args:
        work: the work to record. The recording runs no part of it, also if it fails: call
            :meth:`replay`.
        priority: the priority of the stream that records.

    Attributes:
        result: what the work returned; every replay overwrites its tensors.
    """

    def __init__(self, work: Callable[[], T], priority: int = 0) -> None:
        self._parts: list[Part] = []
        with capture(self._parts, priority) as split, split_by(split):
            self.result = work()

    def replay(self) -> None:
        """Run the recorded kernels, and the work between them."""
        for part in self._parts:
            part()


class Repeated(Generic[T]):
    """Work that is the same in every call: run eagerly at first, then replayed as a CUDA graph.

    Args:
        eager: number of calls before the recording.
        priority: the priority of the stream that records; -1 is higher than that of side streams.
    """

    def __init__(self, eager: int, priority: int = 0) -> None:
        self._eager, self._priority = eager, priority
        self._recording: Recording[T] | None = None

    @property
    def is_recorded(self) -> bool:
        """True if the work is recorded, so that the next call replays it."""
        return self._recording is not None

    @property
    def will_record(self) -> bool:
        """True if the next call records the work."""
        return self._recording is None and self._eager == 0

    def __call__(self, work: Callable[[], T]) -> T:
        """Run or replay the work and return its result, which the next replay overwrites.

        Args:
            work: a function that reads and writes the same tensors in every call. It is not kept, so
                that its owner may own this object too: the CUDA graph is freed with the owner.
        """
        if self.will_record:
            self._recording = Recording(work, self._priority)
        if self._recording is None:
            self._eager -= 1
            return _on_side_stream(work)
        self._recording.replay()
        return self._recording.result


def _on_side_stream(work: Callable[[], T]) -> T:
    """Run work on a stream other than the default one, as PyTorch requires before a recording."""
    before = torch.cuda.current_stream()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        result = work()
    before.wait_stream(stream)
    if isinstance(result, Tensor):
        result.record_stream(before)  # its memory is not used again while that stream reads it
    return result


def is_recording() -> bool:
    """Return True while the current stream records a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def can_record(device: torch.device) -> bool:
    """Return True if work on a device can be recorded: on a GPU, outside of another recording."""
    return device.type == "cuda" and not is_recording()


class Work(NamedTuple):
    """Describes what a step does on the device."""

    key: list[object]  # equal for steps that do the same work
    held: list[Tensor]  # the tensors that the key identifies by their id
    moving: list[Tensor]  # the parameters that the step moves, of sharded ones this process's parts
    inputs: list[Tensor]  # inputs of all layers, then gradients, from the passes
    is_fixed: Callable[[], bool]  # returns True if the host decides nothing in the step
    reading: Callable[[Sequence[Tensor]], AbstractContextManager[None]]  # replaces `inputs` inside


@dataclass(eq=False)
class _StepKind:
    """Steps that do the same work, and the CUDA graph of them."""

    key: list[object]
    held: list[Tensor]  # kept alive, so that no other tensor gets the id of one of them
    steps: int = 0  # number of steps so far
    recordings: int = 0  # number of recordings so far
    recording: Recording[Directions] | None = None
    # Addresses of the inputs in the last step, and how often the address of each input has changed.
    addresses: list[int] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    # Addresses of the inputs that the recording reads.
    read_addresses: list[int] = field(default_factory=list)
    copies: dict[int, Tensor] = field(default_factory=dict)  # read in place of inputs, by index

    def count_moves(self, inputs: Sequence[Tensor]) -> None:
        """Count which inputs have other addresses than in the step before."""
        addresses = [tensor.data_ptr() for tensor in inputs]
        before, moves = self.addresses or addresses, self.moves or [0] * len(inputs)
        moved = [now != then for now, then in zip(addresses, before, strict=True)]
        self.addresses, self.moves = addresses, list(map(add, moves, moved))

    def recording_of(self, work: Work, solve: Solve) -> Recording[Directions]:
        """Return a recording that reads the present inputs: the last one if it does, or a new one."""
        if self.recording is not None and all(
            now == then or i in self.copies
            for i, (now, then) in enumerate(zip(self.addresses, self.read_addresses, strict=True))
        ):
            if self.copies:
                inputs = [work.inputs[i] for i in self.copies]
                torch._foreach_copy_(list(self.copies.values()), inputs)
            return self.recording
        self.recording = None  # frees its memory for the next one
        self.recordings += 1
        only_copies = self.recordings > MAX_RECORDINGS_IN_PLACE
        copied = [only_copies or moves > MAX_MOVES for moves in self.moves]
        self.copies = {i: work.inputs[i].clone() for i, own in enumerate(copied) if own}
        with work.reading([self.copies.get(i, tensor) for i, tensor in enumerate(work.inputs)]):
            self.read_addresses, self.recording = self.addresses, Recording(solve)
        return self.recording


class StepGraphs:
    """Takes the local steps of one optimizer: eagerly at first, then by replay.

    Attributes:
        failure: the error message if a recording has failed. No step is recorded after that.
    """

    def __init__(self) -> None:
        self._kinds: list[_StepKind] = []  # the most recently used first
        self._rates = DeviceRates()
        self.failure: str | None = None

    def take(self, work: Work | None, solve: Solve) -> Directions:
        """Solve all problems, by replay if the same work was recorded.

        Args:
            work: what the step does; None if it must not be recorded.
            solve: solves all problems and returns directions for an outer optimizer.

        Returns:
            What ``solve`` returns, in tensors that later steps do not overwrite.
        """
        if work is None or self.failure is not None:
            return solve()
        kind = self._kind_of(work)
        if kind is None:
            return solve()
        kind.steps += 1
        kind.count_moves(work.inputs)
        if kind.steps <= EAGER_STEPS:
            return solve()
        try:
            recording = kind.recording_of(work, solve)
        except RuntimeError as error:
            self.failure = str(error)
        if self.failure is not None:
            del kind
            self.forget()  # frees memory: too little of it may be the reason of the failure
            return solve()
        recording.replay()
        return _copied(recording.result)

    def forget(self) -> None:
        """Drop all recordings."""
        self._kinds.clear()

    def rates_on_device(
        self, groups: Sequence[Group], device: torch.device
    ) -> AbstractContextManager[None]:
        """Return a context in which the groups' learning rates are tensors on the device.

        See :class:`DeviceRates`.
        """
        return self._rates.of(groups, device)

    def _kind_of(self, work: Work) -> _StepKind | None:
        """Return the kind of a step, a new one if needed; None if the step cannot be recorded."""
        for place, kind in enumerate(self._kinds):
            if kind.key == work.key:
                self._kinds.insert(0, self._kinds.pop(place))
                return kind
        if not work.is_fixed():
            return None
        self._kinds.insert(0, _StepKind(work.key, work.held))
        del self._kinds[MAX_KINDS:]
        return self._kinds[0]


class DeviceRates:
    """Learning rates as tensors on the device, so that replays use the present rates of schedules."""

    def __init__(self) -> None:
        self._rates: dict[Hashable, tuple[Tensor, float]] = {}  # a tensor and its present value

    @contextmanager
    def of(self, groups: Sequence[Group], device: torch.device) -> Iterator[None]:
        """Replace each ``group["lr"]`` by a tensor on the device inside the context.

        Eager steps use it too, so that they round as replayed steps do.
        """
        given = [group["lr"] for group in groups]
        try:
            for group in groups:
                if not isinstance(group["lr"], Tensor) or group["lr"].device != device:
                    # Groups with equal rates share a tensor: some kernels require it.
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
    """Return copies, made in one launch: the next replay overwrites the originals."""
    if not directions:
        return {}
    copies = torch._foreach_mul(list(directions.values()), 1.0)
    return dict(zip(directions, copies, strict=True))
