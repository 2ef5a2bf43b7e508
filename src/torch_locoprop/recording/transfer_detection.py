"""Finds the transfer that follows a layer in the autograd graph of an ordinary forward pass.

Autograd links each operation to its inputs, so the search runs backwards: from the input of every
layer, from the model's output and, if it is known, from the loss. Each operation found is noted as a
consumer of its inputs. If a layer's output has one consumer and that is a known activation, this is the
layer's transfer. A layer that feeds another layer directly is linear.

Marks on the autograd nodes (``node_marks.py``) keep the findings. Which transfer a layer gets in the
end, after the user's settings, is decided in ``transfer_assignment.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from torch_locoprop.paper import transfers
from torch_locoprop.paper.tensors import has_values
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording.node_marks import (
    KEY,
    LAYER_INPUT,
    MODEL_OUTPUT,
    Mark,
    is_transparent,
    node_notes,
)


@dataclass(frozen=True)
class Finding:
    """The transfer that follows one call of a layer, or why there is none."""

    transfer: Transfer | None
    reason: str  # why there is no transfer
    is_output: bool  # the model ends in this pre-activation, or in its transfer
    consumer: Mark | None = None  # the operation that computes the transfer
    inside_loss: bool = False  # the model returns this pre-activation: the transfer is in the loss


_ACTIVATIONS: dict[str, Callable[[Any], Transfer | None]] = {
    "TanhBackward0": lambda node: transfers.Tanh(),
    "SigmoidBackward0": lambda node: transfers.Sigmoid(),
    "ReluBackward0": lambda node: transfers.ReLU(),
    "AtanBackward0": lambda node: transfers.Arctan(),
    "LogSigmoidBackward0": lambda node: transfers.LogSigmoid(),
    "SoftplusBackward0": lambda node: _softplus(node),
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
_ACTIVATIONS |= {  # in-place versions with names of their own
    f"{name}Backward1": _ACTIVATIONS[f"{name}Backward0"] for name in ("LeakyRelu", "Elu", "Celu")
}

# Transfers inside a loss: their output and its gradient have no node in the autograd graph.
_INSIDE_LOSS: dict[str, Callable[[Any], Transfer | None]] = {
    "BinaryCrossEntropyWithLogitsBackward0": lambda node: transfers.Sigmoid(),
    "LogSoftmaxBackward0": lambda node: _softmax(node),
    "MseLossBackward0": lambda node: transfers.Linear(),
}

_SOFTPLUS_THRESHOLD = 20  # PyTorch's default

# Nodes of matrix products and convolutions.
_PRODUCTS = {
    f"{name}Backward0"
    for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Addmv", "Linear", "Convolution")
}
_LARGEST_WEIGHT = 50  # nodes in the autograd graph of a computed weight

_COMPILED = "followed by CompiledFunction"
_NON_MONOTONE = {"GeluBackward0", "SiluBackward0", "MishBackward0", "HardswishBackward0"}


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
        adds_one: returns True for a division ``a / (c + |a|)`` with c = 1; None reads the values that
            autograd has saved.

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
            consumer = _mark_operation(node, consumer, record_gradients, adds_one or _adds_one)
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
    node: Node, consumer: Mark, record_gradients: bool, adds_one: Callable[[Node], bool]
) -> Mark:
    """Return the new mark of a node that is no layer."""
    name = node.name()
    shape = _shape(node)
    mark = Mark(
        _describe(node),
        transfers.Softsign() if _is_softsign(node, adds_one) else _transfer_of(node),
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
    """Return the transfer that a node computes; None if it is no known, monotone transfer."""
    known = _ACTIVATIONS.get(node.name()) or _INSIDE_LOSS.get(node.name())
    try:
        return known(node) if known else None
    except ValueError:  # with these parameters the function decreases somewhere
        return None


def _has_parameters(node: Node) -> bool:
    """Return True if a parameter enters a node: a leaf, transposed or not, or a computed weight.

    A weight that is computed, as ``F.normalize(W)`` in a cosine head is, is looked for in products.
    """
    inputs = [below for below, _ in node.next_functions if below is not None]
    if node.name() in _PRODUCTS and any(map(_is_computed_weight, inputs)):
        return True
    for below in inputs:
        leaf = below.next_functions[0][0] if below.name() == "TBackward0" else below
        if leaf is not None and leaf.name().endswith("AccumulateGrad"):
            return True
    return False


def _is_computed_weight(node: Node) -> bool:
    """Return True if a few operations compute a node's output from leaves and from no layer."""
    stack, seen, leaves = [node], set(), 0
    while stack:
        below = stack.pop()
        if below in seen:
            continue
        seen.add(below)
        mark = node_notes(below).get(KEY)
        if len(seen) > _LARGEST_WEIGHT or (mark is not None and mark.is_layer):
            return False
        leaves += below.name().endswith("AccumulateGrad")
        stack += [function for function, _ in below.next_functions if function is not None]
    return leaves > 0


def _shape(node: Any) -> list[int]:
    """Return the shape of a node's output; empty for nested tensors or if it is not known."""
    known = node._input_metadata
    return list(known[0].shape) if known and not known[0].is_nested_tensor else []


def _recorder(mark: Mark) -> Callable[[tuple[Tensor, ...]], None]:
    """Return a hook that keeps a node's output gradient in its mark."""

    def record(gradients: tuple[Tensor, ...]) -> None:
        if gradients[0] is not None:
            mark.gradient = gradients[0].detach()

    return record


def _inputs(node: Node, consumer: Mark) -> Iterator[Node | None]:
    """Yield the nodes to search next; for softsign only its numerator, so that it is one operation."""
    below = [function for function, _ in node.next_functions]
    yield from below[:1] if consumer.transfer == transfers.Softsign() else below


def _describe(node: Node) -> str:
    """Return a description of a node's operation for notes."""
    name = node.name()
    if name in _NON_MONOTONE:
        return f"{name.removesuffix('Backward0').lower()} is not monotone: it has no matching loss"
    if name == "SoftplusBackward0" and _softplus(node) is None:
        return (
            f"softplus with a threshold below {_SOFTPLUS_THRESHOLD} is not monotone: it has no "
            "matching loss"
        )
    if name == "PowBackward0" and getattr(node, "_saved_exponent", None) == 2:
        return "square"
    short = name.rsplit("::", 1)[-1].rstrip("0123456789").removesuffix("Backward")
    return f"followed by {short}"


def _is_softsign(node: Node, adds_one: Callable[[Node], bool]) -> bool:
    """Return True if a node is the division in ``a / (1 + |a|)``, as PyTorch computes softsign."""
    if node.name() != "DivBackward0":
        return False
    numerator, denominator = (function for function, _ in node.next_functions)
    if denominator is None or denominator.name() != "AddBackward0":
        return False
    terms = [function for function, _ in denominator.next_functions]
    magnitudes = [term for term in terms if term is not None]  # a constant has no node
    return (
        len(magnitudes) == 1
        and magnitudes[0].name() == "AbsBackward0"
        and magnitudes[0].next_functions[0][0] is numerator
        and adds_one(node)
    )


def _adds_one(division: Any) -> bool:
    """Return True if a division's saved denominator is ``1 + |a|``; False if that cannot be seen.

    Autograd does not save the constant itself. Hooks on saved tensors are not called: those of
    checkpointing would compute the whole block again.
    """
    saved = division._raw_saved_self, division._raw_saved_other
    if any(each.unpack_hook is not None for each in saved):
        return False
    a, denominator = division._saved_self.detach(), division._saved_other.detach()
    if not has_values(denominator) or denominator.numel() == 0:
        return False
    expected = 1 + a.abs()
    return bool(((denominator == expected) | expected.isnan()).all())


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


def _softplus(node: Any) -> Transfer | None:
    """Return softplus if its jump at the threshold, ``exp(−threshold)``, is a rounding error."""
    if node._saved_threshold < _SOFTPLUS_THRESHOLD:
        return None
    return transfers.Softplus(float(node._saved_beta))


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
    """Return softmax if a node computes it over the last dimension; otherwise None."""
    dimension, rank = node._saved_dim, len(_shape(node))
    # Autograd stores the dimension as an unsigned number: -1 may be 2**64 - 1.
    return transfers.Softmax() if dimension in (rank - 1, 2**64 - 1, -1) else None
