"""Facts about the running backward pass, and callbacks at its end.

PyTorch has no public functions for these facts, so this module uses private ones; no other module does.
Hooks call these functions for every layer, so some names are just PyTorch's own functions, for speed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.graph import Node

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the id of the running backward pass; -1 outside of any."""

retains_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)
"""Return True if the running backward pass may retain the autograd graph for another pass."""

at_end: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Call a function at the end of the running backward pass, after those registered before."""


def running_node() -> Node | None:
    """Return the autograd node whose backward is running; None if there is none."""
    return torch._C._current_autograd_node()
