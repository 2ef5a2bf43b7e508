"""Decides what each layer gets: the transfer that follows it, and the variant that serves it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch_locoprop.config.settings import unknown
from torch_locoprop.paper import transfers
from torch_locoprop.paper.transfers import NON_MONOTONE, Transfer
from torch_locoprop.recording import transfer_detection
from torch_locoprop.recording.call import Call, CompiledGraph
from torch_locoprop.recording.layer_record import LayerRecord

if TYPE_CHECKING:
    from torch_locoprop.recording.hooks import ModelHooks

COMPILED_APART = "compiled apart from what follows it: name its transfer in transfers="
COMPILED = "compiled: ∂L/∂y counts as zero where the transfer is flat"
IN_PIECES = "compiled in pieces: labels are drawn by hooks, which break the graph at every layer"
INSIDE_LOSS = "its transfer is inside the loss: pass output_transfer= or loss_fn="
NESTED = "its inputs are nested tensors: it takes BackProp steps"
NOT_CALLED = "its forward is not called: it takes BackProp steps"
USED_ELSEWHERE = "its weight is used outside of its forward too: it takes BackProp steps"


def check_mapping(transfers: object) -> None:
    """Raise ``TypeError`` unless ``transfers=`` is a mapping or None."""
    if transfers is not None and not isinstance(transfers, Mapping):
        raise TypeError(
            "transfers= takes a dictionary from the names of modules to transfers, not "
            f"{type(transfers).__name__}."
        )


def decide_all(
    layers: Sequence[LayerRecord],
    hooks: ModelHooks,
    output_transfer: Transfer | None,
    loss_transfer: Transfer | None,
) -> list[LayerRecord]:
    """Decide every layer that has recorded calls and was not decided before; return these layers.

    Args:
        layers: all layers with a local problem.
        hooks: the hooks that recorded the calls.
        output_transfer: the transfer inside the loss, as the user gave it.
        loss_transfer: the transfer inside the loss, as ``loss_fn`` shows it.
    """
    undecided = [layer for layer in layers if layer.calls and not layer.decided]
    in_parts = bool(undecided) and compiled_in_parts(layers, hooks.graphs)
    for layer in undecided:
        decide(layer, output_transfer, loss_transfer, in_parts, hooks.leaves)
    return undecided


def give_transfers(layers: Iterable[LayerRecord], given: Mapping[str, str | Transfer]) -> None:
    """Set the transfers the user named, by module name."""
    by_name = {layer.name: layer for layer in layers}
    for name, transfer in given.items():
        if name not in by_name:
            raise ValueError(unknown("module in transfers=", name, by_name))
        layer = by_name[name]
        layer.explicit = True
        if isinstance(transfer, str) and transfer.lower() in NON_MONOTONE:
            layer.note = f"{transfer} is not monotone: it has no matching loss"
        else:
            layer.transfer = transfers.get(transfer)


def compiled_in_parts(layers: Iterable[LayerRecord], graphs: Iterable[CompiledGraph]) -> bool:
    """Whether layers are called in several compiled graphs, or some in one and some in none.

    Graphs of the same layers are one model, compiled anew for inputs of another shape. ``graphs``
    are those known to call a layer of the model, served or not.
    """
    calls = [call.compiled for layer in layers for call in layer.calls]
    known = {*graphs, *(call.graph for call in calls if call is not None)}
    apart = {frozenset(map(id, graph.layers)) for graph in known}
    return len(apart) > 1 or (len(apart) == 1 and None in calls)


def decide(
    layer: LayerRecord,
    output_transfer: Transfer | None,
    loss_transfer: Transfer | None,
    in_parts: bool = False,
    leaves: Collection[int] = (),
) -> None:
    """Settle, from its recorded calls, whether a layer is the output, and its transfer.

    A transfer that the user gave stays, and one that was found in the model is not inside the loss:
    ``output_transfer`` goes to layers whose own output the model returns. Where a model is compiled
    ``in_parts``, what lies beyond the end of a part is not known. A layer whose weight is among the
    ``leaves`` of operations outside of layers has no local problem: its rows are not all there is.
    """
    if not all(call.traced for call in layer.calls):
        if any(call.recomputed for call in layer.calls):
            layer.decided = True
            layer.note = (
                layer.note or "recomputed in the backward pass, where its transfer is hidden"
            )
        return
    compiled = (call.compiled for call in layer.calls if call.compiled is not None)
    if id(layer.tensors["weight"]) in leaves or any(c.graph.uses(layer.module) for c in compiled):
        layer.obstacle = layer.obstacle or USED_ELSEWHERE
    findings = layer.findings()
    at_the_end = all(finding.is_output for finding in findings)
    unknown_end = at_the_end and any(_hides_the_end(call, in_parts) for call in layer.calls)
    layer.is_output = at_the_end and not unknown_end
    layer.decided = True
    layer.compiled |= any(call.compiled is not None for call in layer.calls)
    if layer.explicit:
        return
    if unknown_end and findings[0].inside_loss:
        layer.note = COMPILED_APART
        return
    inside_loss = all(finding.inside_loss for finding in findings)
    if inside_loss and output_transfer is not None:
        _set_output_transfer(layer, output_transfer)
        return
    found = {finding.transfer for finding in findings}
    if len(found) > 1:
        layer.note = "called with different transfers"
        return
    layer.transfer, layer.note = found.pop(), findings[0].reason
    if layer.transfer is None and inside_loss:
        if loss_transfer is None:
            layer.note = layer.note or INSIDE_LOSS
        else:
            _set_output_transfer(layer, loss_transfer)


def _hides_the_end(call: Call, in_parts: bool) -> bool:
    """Whether what a call's output is used for may lie beyond the end of a compiled graph."""
    if call.compiled is None:
        return in_parts and not call.mark.consumers
    graph = call.compiled.graph
    if graph.whole:
        return False
    if call.beyond is not None and graph.complete:
        return not transfer_detection.is_last(call.beyond)
    return in_parts or not graph.complete


def _set_output_transfer(layer: LayerRecord, transfer: Transfer) -> None:
    if transfer.elementwise or layer.width > 1:
        layer.transfer, layer.note = transfer, ""
    else:
        layer.note = "softmax over one feature is constant"
