"""Finds the transfer that follows a layer, from the autograd graph of an ordinary forward pass.

Autograd links each operation to its inputs, so the search runs backwards: from the input of every
layer, from the model's output and, where it is known, from the loss. Each operation met on the way is
remembered as a consumer of what it was computed from. A layer whose output has one consumer, and that
one a known activation, has that transfer; a layer that feeds another layer directly is linear.

The findings are kept as :class:`Mark` in the nodes' own ``metadata`` and so live as long as the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torch_locoprop.paper import transfers
from torch_locoprop.paper.transfers import Transfer

KEY = "torch_locoprop"


@dataclass(eq=False)
class Mark:
    """What is known of one node: its operation, the transfer it computes, and who consumes it."""

    operation: str
    transfer: Transfer | None = None
    consumers: list[Mark] = field(default_factory=list)
    width: int = 0  # the last dimension of its output
    has_parameters: bool = False
    inside_loss: bool = False
    is_layer: bool = False
    gradient: Tensor | None = None  # ∂L/∂(output of this node), recorded on request


LAYER_INPUT = Mark("a layer")
MODEL_OUTPUT = Mark("the model's output")


@dataclass(frozen=True)
class Finding:
    """The transfer that follows a layer, or why it has none."""

    transfer: Transfer | None
    reason: str
    is_output: bool  # its pre-activation or transfer is what the model ends in
    consumer: Mark | None = None
    inside_loss: bool = False  # the layer's own output is what the model returns, at its end


# Nodes that only rearrange or convert what they are given, keeping the order of its elements.
_TRANSPARENT = {
    f"{name}Backward{i}"
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "ToCopy", "Clone"),
    )
    for i in range(5)
}

_ACTIVATIONS: dict[str, Callable[[Any], Transfer | None]] = {
    "TanhBackward0": lambda node: transfers.Tanh(),
    "SigmoidBackward0": lambda node: transfers.Sigmoid(),
    "ReluBackward0": lambda node: transfers.ReLU(),
    "AtanBackward0": lambda node: transfers.Arctan(),
    "LogSigmoidBackward0": lambda node: transfers.LogSigmoid(),
    "SoftplusBackward0": lambda node: transfers.Softplus(float(node._saved_beta)),
    "LeakyReluBackward0": lambda node: transfers.LeakyReLU(float(node._saved_negative_slope)),
    "EluBackward0": lambda node: _elu(
        float(node._saved_alpha), float(node._saved_scale), float(node._saved_input_scale)
    ),
    "CeluBackward0": lambda node: transfers.CELU(float(node._saved_alpha)),
    "HardtanhBackward0": lambda node: _clamp(node._saved_min_val, node._saved_max_val),
    "ClampBackward1": lambda node: _clamp(node._saved_min, node._saved_max),
    "ClampMinBackward0": lambda node: _clamp(node._saved_min, None),
    "SoftmaxBackward0": lambda node: _softmax(node),
}
_ACTIVATIONS |= {  # what these are called when done in place; the others keep their name
    f"{name}Backward1": _ACTIVATIONS[f"{name}Backward0"] for name in ("LeakyRelu", "Elu", "Celu")
}

# Transfers that are part of the loss: their own output, and its gradient, never appear in the graph.
_INSIDE_LOSS: dict[str, Callable[[Any], Transfer | None]] = {
    "BinaryCrossEntropyWithLogitsBackward0": lambda node: transfers.Sigmoid(),
    "LogSoftmaxBackward0": lambda node: _softmax(node),
    "MseLossBackward0": lambda node: transfers.Linear(),
}

_COMPILED = "followed by CompiledFunction"
_NON_MONOTONE = {"GeluBackward0", "SiluBackward0", "MishBackward0", "HardswishBackward0"}


def matmul_node(node: Node) -> Node:
    """The node that computes a layer's pre-activation, below the reshapes of its output."""
    while is_transparent(node) and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def is_transparent(node: Node) -> bool:
    """Whether a node keeps the elements it is given: rearranged, or passed by a module's hooks."""
    name = node.name()
    hooked = name == "BackwardHookFunctionBackward" and len(node.next_functions) == 1
    return name in _TRANSPARENT or hooked


def mark_layer(node: Node) -> Mark:
    """Mark the node of a layer's pre-activation, where every search ends.

    Two optimizers on one model share the mark.
    """
    notes = node_notes(node)
    mark = notes.get(KEY)
    if mark is None or not mark.is_layer:
        notes[KEY] = mark = Mark("a layer's output", is_layer=True)
    return mark


def running_mark() -> Mark | None:
    """What is known of the node whose backward runs now."""
    node = torch._C._current_autograd_node()
    return None if node is None else node_notes(node).get(KEY)


def trace(tensor: Tensor, sink: Mark, record_gradients: bool = False) -> set[int]:
    """Search from ``tensor``, consumed by ``sink``, back to the layers it was computed from.

    Returns the ids of the leaves that were met outside of layers.
    """
    leaves = {id(tensor)} if tensor.grad_fn is None and tensor.requires_grad else set()
    stack: list[tuple[Node | None, Mark]] = [(tensor.grad_fn, sink)]
    while stack:
        node, consumer = stack.pop()
        if node is None:
            continue
        if not node.next_functions:
            if consumer.operation != _COMPILED:  # whose layers are inside
                leaves.add(id(getattr(node, "variable", None)))
            continue
        mark = node_notes(node).get(KEY)
        if mark is not None:
            if consumer not in mark.consumers:
                mark.consumers.append(consumer)
            continue
        if not is_transparent(node):
            consumer = _mark_operation(node, consumer, record_gradients)
        stack += [(below, consumer) for below in _inputs(node, consumer)]
    return leaves


def resolve(mark: Mark, width: int) -> Finding:
    """What the traces say of one call of a layer that has ``width`` features."""
    is_output = not _reaches_layer(mark)
    consumers = [c for c in mark.consumers if c is not MODEL_OUTPUT]
    if not consumers:
        return Finding(None, "", is_output=True, inside_loss=True)
    inside_loss = is_output and MODEL_OUTPUT in mark.consumers
    if len(consumers) > 1:
        names = ", ".join(sorted(c.operation for c in consumers))
        reason = f"its output feeds several operations ({names})"
        return Finding(None, reason, inside_loss, inside_loss=inside_loss)
    consumer = consumers[0]
    if consumer is LAYER_INPUT:
        return Finding(transfers.Linear(), "", is_output)
    if consumer.transfer == transfers.ReLU() and [c.operation for c in consumer.consumers] == [
        "square"
    ]:
        return Finding(transfers.SquaredReLU(), "", is_output, consumer.consumers[0], inside_loss)
    transfer = consumer.transfer
    if transfer is None or (consumer.inside_loss and not is_output):
        return Finding(None, consumer.operation, inside_loss, inside_loss=inside_loss)
    if not transfer.elementwise and (width == 1 or consumer.width != width):
        reason = "its softmax is not over the layer's features"
        return Finding(None, reason, is_output, inside_loss=inside_loss)
    return Finding(transfer, "", is_output, consumer, inside_loss)


def is_last(mark: Mark) -> bool:
    """Whether nothing follows but a loss."""
    in_loss = all(consumer.inside_loss for consumer in mark.consumers)
    return not _reaches_layer(mark) and (in_loss or MODEL_OUTPUT in mark.consumers)


def _mark_operation(node: Node, consumer: Mark, record_gradients: bool) -> Mark:
    name = node.name()
    shape = _shape(node)
    mark = Mark(
        _describe(node),
        _transfer_of(node),
        [consumer],
        width=shape[-1] if shape else 0,
        has_parameters=_has_parameters(node),
        inside_loss=name in _INSIDE_LOSS,
    )
    node_notes(node)[KEY] = mark
    if record_gradients and name not in _INSIDE_LOSS:
        node.register_prehook(_recorder(mark))
    return mark


def _transfer_of(node: Node) -> Transfer | None:
    """The transfer a node computes; None if it is none, or not one of those that do not decrease."""
    if _is_softsign(node):
        return transfers.Softsign()
    known = _ACTIVATIONS.get(node.name()) or _INSIDE_LOSS.get(node.name())
    try:
        return known(node) if known else None
    except ValueError:  # parameters that make it decrease somewhere
        return None


def _has_parameters(node: Node) -> bool:
    """Whether a leaf that requires a gradient enters here, perhaps transposed."""
    for below, _ in node.next_functions:
        if below is not None and below.name() == "TBackward0":
            below = below.next_functions[0][0]
        if below is not None and below.name().endswith("AccumulateGrad"):
            return True
    return False


def _shape(node: Any) -> list[int]:
    """The shape of what a node computes; empty where it is not one of plain numbers."""
    known = node._input_metadata
    return list(known[0].shape) if known and not known[0].is_nested_tensor else []


def node_notes(node: Any) -> dict[str, Mark]:
    """The node's own dictionary, which PyTorch declares as a method and keeps as a property."""
    notes: dict[str, Mark] = node.metadata
    return notes


def _recorder(mark: Mark) -> Callable[[tuple[Tensor, ...]], None]:
    def record(gradients: tuple[Tensor, ...]) -> None:
        if gradients[0] is not None:
            mark.gradient = gradients[0].detach()

    return record


def _inputs(node: Node, consumer: Mark) -> Iterator[Node | None]:
    """Where to search on; the pattern of softsign counts as one operation on its numerator."""
    below = [function for function, _ in node.next_functions]
    yield from below[:1] if consumer.transfer == transfers.Softsign() else below


def _describe(node: Node) -> str:
    name = node.name()
    if name in _NON_MONOTONE:
        return f"{name.removesuffix('Backward0').lower()} is not monotone: it has no matching loss"
    if name == "PowBackward0" and getattr(node, "_saved_exponent", None) == 2:
        return "square"
    short = name.rsplit("::", 1)[-1].rstrip("0123456789").removesuffix("Backward")
    return f"followed by {short}"


def _is_softsign(node: Node) -> bool:
    """``a / (1 + |a|)``, which PyTorch computes from elementary operations."""
    if node.name() != "DivBackward0":
        return False
    numerator, denominator = (function for function, _ in node.next_functions)
    if denominator is None or denominator.name() != "AddBackward0":
        return False
    absolute = denominator.next_functions[0][0]
    return (
        absolute is not None
        and absolute.name() == "AbsBackward0"
        and absolute.next_functions[0][0] is numerator
    )


def _reaches_layer(mark: Mark) -> bool:
    seen, stack = set(), list(mark.consumers)
    while stack:
        consumer = stack.pop()
        if consumer is LAYER_INPUT or consumer.has_parameters:
            return True
        if id(consumer) not in seen:
            seen.add(id(consumer))
            stack += consumer.consumers
    return False


def _elu(alpha: float, scale: float, input_scale: float) -> Transfer:
    selu = transfers.SELU()
    if (alpha, scale, input_scale) == (selu.alpha, selu.scale, selu.input_scale):
        return selu
    return transfers.ELU(alpha, scale, input_scale)


def _clamp(low: float | None, high: float | None) -> Transfer | None:
    if low is None:
        return None
    if high is None:
        return transfers.ReLU() if low == 0 else None
    clamp = transfers.Hardtanh(float(low), float(high))
    return transfers.ReLU6() if clamp.domain == transfers.ReLU6().domain else clamp


def _softmax(node: Any) -> Transfer | None:
    """Softmax over the last dimension only; autograd stores the dimension as an unsigned number."""
    dimension, rank = node._saved_dim, len(_shape(node))
    return transfers.Softmax() if dimension in (rank - 1, 2**64 - 1, -1) else None
