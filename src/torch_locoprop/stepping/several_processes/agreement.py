"""The exchange of facts between processes before they solve their layers' problems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch_locoprop.distributed import ddp, fully_shard
from torch_locoprop.distributed.averaging import Averaging
from torch_locoprop.distributed.ddp import LayerFacts
from torch_locoprop.distributed.fully_shard import NO_GRADIENT, ShardFacts
from torch_locoprop.recording import row_reduction
from torch_locoprop.recording.layer_record import LayerRecord


def agree(
    averaging: Averaging,
    layers: Sequence[LayerRecord],
    trained: Collection[LayerRecord],
    count_terms: Callable[[], float],
) -> float:
    """Exchange what the processes know about their layers, and set ``shared_facts`` of each layer.

    Args:
        averaging: the processes of DDP, if there are some.
        layers: all layers with a local problem, the same in every process.
        trained: the layers that this step moves.
        count_terms: returns the number of terms that this process's loss sums.

    Returns:
        The mean number of terms over the processes.

    Raises:
        RuntimeError: if a sharded layer has a gradient in some processes only.
    """
    sharded = [layer for layer in layers if layer.shards is not None]
    if averaging.has_joined:
        terms = 0.0
    else:
        terms = _agree_on_shards(sharded, count_terms) if sharded else count_terms()
    if averaging.is_alone:
        for layer in trained:  # a step inside no_sync(): each process has a problem of its own
            layer.shared_facts = None
    elif averaging.processes is not None:
        own = list(trained)
        device = own[0].given[0].device
        given = None if averaging.has_joined else terms
        known = [_facts(layer) for layer in own]
        by_all = averaging.divides_by_all
        found, terms = ddp.agree(averaging.processes, known, given, device, by_all=by_all)
        for layer, facts in zip(own, found, strict=True):
            layer.shared_facts = facts
    return terms


def _agree_on_shards(layers: Sequence[LayerRecord], count_terms: Callable[[], float]) -> float:
    """Exchange what the processes know about sharded layers, for each mesh of processes."""
    terms = count_terms()
    by_mesh: dict[Any, list[LayerRecord]] = {}
    for layer in layers:
        if layer.shards is not None:
            by_mesh.setdefault(layer.shards.mesh, []).append(layer)
    for own in by_mesh.values():
        mean = _exchange(own, terms)
        while mean is None:
            mean = _exchange(own, count_terms())
        terms = mean
    return terms


def _exchange(layers: Sequence[LayerRecord], terms: float) -> float | None:
    """Exchange what the processes of a mesh know about their layers.

    Returns:
        The mean of ``terms``; None if a process has changed which of its calls count, because the
        processes disagreed on it, and must tell the others.

    Raises:
        RuntimeError: if a layer has a gradient in some processes only.
    """
    shards = [layer.shards for layer in layers if layer.shards is not None]
    known = [_shard_facts(layer) for layer in layers]
    shared, mean = fully_shard.agree(shards, known, terms, layers[0].given[0].device)
    settled = True
    for layer, facts in zip(layers, shared, strict=True):
        layer.shared_facts = facts
        first, last = min(facts.begins), max(facts.begins)
        if first == last:
            continue
        if first == NO_GRADIENT:
            raise RuntimeError(
                f"Layer {layer.name!r} has a gradient in some processes and none in others, so "
                "they cannot solve its local problem together. Let every process call the layer "
                "in each step, if need be with an empty batch."
            )
        layer.begin_record(first)  # gradients that were zero in all processes, not only in some
        settled = False
    return mean if settled else None


def _facts(layer: LayerRecord) -> LayerFacts:
    """Return what this process tells the others about a layer before its problem is solved."""
    # A process without a batch can take part where it has had batches before.
    empty = layer.empty_call
    has_joined = empty is not None and any(call is empty for call in layer.calls)
    has_rows = layer.has_rows or (has_joined and not layer.obstacle)
    kept = row_reduction.kept_rows(layer)
    shapes = "" if layer.kind.linear_map.holds_rows else str([call.x.shape for call in layer.calls])
    return LayerFacts(layer.row_count, kept, has_rows, layer.has_gram, _role(layer), shapes)


def _shard_facts(layer: LayerRecord) -> ShardFacts:
    """Return what this process tells the others about a sharded layer."""
    begins = layer.sharded.begins if layer.with_gradient else NO_GRADIENT
    rows, kept = layer.row_count, row_reduction.kept_rows(layer)
    return ShardFacts(begins, rows, kept, layer.has_rows, layer.has_gram, _role(layer))


def _role(layer: LayerRecord) -> str:
    """Return a text that is equal in all processes that detected the same role of a layer."""
    name = None if layer.transfer is None else layer.transfer.name
    return f"{name} {layer.is_output}"
