"""Processes as threads: collectives in one process, without the seconds that processes take.

Real processes are in ``tests/distributed``. Threads have the collectives of ``torch.distributed``, and
share all that is global, such as random numbers: make models before the threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from torch_locoprop.distributed import averaging, pipeline

SECONDS = 30  # after which threads that wait for each other are given up


def run(worker: Callable[[int], Any], world: int) -> list[Any]:
    """Return what ``worker(rank)`` returns in each of ``world`` threads, which form a process group."""
    found: dict[int, Any] = {}
    errors: list[BaseException] = []
    store = distributed.HashStore()

    def work(rank: int) -> None:
        try:
            distributed.init_process_group("threaded", rank=rank, world_size=world, store=store)
            found[rank] = worker(rank)
            distributed.destroy_process_group()
        except SystemExit:  # of a thread that waited for one with an error
            pass
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)

    # A search of all objects breaks tuples that other threads are building (bpo-15108).
    with _threads_as_processes(), patch.object(pipeline, "instances", lambda kind: []):
        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        waiting = any(thread.is_alive() for thread in threads)
        if waiting:
            errors.append(TimeoutError("Threads wait for each other: their collectives differ."))
            ProcessLocalGroup.exception_handle(errors[-1])
            for thread in threads:
                thread.join(SECONDS)
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(world)]


@contextmanager
def _threads_as_processes() -> Iterator[None]:
    """Give every thread a default process group of its own."""
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()


@contextmanager
def averaged() -> Iterator[None]:
    """Let all threads of :func:`run` call their models through ``DistributedDataParallel``.

    Its class knows which module runs, but every thread runs another one. So the class is not told:
    threads that end in another order than they began would leave a module there for good.
    """
    untold = patch.object(DistributedDataParallel, "_inside_ddp_forward", lambda _: nullcontext())
    group = patch.object(averaging, "averaging_processes", lambda joins: distributed.group.WORLD)
    with untold, group, patch.object(averaging, "are_averaged", lambda: True):
        yield
