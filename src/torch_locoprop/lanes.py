"""Independent pieces of work side by side: each on a CUDA stream of its own while a graph is captured.

Run one by one, the small layers of a network leave most of a GPU idle. Outside a capture the host
launches the kernels and is the slower part, so the work stays on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

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
    main = torch.cuda.current_stream()
    streams: list[torch.cuda.Stream] = []

    @contextmanager
    def lane() -> Iterator[None]:
        if len(streams) < LANES:
            streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
            streams[-1].wait_stream(main)
        else:
            streams.append(streams.pop(0))
        with torch.cuda.stream(streams[-1]):
            yield

    yield lane
    for stream in streams:
        main.wait_stream(stream)
