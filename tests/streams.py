"""Emulated CUDA streams, which record what waits for what while a CUDA graph is recorded."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from torch_locoprop.fast import cuda_graph, cuda_streams


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.waits: list[str] = []
        self.known: Counter[str] = Counter()  # of each stream, how many operations came before

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(f"all of {other.name}")
        self.known |= other.known

    def wait_event(self, event: "Event") -> None:
        self.waits.append(f"an event of {event.after}")
        self.known |= event.known


class Event:
    def __init__(self) -> None:
        self.after: str | None = None
        self.known: Counter[str] = Counter()

    def record(self, stream: Stream | None = None) -> None:
        own = stream or CUDA.now
        self.after, self.known = own.name, Counter(own.known)


class CUDA:
    """Replaces the functions of ``torch.cuda`` that ``cuda_streams`` calls."""

    now: Stream

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        CUDA.now = self.main = Stream("main")
        self.side = [Stream(f"side {i}") for i in range(cuda_streams.MANY_STREAMS)]
        self.gradient = [Stream(f"gradient {i}") for i in range(cuda_streams.GRADIENT_STREAMS)]
        monkeypatch.setattr(cuda_graph, "DEVICE_TYPES", ("cuda", "cpu"))
        monkeypatch.setattr(cuda_streams, "_is_recording", lambda: True)
        monkeypatch.setattr(cuda_streams, "_side_streams", lambda device: self.side)
        monkeypatch.setattr(cuda_streams, "_gradient_streams", lambda device: self.gradient)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: CUDA.now)
        monkeypatch.setattr(torch.cuda, "stream", self._inside)
        monkeypatch.setattr(torch.cuda, "Event", Event)

    @contextmanager
    def _inside(self, stream: Stream) -> Iterator[None]:
        before, CUDA.now = CUDA.now, stream
        try:
            yield
        finally:
            CUDA.now = before

    def synchronize(self) -> None:
        streams = [*self.side, *self.gradient]
        for stream in streams:
            self.main.wait_stream(stream)
        for stream in streams:
            stream.wait_stream(self.main)
