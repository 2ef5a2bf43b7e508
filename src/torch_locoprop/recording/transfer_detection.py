"""Finds the transfer that follows a layer in the autograd graph of an ordinary forward pass.

Autograd links each operation to its inputs, so the search runs backwards: from the input of every
layer, from the model's output and, if it is known, from the loss. Each operation found is noted as a
consumer of its inputs. If a layer's output has one consumer and that is a known activation, this is the
layer's transfer. A layer that feeds another layer directly is linear.

Marks on the autograd nodes (``node_marks.py``) keep the findings. Which transfer a single node computes
is read in ``node_transfers.py``. Which transfer a layer gets in the end, after the user's settings, is
decided in ``transfer_assignment.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.autograd.graph import Node

from torch_locoprop.paper import transfers
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording.function_transforms import is_batched
from torch_locoprop.recording.node_marks import (
    KEY,
    LAYER_INPUT,
    MODEL_OUTPUT,
    Mark,
    is_transparent,
    node_notes,
)
from torch_locoprop.recording.node_transfers import INSIDE_LOSS, describe, output_shape, transfer_of


@dataclass(frozen=True)
class Finding:
    """The transfer that follows one call of a layer, or why there is none."""

    transfer: Transfer | None
    reason: str  # why there is no transfer
    is_output: bool  # the model ends in this pre-activation, or in its transfer
    consumer: Mark | None = None  # the operation that computes the transfer
    inside_loss: bool = False  # the model returns this pre-activation: the transfer is in the loss


# Nodes of matrix products and convolutions.
_PRODUCTS = {
    f"{name}Backward0"
    for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Addmv", "Linear", "Convolution")
}
_LARGEST_WEIGHT = 50  # nodes in the autograd graph of a computed weight

_COMPILED = "followed by CompiledFunction"


def trace(
    tensor: Tensor,
    sink: Mark,
    record_gradients: bool = False,
    adds_one: Callable[[Node], bool] | None = None,
) -> set[int]:
    """Search from a tensor back to the layers it was computed from, and mark the nodes between.

    Args:
        tensor: where the search starts.
        sink: what consumes the tensor: :data:`LAYER_INPUT` or :data:`MODEL_OUTPUT`.
        record_gradients: record ∂L/∂(output) of each marked operation in later backward passes.
        adds_one: see :func:`~.node_transfers.transfer_of`.

    Returns:
        The ids of the leaves that were found outside of layers.
    """
    leaves = {id(tensor)} if tensor.grad_fn is None and tensor.requires_grad else set()
    stack: list[tuple[Node | None, Mark]] = [(tensor.grad_fn, sink)]
    while stack:
        node, consumer = stack.pop()
        if node is None:
            continue
        if not node.next_functions:
            if consumer.operation != _COMPILED:  # the leaves of a compiled graph enter its layers
                leaves.add(id(getattr(node, "variable", None)))
            continue
        mark = node_notes(node).get(KEY)
        if mark is not None:
            if consumer not in mark.consumers:
                mark.consumers.append(consumer)
            continue
        if not is_transparent(node):
            consumer = _mark_operation(node, consumer, record_gradients, adds_one)
        stack += [(below, consumer) for below in _inputs(node, consumer)]
    return leaves


def resolve(mark: Mark, width: int) -> Finding:
    """Return what the searches have found about one call of a layer.

    Args:
        mark: the mark of the call's node.
        width: number of features of the layer; 0 if they are not in the output's last dimension.
    """
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
    """Return True if only a loss uses the output of a node."""
    in_loss = all(consumer.inside_loss for consumer in mark.consumers)
    return not _reaches_layer(mark) and (in_loss or MODEL_OUTPUT in mark.consumers)


def _mark_operation(
    node: Node, consumer: Mark, record_gradients: bool, adds_one: Callable[[Node], bool] | None
) -> Mark:
    """Return the new mark of a node that is no layer."""
    name = node.name()
    shape = output_shape(node)
    mark = Mark(
        describe(node),
        transfer_of(node, adds_one),
        [consumer],
        width=shape[-1] if shape else 0,
        has_parameters=_has_parameters(node),
        inside_loss=name in INSIDE_LOSS,
    )
    node_notes(node)[KEY] = mark
    if record_gradients and name not in INSIDE_LOSS:
        node.register_prehook(_recorder(mark))
    return mark


def _has_parameters(node: Node) -> bool:
    """Return True if a parameter enters a node: a leaf, or a weight that is computed from leaves.

    A weight may be computed, as ``F.normalize(W)`` in a cosine head is. What is computed from inputs of
    the model that have gradients counts only if it is a factor of a matrix product.
    """
    inputs = [below for below, _ in node.next_functions if below is not None]
    kinds = Tensor if node.name() in _PRODUCTS else nn.Parameter
    return any(_is_leaf(below) or _is_computed_weight(below, kinds) for below in inputs)


def _is_leaf(node: Node) -> bool:
    return node.name().endswith("AccumulateGrad")


def _is_computed_weight(node: Node, kinds: type[Tensor]) -> bool:
    """Return True if a few operations compute a node's output from leaves and from no layer.

    Args:
        node: the node.
        kinds: kinds of leaves that count.
    """
    stack, seen, leaves = [node], set(), 0
    while stack:
        below = stack.pop()
        if below in seen:
            continue
        seen.add(below)
        mark = node_notes(below).get(KEY)
        if len(seen) > _LARGEST_WEIGHT or (mark is not None and mark.is_layer):
            return False
        leaves += _is_leaf(below) and isinstance(getattr(below, "variable", None), kinds)
        stack += [function for function, _ in below.next_functions if function is not None]
    return leaves > 0


def _recorder(mark: Mark) -> Callable[[tuple[Tensor, ...]], None]:
    """Return a hook that keeps a node's output gradient in its mark."""

    def record(gradients: tuple[Tensor, ...]) -> None:
        g = gradients[0]
        if g is not None and not is_batched(g):
            mark.gradient = g.detach()

    return record


def _inputs(node: Node, consumer: Mark) -> Iterator[Node | None]:
    """Yield the nodes to search next; for softsign only its numerator, so that it is one operation."""
    below = [function for function, _ in node.next_functions]
    yield from below[:1] if consumer.transfer == transfers.Softsign() else below


def _reaches_layer(mark: Mark) -> bool:
    """Return True if a layer, or another operation with parameters, follows a node."""
    seen, stack = set(), list(mark.consumers)
    while stack:
        consumer = stack.pop()
        if consumer is LAYER_INPUT or consumer.has_parameters:
            return True
        if id(consumer) not in seen:
            seen.add(id(consumer))
            stack += consumer.consumers
    return False
