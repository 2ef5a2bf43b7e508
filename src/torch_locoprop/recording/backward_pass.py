"""Facts about the running backward pass, and callbacks at its end.

PyTorch has no public functions for these. All uses of its private ones are here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.graph import Node


def current_pass() -> int:
    """Return the id of the running backward pass; -1 outside of any."""
    return torch._C._current_graph_task_id()


def is_running() -> bool:
    """Return True inside a backward pass: a forward call made there is a recomputation."""
    return current_pass() != -1


def retains_graph() -> bool:
    """Return True if the running backward pass may retain the autograd graph for another pass."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())


def running_node() -> Node | None:
    """Return the autograd node whose backward is running; None if there is none."""
    return torch._C._current_autograd_node()


def at_end(callback: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass, after those registered before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
