"""Models that are stages of a pipeline (``torch.distributed.pipelining``).

The processes of a pipeline have different layers, and each solves the problems of its own. A schedule
runs several forward passes before their backward passes. It averages the gradients of a stage under
``DistributedDataParallel`` or ``fully_shard`` once, in or after the last of them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import distributed, nn

from torch_locoprop.distributed.live_objects import instances


@dataclass(frozen=True)
class Pipeline:
    """The facts about pipeline stages that contain the layers of a model."""

    is_used: bool  # all of the layers belong to stages
    has_all_processes: bool  # the stages take all processes: no two have the same layers


def pipeline_of(layers: Collection[nn.Module]) -> Pipeline:
    """Return the facts about the pipeline stages that contain the layers.

    All objects of this process are searched for stages, so keep the result.
    """
    stages = _stages()
    inside = {module for stage in stages for module in stage.submod.modules()}
    is_used = bool(stages) and inside.issuperset(layers)
    sizes = {stage.group_size for stage in stages}
    return Pipeline(is_used, is_used and sizes == {distributed.get_world_size()})


def _stages() -> list[Any]:
    """Return the stages of pipelines that this process has."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    return [] if module is None else instances(module._PipelineStageBase)
