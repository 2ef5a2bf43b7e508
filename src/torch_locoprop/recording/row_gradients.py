"""The gradients of a layer's rows, read from its recorded calls: ∂L/∂a and ∂L/∂y.

What is recorded of a call is decided in ``hooks.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_locoprop.recording.call import Call
from torch_locoprop.recording.row_reduction import rows_per_kept_row

if TYPE_CHECKING:
    from torch_locoprop.recording.layer_record import LayerRecord


def gradients(layer: LayerRecord) -> Tensor | None:
    """Return ∂L/∂a ``[rows, d]``, if it was recorded for all calls."""
    return _joined(layer, [call.g for call in layer.calls])


def weighted_gradients(layer: LayerRecord) -> Tensor | None:
    """Return ∂L/∂a ``[rows, d]`` for sums of squares over rows.

    If ``max_rows`` has dropped rows and XᵀX is kept, each row is scaled so that its square counts
    for the rows it replaces, as in XᵀX. If rows are kept, ``row_weight`` counts them and the result
    is that of :func:`gradients`.
    """
    if all(call.gram is None for call in layer.calls):
        return gradients(layer)
    scales = [rows_per_kept_row(layer, call) ** 0.5 for call in layer.calls]
    pairs = zip(scales, (call.g for call in layer.calls), strict=True)
    return _joined(layer, [None if g is None else scale * g for scale, g in pairs])


def has_v(layer: LayerRecord, call: Call) -> bool:
    """Return True if ∂L/∂y of a call was recorded at the output of the layer's own transfer."""
    return call.v is not None and call.v_transfer == layer.transfer


def post_gradients(layer: LayerRecord) -> Tensor | None:
    """Return ∂L/∂y ``[rows, d]``; None if it was not recorded for all calls."""
    return _joined(layer, [call.v if has_v(layer, call) else None for call in layer.calls])


def pulled_back(layer: LayerRecord, a: Tensor) -> Tensor | None:
    """Return ∂L/∂y ``[rows, d]``, computed from ∂L/∂a for the calls where it was not recorded.

    Args:
        a: the pre-activations ``[rows, d]``.

    Returns:
        ∂L/∂y; None if the layer has no transfer, or a call has neither gradient.
    """
    recorded = [call.v if has_v(layer, call) else call.g for call in layer.calls]
    rows = _joined(layer, recorded)
    if rows is None or layer.transfer is None:
        return None
    v = layer.transfer.pull_back(a, rows)
    sizes = [layer.kind.rows(t).shape[-2] for t in recorded if t is not None]
    parts = zip(layer.calls, torch.split(v, sizes, -2), torch.split(rows, sizes, -2), strict=True)
    for call, pulled, own in parts:
        if has_v(layer, call):
            pulled.copy_(own)
    return v


def sampled(layer: LayerRecord) -> Tensor | None:
    """Return ∂L/∂a ``[rows, d]`` for labels drawn from the model; None if none were drawn."""
    return _joined(layer, [call.sampled for call in layer.calls])


def _joined(layer: LayerRecord, tensors: list[Tensor | None]) -> Tensor | None:
    """Return the rows of all tensors as ``[rows, d]``; None if there are none or one is None."""
    dtype = layer.tensors["weight"].dtype
    rows = [layer.kind.rows(t).to(dtype) for t in tensors if t is not None]
    if not rows or len(rows) < len(tensors):
        return None
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-2)
