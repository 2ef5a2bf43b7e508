"""Decides the transfer of each layer, and whether the layer is the model's output.

The search of the autograd graph is in ``transfer_detection.py``. The notes below appear in
``opt.summary()``.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from torch_locoprop.paper import transfers
from torch_locoprop.paper.names import unknown
from torch_locoprop.paper.transfers import NON_MONOTONE, Transfer
from torch_locoprop.recording import transfer_detection
from torch_locoprop.recording.call import Call, CompiledGraph
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.loss_inputs import LossInputs
from torch_locoprop.recording.loss_inspection import GivenLoss

if TYPE_CHECKING:
    from torch_locoprop.recording.hooks import ModelHooks

COMPILED_APART = "compiled apart from what follows it: name its transfer in transfers="
COMPILED = "compiled: ∂L/∂y counts as zero where the transfer is flat"
IN_PIECES = "compiled in pieces: labels are drawn by hooks, which break the graph at every layer"
DIVIDED = "its inputs are divided among processes: it takes BackProp steps"
INSIDE_LOSS = "its transfer is inside the loss: pass output_transfer= or loss_fn="
NONE_IN_LOSS = "no known transfer is inside loss_fn="
CHANGED = "loss_fn= is not called with its output as it is: its transfer is not known"
CHANGED_LATER = "its transfer has changed since the first step"
NESTED = "its inputs are nested tensors: it takes BackProp steps"
NOT_CALLED = "its forward is not called: it takes BackProp steps"
NOT_REACHED = "no backward pass goes through its output: it takes BackProp steps"
USED_ELSEWHERE = "its weight or bias is used outside of its forward too: it takes BackProp steps"


def decide_all(
    layers: Sequence[LayerRecord], hooks: ModelHooks, loss: GivenLoss, inputs: LossInputs
) -> list[LayerRecord]:
    """Assign a transfer to every layer that has recorded calls and was not decided before.

    Args:
        layers: all layers with a local problem.
        hooks: the hooks that recorded the calls.
        loss: what the user has told about the loss.
        inputs: the layers whose outputs the loss was called with.

    Returns:
        The layers that were not decided before.
    """
    undecided = [layer for layer in layers if layer.calls and not layer.decided]
    in_parts = bool(undecided) and compiled_in_parts(layers, hooks.compiled_graphs)
    for layer in undecided:
        lacks = loss.transfer is not None and inputs.lack(layer)
        of_loss = None if lacks else loss.transfer
        assign_transfer(layer, loss.output_transfer, of_loss, in_parts, hooks.search.leaves)
        if layer.note == INSIDE_LOSS and lacks:
            layer.note = CHANGED
        if layer.note == INSIDE_LOSS and loss.was_unseen:
            layer.note = NONE_IN_LOSS
    return undecided


def look_again(layers: Iterable[LayerRecord], leaves: Collection[int]) -> None:
    """Notice that a layer has another transfer than before, or that its tensors are used elsewhere.

    Args:
        layers: all layers with a local problem, with the calls of this step.
        leaves: ids of leaves used by operations outside of layers.
    """
    for layer in layers:
        searched = all(call.searched and not call.recomputed for call in layer.calls)
        if not (layer.calls and layer.decided and searched) or layer.compiled or layer.obstacle:
            continue
        if not leaves_of(layer).isdisjoint(leaves):
            layer.obstacle = USED_ELSEWHERE
        findings = layer.findings()
        if layer.explicit or all(found.inside_loss for found in findings):
            continue
        known = {found.transfer for found in findings}
        if layer.transfer is not None and known != {layer.transfer}:
            layer.transfer, layer.note = None, CHANGED_LATER


def leaves_of(layer: LayerRecord) -> set[int]:
    """Return the ids of a layer's parameters, by which they are known in the autograd graph."""
    return {id(p) for p in layer.tensors.values()} | layer.unsharded


def seen_loss(
    layers: Sequence[LayerRecord], loss: GivenLoss, output_shape: Sequence[int] | None
) -> GivenLoss:
    """Return the loss with what its autograd graph tells for the output of the model.

    Args:
        layers: all layers with a local problem, with the calls of this step.
        loss: what the user has told about the loss.
        output_shape: the shape of the model's output. If no layer's output is the model's, the loss
            tells its reduction, but its transfer is no layer's. None if the shape is not known.
    """
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the labels, which are made up
        for layer in layers:
            if _is_searched(layer) and all(found.inside_loss for found in layer.findings()):
                return loss.looked_at(layer.calls[0].shape, layer.tensors["weight"].detach())
        if output_shape:
            seen = loss.looked_at(output_shape, layers[0].tensors["weight"].detach())
            return loss._replace(facts=seen.facts, unseen=None)
    return loss._replace(unseen=None)


def contradiction(layers: Iterable[LayerRecord], loss: GivenLoss) -> str:
    """Return how the loss that was trained contradicts what the user told; empty if it does not.

    Args:
        layers: all layers with a local problem, with the calls of this step.
        loss: what the user has told about the loss.
    """
    given = loss.known_transfer
    if given is None:
        return ""
    argument = "loss_fn=" if loss.output_transfer is None else "output_transfer="
    for layer in layers:
        if not _is_searched(layer) or layer.explicit:
            continue
        for found in layer.findings():
            of_loss = found.consumer is not None and found.consumer.inside_loss
            if of_loss and found.inside_loss and found.transfer not in (None, given):
                return (
                    f"The loss that is trained has the transfer {found.transfer.name!r} inside, and "
                    f"{argument} says {given.name!r}. Pass the loss that is trained as loss_fn=, or "
                    "neither: with step(closure) it is detected automatically."
                )
    return ""


def _is_searched(layer: LayerRecord) -> bool:
    """Return True if the autograd graph behind a layer that is not decided yet was searched."""
    return bool(layer.calls) and not layer.decided and all(call.searched for call in layer.calls)


def give_transfers(layers: Iterable[LayerRecord], given: Mapping[str, str | Transfer]) -> None:
    """Set the transfers that the user passed as ``transfers=``.

    Args:
        layers: all layers with a local problem.
        given: a transfer, or its name, by the name of the module.

    Raises:
        ValueError: if a name is not that of a layer with a local problem.
    """
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
    """Return True if the layers are not all called in one compiled graph, nor all outside of any.

    Compiled graphs with the same layers count as one: a model is compiled again for other shapes.

    Args:
        layers: all layers with a local problem.
        graphs: the compiled graphs that call a layer of the model, with a local problem or without.
    """
    calls = [call.compiled for layer in layers for call in layer.calls]
    known = {*graphs, *(call.graph for call in calls if call is not None)}
    parts = {frozenset(map(id, graph.layers)) for graph in known}
    return len(parts) > 1 or (len(parts) == 1 and None in calls)


def assign_transfer(
    layer: LayerRecord,
    output_transfer: Transfer | None,
    loss_transfer: Transfer | None,
    in_parts: bool = False,
    leaves: Collection[int] = (),
) -> None:
    """Set a layer's ``transfer`` (or the ``note`` why it has none) and ``is_output`` from its calls.

    A transfer that the user gave for this layer is kept.

    Args:
        layer: the record of the layer, with recorded calls.
        output_transfer: the transfer inside the loss, as the user gave it. A layer gets it if the model
            returns the layer's own output: no transfer follows the layer inside the model.
        loss_transfer: the transfer inside the loss, as found in ``loss_fn``.
        in_parts: True if the model is compiled in parts. What follows the end of a part is not known.
        leaves: ids of leaves used by operations outside of layers. A layer whose weight or bias is one
            of them takes BackProp steps, because its rows do not explain all of its gradient.
    """
    if not all(call.searched for call in layer.calls):
        if any(call.recomputed for call in layer.calls):
            layer.decided = True
            layer.note = (
                layer.note or "recomputed in the backward pass, where its transfer is hidden"
            )
        return
    compiled = (call.compiled for call in layer.calls if call.compiled is not None)
    if not leaves_of(layer).isdisjoint(leaves) or any(
        call.graph.uses_elsewhere(layer.module) for call in compiled
    ):
        layer.obstacle = layer.obstacle or USED_ELSEWHERE
    findings = layer.findings()
    at_the_end = all(finding.is_output for finding in findings)
    unknown_end = at_the_end and any(_may_continue(call, in_parts) for call in layer.calls)
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


def _may_continue(call: Call, in_parts: bool) -> bool:
    """Return True if the model may use a call's output after the end of a compiled graph."""
    if call.compiled is None:
        return in_parts and not call.mark.consumers
    graph = call.compiled.graph
    if graph.returns_model_output:
        return False
    if call.graph_mark is not None and graph.outputs_searched:
        return not transfer_detection.is_last(call.graph_mark)
    return in_parts or not graph.outputs_searched


def _set_output_transfer(layer: LayerRecord, transfer: Transfer) -> None:
    """Set the transfer of an output layer, or a note if the layer is too narrow for softmax."""
    if transfer.elementwise or layer.width > 1:
        layer.transfer, layer.note = transfer, ""
    else:
        layer.note = "softmax over one feature is constant"
