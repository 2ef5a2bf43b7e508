"""Whether processes that train one model will have different weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from torch_locoprop.groups import Group
from torch_locoprop.served import ServedLayer
from torch_locoprop.settings import Components
from torch_locoprop.solvers import FirstOrder

DRIFT = (
    "torch.distributed has several processes, but the layers were not called through "
    "DistributedDataParallel (or inside a compiled graph, where that is not seen). Each process solves "
    "its local problems with its own rows only, so their weights drift apart unless local_steps=1."
)


def drift_apart(
    layers: Sequence[ServedLayer], groups: Iterable[Group], components: Components
) -> bool:
    """Whether there are other processes that do not add up the curvature of their rows."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    alone = torch.distributed.get_world_size() == 1
    known = all(layer.processes is not None for layer in layers if layer.calls)
    return not (alone or known) and any(_has_curvature(group, components) for group in groups)


def _has_curvature(group: Group, components: Components) -> bool:
    """Whether a step is more than one iteration along the gradients of the parameters."""
    needs = components.variant(group).target.needs | components.regularizer(group).needs
    plain = group["local_steps"] == 1 and isinstance(components.solver(group), FirstOrder)
    return not plain or "fisher" in needs
