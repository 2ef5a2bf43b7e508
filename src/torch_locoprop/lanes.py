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

Lane = Callable[[], AbstractContextManager[None]]


@contextmanager
def lanes() -> Iterator[Lane]:
    """Give ``lane``: work inside ``with lane():`` starts after all that came before ``lanes()``.

    Everything afterwards comes after all of it. Tensors that the work reads must live that long.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        yield nullcontext
        return
    main, streams = torch.cuda.current_stream(), _streams(torch.cuda.current_device())
    used: list[torch.cuda.Stream] = []

    @contextmanager
    def lane() -> Iterator[None]:
        if len(used) < LANES:
            used.append(streams[len(used)])
            used[-1].wait_stream(main)
        else:
            used.append(used.pop(0))
        with torch.cuda.stream(used[-1]):
            yield

    try:
        yield lane
    finally:
        for stream in used:
            main.wait_stream(stream)


@cache
def _streams(device: int) -> list[torch.cuda.Stream]:
    """Made once: torch has few of them, and gives the same to several who ask."""
    return [torch.cuda.Stream(device) for _ in range(LANES)]  # type: ignore[no-untyped-call]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Work goes to this device: streams, graphs and Triton's kernels ask for the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
