"""Independent pieces of work side by side: each on a CUDA stream of its own while a graph is captured.

Run one by one, the small layers of a network leave most of a GPU idle. Outside a capture the host
launches the kernels and is the slower part, so the work stays on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

LANES = 8  # at most: a lane's memory is its own

Lane = Callable[[torch.cuda.Event | None], AbstractContextManager[None]]


@contextmanager
def lanes() -> Iterator[Lane]:
    """Give ``lane``: work inside ``with lane(None):`` starts after all that came before ``lanes()``.

    Or, given a mark, after what came before that. Everything afterwards comes after all of it. Tensors
    that the work reads must live that long.
    """
    if not _is_capturing():
        yield lambda _: nullcontext()
        return
    main, streams = torch.cuda.current_stream(), _streams(torch.cuda.current_device())
    used: list[torch.cuda.Stream] = []

    @contextmanager
    def lane(after: torch.cuda.Event | None) -> Iterator[None]:
        used.append(streams[len(used)] if len(used) < LANES else used.pop(0))
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


@contextmanager
def as_gradients_come() -> Iterator[None]:
    """Between here and the end, nobody changes a gradient or reads a weight after its layer's backward.

    Then the work of a layer may start beside the backward passes of the layers before it.
    """
    global _gradients_stay
    before, _gradients_stay = _gradients_stay, True
    try:
        yield
    finally:
        _gradients_stay = before


def gradients_stay() -> bool:
    """Whether that is so now."""
    return _gradients_stay


def mark() -> torch.cuda.Event | None:
    """What has come so far, if work may start after it."""
    if not (_gradients_stay and _is_capturing()):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@cache
def _streams(device: int) -> list[torch.cuda.Stream]:
    """Made once: torch has few of them, and gives the same to several who ask."""
    return [torch.cuda.Stream(device) for _ in range(LANES)]  # type: ignore[no-untyped-call]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Work goes to this device: streams, graphs and Triton's kernels ask for the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
