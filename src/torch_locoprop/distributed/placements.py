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
placement for rows that tensor parallelism has divided before. Where ``fully_shard`` divides rows, the
``replicate`` that is built on it has ``R``. A bias is placed as the weight, and replicated where the
weight's columns are divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from torch_locoprop.distributed.fully_shard import NAMES, Shards
from torch_locoprop.distributed.tensor_parallel import ColumnShards
from torch_locoprop.layers.base import is_distributed


def managed_parameters(model: nn.Module) -> dict[nn.Parameter, Any]:
    """Return the parameters that ``fully_shard`` has divided, each with what it knows of its mesh."""
    if not any(is_distributed(p) for p in model.parameters()):
        return {}
    from torch.distributed.fsdp import FSDPModule

    states: list[Any] = [
        module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)
    ]
    groups = [group for state in states for group in _parameter_groups(state)]
    return {own.sharded_param: own.mesh_info for group in groups for own in group.fsdp_params}


def _parameter_groups(state: Any) -> list[Any]:
    """Return the groups of parameters of a module under ``fully_shard``; old versions have one."""
    several = getattr(state, "_fsdp_param_groups", None)
    groups: list[Any] = [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def shards_of(module: nn.Module, managed: Mapping[nn.Parameter, Any]) -> Shards | str | None:
    """Return the shards of a layer, or why it has no local problem; None if it is not sharded.

    Args:
        module: the layer.
        managed: what :func:`managed_parameters` returns for the model.
    """
    own: dict[str, Any] = {n: p for n in NAMES if (p := module._parameters.get(n)) is not None}
    if not any(is_distributed(p) for p in own.values()):
        return None
    if not all(is_distributed(p) for p in own.values()):
        return "only one of its weight and bias is sharded"
    weight, mesh = own["weight"], own["weight"].device_mesh
    if weight.device.type != mesh.device_type:  # CPUOffloadPolicy
        return f"its weight is on {weight.device}, its mesh has {mesh.device_type}s"
    info = managed.get(weight)
    if info is None and mesh.ndim > 1:
        return "its weight is a DTensor on a mesh of several dimensions, without fully_shard"
    if getattr(info, "dp_mesh_dims", None) is not None:
        return "fully_shard was applied to it with dp_mesh_dims="
    data = 0 if info is None else info.mesh.ndim
    if not _are_served(weight, data):
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


def row_shards(matrix: Any) -> Shards | None:
    """Return the shards of a matrix that processes divide by rows; None if they divide it otherwise.

    Args:
        matrix: a DTensor.
    """
    placements = matrix.placements
    if any(_is_strided(each) or _dimension(each) not in (None, 0) for each in placements):
        return None
    divided = tuple(i for i, each in enumerate(placements) if _dimension(each) == 0)
    return Shards(matrix.device_mesh, divided, divided, matrix.shape[0], {"weight": matrix})


def _are_served(weight: Any, data: int) -> bool:
    """Return True if a weight is divided in a way that has a local problem.

    Args:
        weight: the weight.
        data: number of dimensions of the mesh that are those of ``fully_shard``.
    """
    first, rest = weight.placements[:data], weight.placements[data:]
    by_rows = all(each.is_replicate() or _dimension(each) == 0 for each in first)
    dimensions = (0, 1) if weight.dim() == 2 else (0,)  # convolutions: rows only
    known = all(each.is_replicate() or _dimension(each) in dimensions for each in rest)
    return by_rows and known and len(rest) <= 1


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
