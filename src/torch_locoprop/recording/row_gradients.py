"""The gradients of a layer's rows, ∂L/∂a and ∂L/∂y: which of them a call keeps, and how they are read.

Which of them a step needs is set in ``stepping/requirements.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_locoprop.recording import transfer_detection
from torch_locoprop.recording.call import Call
from torch_locoprop.recording.row_reduction import rows_per_kept_row

if TYPE_CHECKING:
    from torch_locoprop.recording.layer_record import LayerRecord


def with_row_gradients(call: Call, layer: LayerRecord, g: Tensor, *, several_passes: bool) -> Call:
    """Return a call with the gradients that the step needs of it.

    Args:
        call: the call, which a backward pass has reached.
        layer: the record of its layer.
        g: ∂L/∂a, in the shape of the layer's output.
        several_passes: other backward passes went, or may go, through the same autograd graph.
    """
    if "v" in layer.needs:
        call = _with_post_gradient(call, layer, g)
    # ∂L/∂y is computed from ∂L/∂a if it was not recorded in this pass, or may not be in another one.
    for_v = "v" in layer.needs and (several_passes or not has_v(layer, call))
    if "g" in layer.needs or for_v:
        call = call._replace(g=g)
    if "g_norm" in layer.needs:
        call = call._replace(g_norm=gradient_norm(g))
    return call


def _with_post_gradient(call: Call, layer: LayerRecord, g: Tensor) -> Call:
    """Return the call with ∂L/∂y, if this pass has recorded it at the output of the transfer."""
    finding = transfer_detection.resolve(call.mark, layer.last_width)
    consumer = finding.consumer
    if consumer is None or consumer.gradient is None:
        return call
    v, consumer.gradient = consumer.gradient.reshape(g.shape), None
    return call._replace(v=v, v_transfer=finding.transfer)


def gradient_norm(g: Tensor) -> Tensor:
    """Return the norm of ∂L/∂a, in float32 or wider."""
    norm: Tensor = torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
    return norm


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
