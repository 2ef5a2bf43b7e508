"""The exchange of facts between processes before they solve their layers' problems."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch_locoprop.distributed import ddp, fully_shard
from torch_locoprop.recording.hooks import ModelHooks
from torch_locoprop.recording.layer_record import LayerRecord


def agree(
    hooks: ModelHooks,
    layers: Sequence[LayerRecord],
    trained: Collection[LayerRecord],
    terms: float,
) -> float:
    """Exchange what the processes know about their layers, and set ``shared_facts`` of each layer.

    Args:
        hooks: the hooks on the model, which know the processes of DDP.
        layers: all layers with a local problem, the same in every process.
        trained: the layers that this step moves.
        terms: number of terms that this process's loss sums.

    Returns:
        The mean of ``terms`` over the processes.

    Raises:
        RuntimeError: if a sharded layer has a gradient in some processes only.
    """
    sharded = [layer for layer in layers if layer.shards is not None]
    if sharded:
        terms = _agree_on_shards(sharded, terms)
    if hooks.processes is not None and not hooks.averaged:
        for layer in trained:  # a step inside no_sync(): each process has a problem of its own
            layer.shared_facts = None
    elif hooks.processes is not None:
        own = list(trained)
        device = own[0].given[0].device
        found, terms = ddp.agree(hooks.processes, [layer.facts for layer in own], terms, device)
        for layer, facts in zip(own, found, strict=True):
            layer.shared_facts = facts
    return terms


def _agree_on_shards(layers: Sequence[LayerRecord], terms: float) -> float:
    """Exchange what the processes know about sharded layers, for each mesh of processes."""
    kinds = {(x.shards.mesh, x.shards.same_inputs): None for x in layers if x.shards is not None}
    for mesh, same_inputs in kinds:
        own = [
            layer
            for layer in layers
            if layer.shards is not None
            and (layer.shards.mesh, layer.shards.same_inputs) == (mesh, same_inputs)
        ]
        device = own[0].given[0].device
        known = [layer.shard_facts for layer in own]
        shared, terms = fully_shard.agree(mesh, known, terms, device, same_inputs=same_inputs)
        for layer, facts in zip(own, shared, strict=True):
            if not facts.agreed:
                raise RuntimeError(
                    f"Layer {layer.name!r} has a gradient in some processes and none in others, so "
                    "they cannot solve its local problem together. Let every process call the layer "
                    "in each step, if need be with an empty batch."
                )
            layer.shared_facts = facts
    return terms
