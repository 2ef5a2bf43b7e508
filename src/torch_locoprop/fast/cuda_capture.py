"""The capture of work as CUDA graphs, with what ``torch.cuda.graph`` leaves to its caller.

- Python's garbage collector must not run meanwhile: it may destroy an older CUDA graph, such as that of
  a model that is no longer in use. CUDA forbids this to a thread that captures, and the capture fails.
- The first replay must wait for the numbers that PyTorch has written before the capture.
- A failed capture leaves PyTorch in a state in which it keeps memory, and in which dropout fails.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

Part = Callable[[], object]  # replays one CUDA graph, or does the work between two of them

# PyTorch permits one capture at a time. A capture inside another one raises PyTorch's error and
# does not wait forever.
_ONE_CAPTURE = threading.RLock()


@contextmanager
def capture(parts: list[Part], priority: int = 0) -> Iterator[Callable[[Part], None]]:
    """Capture the work inside the context, which does not run, on a stream of its own.

    Args:
        parts: gets the parts of the work, to be called in this order, each of them once a replay.
        priority: the priority of the stream.

    Yields:
        A function that ends the CUDA graph, adds its argument to ``parts`` without calling it, and goes
        on with another CUDA graph. All of them share memory.
    """
    before, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    own = torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]
    running = ExitStack()

    def begin() -> None:
        graph = torch.cuda.CUDAGraph()
        # "thread_local" lets other threads, such as data loaders, use the GPU meanwhile.
        mode = "thread_local"
        running.enter_context(torch.cuda.graph(graph, pool, own, capture_error_mode=mode))
        parts.append(graph.replay)

    def end() -> None:
        with warnings.catch_warnings():  # two collectives may have nothing between them
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            running.close()

    def split(work: Part) -> None:
        end()
        parts.append(work)
        begin()

    with _without_garbage_collection():
        try:
            with running:
                begin()
                yield split
                end()
        except BaseException:
            _clean_up_after_failure(pool)
            raise
        finally:
            torch.cuda.set_stream(before)  # PyTorch does not restore it after a failure
    # Up to version 2.11, PyTorch resets the position in the random numbers of all CUDA graphs on this
    # stream when a capture begins. A replay sets the position on the current stream.
    before.wait_stream(own)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector and captures of other threads out of the context."""
    with _ONE_CAPTURE:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def _clean_up_after_failure(pool: tuple[int, int]) -> None:
    """Free the memory of a failed capture, and make PyTorch's generator of random numbers usable again.

    Args:
        pool: the id of the memory pool of the capture.
    """
    device = torch.cuda.current_device()
    # PyTorch has done it if the work failed, but not the capture. The functions are not public.
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    # The end of any other capture resets the generator. It fails too if the GPU is not usable any more.
    with (
        suppress(RuntimeError),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=own, capture_error_mode="thread_local"),
    ):
        torch.zeros((), device=device)
