"""CUDA streams for independent work, used while a CUDA graph is recorded.

If the problems of small layers are solved one after the other, most of a GPU is idle. While a CUDA
graph is recorded, each layer's problem therefore gets its own side stream (:func:`side_streams`).
Inside :func:`overlapping_backward` the problem may start while the backward passes of the layers
below still run, with the weight gradients on gradient streams. Outside of a recording the host
limits the speed, so all work stays on one stream and the functions here do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

from torch_locoprop.fast.cuda_graph import is_recording as _is_recording

MANY_STREAMS = 24  # largest number of side streams
FEW_STREAMS = 4  # for work that uses cuBLAS, which takes memory for each stream: 32 MiB on an H200
GRADIENT_STREAMS = 4  # number of streams for weight gradients, which use cuBLAS

# Puts the work inside its context on a side stream, after an event.
SideStream = Callable[[torch.cuda.Event | None], AbstractContextManager[None]]


@contextmanager
def side_streams(most: int = MANY_STREAMS) -> Iterator[SideStream]:
    """Yield a function ``side`` that puts work on a side stream: ``with side(None): ...``.

    Work inside ``side(None)`` starts after all work before ``side_streams()``; inside
    ``side(event)`` it starts after the event. Work after the context waits for all side streams.
    Tensors that the side work reads must stay alive until then.

    Args:
        most: number of streams to use; further pieces of work share them.
    """
    if not _is_recording():
        yield lambda _: nullcontext()
        return
    main = torch.cuda.current_stream()
    streams = _others(_side_streams(torch.cuda.current_device()))[:most]
    used: list[torch.cuda.Stream] = []

    @contextmanager
    def side(after: torch.cuda.Event | None) -> Iterator[None]:
        used.append(streams[len(used)] if len(used) < len(streams) else used.pop(0))
        if after is None:
            used[-1].wait_stream(main)
        else:
            used[-1].wait_event(after)
        with torch.cuda.stream(used[-1]):
            yield

    try:
        yield side
    finally:
        for stream in used:
            main.wait_stream(stream)


overlapping = False  # True inside of overlapping_backward()
_early = True  # work may leave the main stream before the backward pass has ended
_gradient_stream: torch.cuda.Stream | None = None  # stream of the layer whose backward pass runs
_used_gradient_streams: list[torch.cuda.Stream] = []
_read: list[Tensor] = []  # tensors that the gradient streams read: they must not be overwritten


@contextmanager
def overlapping_backward() -> Iterator[None]:
    """Allow a layer's step to start while the backward passes of the layers below still run.

    The caller promises that inside this context no code changes a gradient or reads a weight after its
    layer's backward pass, and that only calls of a layer contribute to its gradients. At the end of the
    context the current stream waits for all of this work.
    """
    global overlapping, _early
    before = overlapping, _early
    overlapping, _early = True, True
    try:
        yield
    finally:
        overlapping, _early = before
        leave_gradient_stream()
        _read.clear()
        wait_for_gradient_streams()


def start_nothing_early() -> None:
    """Keep all work on the main stream until :func:`overlapping_backward` ends.

    For a backward pass in which the promise of that context does not hold. What is computed stays the
    same to the last bit.
    """
    global _early
    _early = False


def ready_event() -> torch.cuda.Event | None:
    """Return an event after all work so far, with the weight gradients.

    Returns:
        The event; None outside of :func:`overlapping_backward` or of a recording.
    """
    if not _starts_early():
        return None
    event, main = torch.cuda.Event(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    if _gradient_stream is not None:
        _gradient_stream.wait_stream(main)
    event.record(_gradient_stream or main)
    return event


def enter_gradient_stream(*read: Tensor) -> None:
    """Choose a gradient stream for the layer whose backward pass is running.

    The stream waits for all work so far.

    Args:
        read: tensors that the work on the stream will read.
    """
    global _gradient_stream
    if not _starts_early():
        return
    streams = _others(_gradient_streams(torch.cuda.current_device()))
    _gradient_stream = streams[len(_used_gradient_streams) % len(streams)]
    _gradient_stream.wait_stream(torch.cuda.current_stream())
    _used_gradient_streams.append(_gradient_stream)
    _read.extend(read)


def leave_gradient_stream() -> None:
    """Put work on the main stream again, until a layer enters a gradient stream."""
    global _gradient_stream
    _gradient_stream = None


def wait_for_gradient_streams() -> None:
    """Make the current stream wait for the work on all gradient streams so far."""
    streams = dict.fromkeys(_used_gradient_streams)
    _used_gradient_streams.clear()
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


def on_gradient_stream(*read: Tensor) -> AbstractContextManager[object]:
    """Return a context that puts work on the gradient stream, if a layer has entered one.

    Args:
        read: tensors that the work reads.
    """
    if _gradient_stream is None:
        return nullcontext()
    _read.extend(read)
    return torch.cuda.stream(_gradient_stream)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context with the device as the current one, which streams and Triton use."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _starts_early() -> bool:
    """Return True if steps may start during the backward pass."""
    return overlapping and _early and _is_recording()


def _others(streams: list[torch.cuda.Stream]) -> list[torch.cuda.Stream]:
    """Return the streams without the current one: PyTorch may use one of them for a recording."""
    now = torch.cuda.current_stream()
    return [stream for stream in streams if stream != now]


@cache
def _side_streams(device: int) -> list[torch.cuda.Stream]:
    """Return the side streams of a device, made once: PyTorch has only 32 and hands them out again."""
    return [torch.cuda.Stream(device) for _ in range(MANY_STREAMS)]  # type: ignore[no-untyped-call]


@cache
def _gradient_streams(device: int) -> list[torch.cuda.Stream]:
    """Return the gradient streams of a device, of higher priority than the side streams."""
    make = torch.cuda.Stream
    return [make(device, priority=-1) for _ in range(GRADIENT_STREAMS)]  # type: ignore[no-untyped-call]
