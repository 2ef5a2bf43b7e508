"""Reads from the DTensors of a layer how its tensors are divided among processes.

The layers that can be served, by the placements of their weights on a mesh of processes:

==========================  ======================  ====================================
placements                  of                      each process has
==========================  ======================  ====================================
``S(0)``                    ``fully_shard``         rows of W; input rows of its own
``R, S(0)``                 – replicated (HSDP)     rows of W; input rows of its own
``S(0)``                    ``ColwiseParallel``     rows of W; the same input rows
``S(1)``                    ``RowwiseParallel``     columns of W; features of input rows
``R``                       neither of them         all of W; the same input rows
``_S(0), S(0)``             both, column-parallel   rows of W
``S(0), S(1)``              both, row-parallel      rows and columns of W
==========================  ======================  ====================================

``fully_shard`` over tensor parallelism has the dimensions of ``fully_shard`` first. ``_S(0)`` is a
placement for rows that tensor parallelism has divided before. A bias is placed as the weight, and
replicated where the weight's columns are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from torch_locoprop.distributed.fully_shard import NAMES, Shards
from torch_locoprop.distributed.tensor_parallel import ColumnShards
from torch_locoprop.layers.base import is_distributed


def managed_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Return all modules inside of modules to which ``fully_shard`` was applied.

    Each comes with the reason why its layers have no local problem; empty if they may have one.
    """
    if not any(is_distributed(p) for p in model.parameters()):
        return {}
    from torch.distributed.fsdp import FSDPModule

    roots = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return {module: _obstacle(root) for root in roots for module in root.modules()}


def _obstacle(root: Any) -> str:
    """Return why layers in a module to which ``fully_shard`` was applied have no local problem."""
    groups = getattr(root._get_fsdp_state(), "_fsdp_param_groups", ())  # none before such meshes
    if any(getattr(group.mesh_info, "is_spmd_mesh", False) for group in groups):
        return "fully_shard was applied with dp_mesh_dims=: no placement tells its dimensions"
    return ""


def shards_of(module: nn.Module, managed: str | None) -> Shards | str | None:
    """Return the shards of a layer, or why it has no local problem; None if it is not sharded.

    Args:
        module: the layer.
        managed: None if ``fully_shard`` was applied neither to the layer nor to a module around it;
            otherwise what :func:`managed_modules` says about it.
    """
    own: dict[str, Any] = {n: p for n in NAMES if (p := module._parameters.get(n)) is not None}
    if not any(is_distributed(p) for p in own.values()):
        return None
    if not all(is_distributed(p) for p in own.values()):
        return "only one of its weight and bias is sharded"
    if managed:
        return managed
    weight, mesh = own["weight"], own["weight"].device_mesh
    if weight.device.type != mesh.device_type:  # CPUOffloadPolicy
        return f"its weight is on {weight.device}, its mesh has {mesh.device_type}s"
    if managed is None and mesh.ndim > 1:
        return "its weight is a DTensor on a mesh of several dimensions, without fully_shard"
    data = 0 if managed is None else _data_dimensions(weight.placements)
    if data is None or not _are_served(weight, data):
        return f"its weight is sharded as {weight.placements}, which has no local problem"
    by_columns = any(_dimension(each) == 1 for each in weight.placements)
    for p in own.values():
        if p.device_mesh != mesh or not _belongs(p, weight):
            return "its weight and bias are sharded in different ways"
    divided = [i for i, each in enumerate(weight.placements) if _dimension(each) is not None]
    if divided and _is_strided(weight.placements[divided[0]]):
        divided.reverse()  # tensor parallelism came first
    kind = ColumnShards if by_columns else Shards
    return kind(mesh, tuple(divided), tuple(range(data)), weight.shape[0], own)


def _data_dimensions(placements: Sequence[Any]) -> int | None:
    """Return how many dimensions of the mesh are those of ``fully_shard``: up to the first shards.

    None if ``fully_shard`` has not divided rows.
    """
    for i, each in enumerate(placements):
        if not each.is_replicate():
            return i + 1 if _dimension(each) == 0 else None
    return None


def _are_served(weight: Any, data: int) -> bool:
    """Return True if what tensor parallelism has done with a weight has a local problem.

    Args:
        weight: the weight.
        data: number of dimensions of the mesh that are those of ``fully_shard``.
    """
    rest = weight.placements[data:]
    if len(rest) > 1 or any(_dimension(each) is None and not each.is_replicate() for each in rest):
        return False
    dimension = _dimension(rest[0]) if rest else None
    return dimension in (None, 0) or (dimension == 1 and weight.dim() == 2)


def _belongs(tensor: Any, weight: Any) -> bool:
    """Return True if a tensor is placed as the weight is; a bias is replicated for its columns."""
    if tensor is weight:
        return True
    return all(
        own.is_replicate() if _dimension(each) == 1 else own == each
        for own, each in zip(tensor.placements, weight.placements, strict=True)
    )


def _dimension(placement: Any) -> int | None:
    """Return the dimension of a tensor that a placement divides; None if it divides none."""
    dimension: int | None = getattr(placement, "dim", None)
    return dimension


def _is_strided(placement: Any) -> bool:
    return getattr(placement, "split_factor", 1) > 1
