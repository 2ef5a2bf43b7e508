"""What processes that train one model agree on, and whether they will."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torch_locoprop.config.groups import Group
from torch_locoprop.config.settings import Components
from torch_locoprop.distributed.exchange import Together
from torch_locoprop.recording.layer_record import ServedLayer
from torch_locoprop.solvers import FirstOrder

DRIFT = (
    "torch.distributed has several processes, but no layer was called through "
    "DistributedDataParallel (inside a compiled graph that is not seen). Each process solves its local "
    "problems with its own rows only, so their weights drift apart unless local_steps=1."
)


def agree(group: Any, layers: Sequence[ServedLayer], terms: float) -> float:
    """Tell all layers what all processes have of them; return the mean of the losses' terms."""
    device = layers[0].given[0].device if layers else "cpu"
    own = [float(number) for layer in layers for number in _known(layer)]
    sums = torch.tensor([*own, terms], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(sums, group=group)
    *all_known, terms = sums.tolist()
    world = torch.distributed.get_world_size(group)
    for i, layer in enumerate(layers):
        rows, with_rows, with_gram, kinds, squares = all_known[5 * i : 5 * i + 5]
        alike = world * squares == kinds**2
        layer.together = Together(group, int(rows), alike and with_rows == world, with_gram > 0)
    return terms / world


def _known(layer: ServedLayer) -> tuple[int, ...]:
    """What this process has of a layer, and a number for what it takes it for, with its square."""
    name = None if layer.transfer is None else layer.transfer.name
    kind = zlib.crc32(f"{name} {layer.is_output}".encode()) % 9973
    return layer.row_count, layer.has_rows, layer.has_gram, kind, kind**2


def drift_apart(processes: Any, groups: Iterable[Group], components: Components) -> bool:
    """Whether there are other processes, none of which was seen to average gradients with this one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    alone = torch.distributed.get_world_size() == 1
    return not alone and processes is None and any(_has_curvature(g, components) for g in groups)


def _has_curvature(group: Group, components: Components) -> bool:
    """Whether a step is more than one iteration along the gradients of the parameters."""
    needs = components.variant(group).target.needs | components.regularizer(group).needs
    plain = group["local_steps"] == 1 and isinstance(components.solver(group), FirstOrder)
    return not plain or "fisher" in needs
