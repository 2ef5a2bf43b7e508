"""What several processes agree on before they solve their layers' problems together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_locoprop.distributed import ddp
from torch_locoprop.recording.layer_record import LayerRecord


def agree(processes: Any, layers: Sequence[LayerRecord], terms: float) -> float:
    """Set on all layers what all processes know of them; return the mean number of loss terms.

    Args:
        processes: the process group.
        layers: the layers that this step moves, the same in every process.
        terms: number of terms that this process's loss sums.
    """
    device = layers[0].given[0].device
    found, terms = ddp.agree(processes, [layer.facts for layer in layers], terms, device)
    for layer, together in zip(layers, found, strict=True):
        layer.together = together
    return terms
