"""Several processes that train one model: what local problems make of their rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_locoprop.groups import Group
from torch_locoprop.settings import Components
from torch_locoprop.solvers import FirstOrder

DRIFT = (
    "torch.distributed has several processes. Each solves its local problems with its own rows only, "
    "so their weights drift apart unless local_steps=1. Average the weights now and then, or train in "
    "one process."
)


def drift_apart(groups: Iterable[Group], components: Components) -> bool:
    """Whether there are other processes, which average gradients but not the curvature of rows."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    alone = torch.distributed.get_world_size() == 1
    return not alone and any(_has_curvature(group, components) for group in groups)


def _has_curvature(group: Group, components: Components) -> bool:
    """Whether a step is more than one iteration along the gradients of the parameters."""
    needs = components.variant(group).target.needs | components.regularizer(group).needs
    plain = group["local_steps"] == 1 and isinstance(components.solver(group), FirstOrder)
    return not plain or "fisher" in needs
