"""Reduces the rows of a recorded call to what the next step needs: all, some, XᵀX, or none.

What a step needs is decided in ``stepping/method.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_locoprop.fast import dispatch
from torch_locoprop.paper.gram import FULL, Gram, RowUse, saves_work
from torch_locoprop.paper.structured_gram import ReducedGram
from torch_locoprop.paper.tensors import seeded
from torch_locoprop.recording.call import Call

if TYPE_CHECKING:
    from torch_locoprop.recording.layer_record import LayerRecord

# In an ordinary loop on a GPU, XᵀX is computed outside of the step's CUDA graph, which costs extra
# launches. That is worthwhile only if XᵀX is at least this many times smaller than the rows.
MIN_SAVING_ON_GPU = 4


def gram_is_better(use: RowUse, x: Tensor, like: Tensor, rows: int) -> bool:
    """Return True if XᵀX takes less memory than x, and no more work than the rows.

    Args:
        use: what the step needs of the rows.
        x: the input that would be kept otherwise, perhaps with some of the rows only. The work is
            compared for all rows, so that keeping fewer rows never takes more memory than keeping all.
        like: the weight as a matrix ``[..., d, n]``.
        rows: number of rows of the call.
    """
    d, n = like.shape[-2:]
    entries = like.numel() // max(d, 1) * (n + 1)
    if use.structure != FULL:
        columns = n + use.structure.ones
        entries = like.shape[:-2].numel() * prod(use.structure.shape(columns))
    if use.precise and like.device.type == "mps":  # Apple's GPUs have no float64
        return False
    size = entries * use.dtype(like).itemsize
    saving = MIN_SAVING_ON_GPU if dispatch.is_launched_alone(like) else 1
    if size * saving >= x.numel() * x.element_size():
        return False
    needed = use.square or use.structure != FULL
    return needed or saves_work(rows, d, n, use.gradients)


def condensed(layer: LayerRecord, call: Call, use: RowUse | None) -> Call:
    """Return the call with what the next step needs of it.

    What is kept is nothing, XᵀX if :func:`gram_is_better`, or at most ``max_rows`` of the rows.

    Args:
        layer: the record of the layer.
        call: one of its calls.
        use: what the step needs of the rows; None: possibly all of them.
    """
    no_rows = use is not None and not use.is_any
    if call.sampled is not None or not no_rows:
        call = _subsampled(layer, call)
    if use is None or call.x.numel() == 0:
        return call
    like = layer.like
    if no_rows:
        return call.without_inputs(like, layer.rows_of(call))
    if call.is_overwritten or (layer.shards is not None and layer.shards.divides_features):
        return call
    matrix = layer.kind.matrix("weight", like)
    if not gram_is_better(use, call.x, matrix, layer.rows_of(call)):
        return call
    with layer.in_own_precision():
        gram = gram_of_call(layer, call, use)
    return call._replace(x=like.new_empty(0), gram=gram, version=None, samples=None, a=None)


def gram_of_calls(layer: LayerRecord, calls: Iterable[Call], use: RowUse) -> Gram:
    """Return XᵀX of the rows of some calls, of which none was reduced to XᵀX."""
    first, *rest = (gram_of_call(layer, call, use) for call in calls)
    return sum(rest, first)


def gram_of_call(layer: LayerRecord, call: Call, use: RowUse) -> Gram:
    """Return XᵀX of a call's rows; if rows were dropped, an estimate of it from the kept rows.

    Args:
        layer: the record of the layer.
        call: one of its calls, with its rows.
        use: the entries and the precision of XᵀX that the step needs.
    """
    linear_map, like, dtype = layer.kind.linear_map, layer.like, use.dtype(layer.like)
    if use.coarse and call.x.dtype == torch.bfloat16:  # converted as part of the products
        like = call.x.new_empty(()).expand(like.shape)
    x = layer.kind.collect([call.x], [call.shape], like)
    blocks = [x] if linear_map.holds_rows else linear_map.row_blocks(x)
    first, *rest = (
        dispatch.gram_in(block, dtype, coarse=use.coarse)
        if use.structure == FULL
        else ReducedGram.reduced(block.to(dtype), use.structure)
        for block in blocks
    )
    of_kept = sum(rest, first)
    if call.kept is None:
        return of_kept
    count = rows_per_kept_row(layer, call)
    return of_kept.times(count, layer.rows_of(call))


def rows_per_kept_row(layer: LayerRecord, call: Call) -> float:
    """Return how many rows of a call each kept row counts for: 1 if no rows were dropped."""
    return 1.0 if call.kept is None else layer.samples_of(call) / len(call.kept)


def kept_rows(layer: LayerRecord) -> int:
    """Return the number of rows of all calls that were kept."""
    return sum(
        layer.rows_of(call) // max(layer.samples_of(call), 1) * len(call.kept)
        if call.kept is not None
        else layer.rows_of(call)
        for call in layer.calls
    )


def row_weight(layer: LayerRecord, of_each: float) -> float | Tensor:
    """Return the weight of each row in the local loss.

    Args:
        layer: the record of the layer.
        of_each: the weight of a row that counts for itself alone.

    Returns:
        ``of_each`` if all rows were kept or if XᵀX was, which has the counts of its rows in it;
        otherwise ``[rows, 1]``, ``of_each`` times the number of rows that each kept row counts for.
    """
    in_rows = all(call.gram is None for call in layer.calls)
    if not in_rows or all(call.kept is None for call in layer.calls):
        return of_each
    parts = []
    for call in layer.calls:
        samples = layer.samples_of(call)
        kept = samples if call.kept is None else len(call.kept)
        rows = layer.rows_of(call) // max(samples, 1) * kept
        parts.append(layer.like.new_full((rows, 1), of_each * samples / max(kept, 1)))
    return torch.cat(parts)


def _subsampled(layer: LayerRecord, call: Call) -> Call:
    """Return the call with at most ``max_rows`` rows: random samples, at least one."""
    if layer.max_rows is None or call.kept is not None or call.x.layout != torch.strided:
        return call
    samples = layer.samples_of(call)
    keep = max(layer.max_rows // max(layer.kind.positions(call.shape), 1), 1)
    if samples <= keep:
        return call
    seed, device = layer.row_seed + len(layer.calls), call.x.device
    order = layer.orders.get((seed, samples, device))
    if order is None:
        order = torch.randperm(samples, generator=seeded(device, seed), device=device)
        layer.orders[seed, samples, device] = order
    return call.subsampled(layer.kind, order[:keep])
