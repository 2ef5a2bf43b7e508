"""The exchange of facts between processes before they solve their layers' problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_locoprop.distributed import ddp
from torch_locoprop.recording.layer_record import LayerRecord


def agree(processes: Any, layers: Sequence[LayerRecord], terms: float) -> float:
    """Exchange what the processes know about their layers, and set ``shared_facts`` of each layer.

    Args:
        processes: the process group.
        layers: the layers that this step moves, the same in every process.
        terms: number of terms that this process's loss sums.

    Returns:
        The mean of ``terms`` over the processes.
    """
    device = layers[0].given[0].device
    found, terms = ddp.agree(processes, [layer.facts for layer in layers], terms, device)
    for layer, facts in zip(layers, found, strict=True):
        layer.shared_facts = facts
    return terms
