"""Independent pieces of work side by side: each on a CUDA stream of its own while a graph is captured.

Run one by one, the small layers of a network leave most of a GPU idle. Outside a capture the host
launches the kernels and is the slower part, so the work stays on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

LANES = 24  # at most
FEW = 4  # where libraries take memory for each of them: cuBLAS does, 32 MiB on an H200
BESIDE = 4  # likewise

Lane = Callable[[torch.cuda.Event | None], AbstractContextManager[None]]


@contextmanager
def lanes(most: int = LANES) -> Iterator[Lane]:
    """Give ``lane``: work inside ``with lane(None):`` starts after all that came before ``lanes()``.

    Or, given a mark, after what came before that. Everything afterwards comes after all of it. Tensors
    that the work reads must live that long.
    """
    if not _is_capturing():
        yield lambda _: nullcontext()
        return
    main = torch.cuda.current_stream()
    streams = _others(_streams(torch.cuda.current_device()))[:most]
    used: list[torch.cuda.Stream] = []

    @contextmanager
    def lane(after: torch.cuda.Event | None) -> Iterator[None]:
        used.append(streams[len(used)] if len(used) < len(streams) else used.pop(0))
        if after is None:
            used[-1].wait_stream(main)
        else:
            used[-1].wait_event(after)
        with torch.cuda.stream(used[-1]):
            yield

    try:
        yield lane
    finally:
        for stream in used:
            main.wait_stream(stream)


_gradients_stay = False
_beside: torch.cuda.Stream | None = None  # where the work beside goes now
_beside_all: list[torch.cuda.Stream] = []  # and where all of it went
_held: list[Tensor] = []  # what it reads, which must not be written over meanwhile


@contextmanager
def as_gradients_come() -> Iterator[None]:
    """Between here and the end, nobody changes a gradient or reads a weight after its layer's backward.

    Nor has anything but the layer a share in its gradients. Then the work of a layer may start beside
    the backward passes of the layers before it. All of it is done at the end.
    """
    global _gradients_stay
    before, _gradients_stay = _gradients_stay, True
    try:
        yield
    finally:
        _gradients_stay = before
        main_alone()
        _held.clear()
        join()


def gradients_stay() -> bool:
    """Whether that is so now."""
    return _gradients_stay


def mark() -> torch.cuda.Event | None:
    """What has come so far, beside too, if work may start after it."""
    if not _starts_early():
        return None
    event, main = torch.cuda.Event(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    if _beside is not None:
        _beside.wait_stream(main)
    event.record(_beside or main)
    return event


def open_beside(*read: Tensor) -> None:
    """Let work beside begin here: after what came so far, and before what comes next."""
    global _beside
    if not _starts_early():
        return
    streams = _others(_streams_beside(torch.cuda.current_device()))
    _beside = streams[len(_beside_all) % len(streams)]
    _beside.wait_stream(torch.cuda.current_stream())
    _beside_all.append(_beside)
    _held.extend(read)


def main_alone() -> None:
    """From here on there is no work beside."""
    global _beside
    _beside = None


def join() -> None:
    """What comes next waits for all the work beside there was."""
    streams = dict.fromkeys(_beside_all)
    _beside_all.clear()
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


def beside(*read: Tensor) -> AbstractContextManager[object]:
    """Work inside is beside, if that is open."""
    if _beside is None:
        return nullcontext()
    _held.extend(read)
    return torch.cuda.stream(_beside)


def _starts_early() -> bool:
    return _gradients_stay and _is_capturing()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _others(streams: list[torch.cuda.Stream]) -> list[torch.cuda.Stream]:
    """Without the current one: torch has few streams, and may give one of these to a recording."""
    now = torch.cuda.current_stream()
    return [stream for stream in streams if stream != now]


@cache
def _streams(device: int) -> list[torch.cuda.Stream]:
    """Made once: torch has few of them, and gives the same to several who ask."""
    return [torch.cuda.Stream(device) for _ in range(LANES)]  # type: ignore[no-untyped-call]


@cache
def _streams_beside(device: int) -> list[torch.cuda.Stream]:
    """Ahead of the lanes, which wait for what they do."""
    make = torch.cuda.Stream
    return [make(device, priority=-1) for _ in range(BESIDE)]  # type: ignore[no-untyped-call]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Work goes to this device: streams, graphs and Triton's kernels ask for the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
