"""Starts real worker processes that talk to each other by gloo, and checks how they end."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.multiprocessing import spawn


def run(worker: Callable[..., None], world: int, folder: Path, *args: Any) -> None:
    """Call ``worker(rank, folder, *args)`` in each of ``world`` processes; raises if one of them fails.

    Args:
        worker: a function at the top of a module.
        world: the number of processes.
        folder: an empty folder for the processes to meet in.
        args: further arguments of the worker.
    """
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch has no processes")
    spawn(_in_a_process, (worker, world, str(folder), args), nprocs=world)


def join_group(rank: int, world: int, folder: Path) -> None:
    """Make this process one of a group."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )


def _in_a_process(
    rank: int, worker: Callable[..., None], world: int, folder: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    join_group(rank, world, Path(folder))
    worker(rank, Path(folder), *args)
    gc.collect()  # models in circles of references, which must not outlive their process group
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.flush()
    # What is left, such as models in circles, is not destroyed after its process group: that may abort
    # the process ("terminate called without an active exception").
    os._exit(0)
