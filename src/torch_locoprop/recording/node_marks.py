"""Marks on autograd nodes: which node computes a layer's pre-activation, and what follows it.

A :class:`Mark` in the ``metadata`` of a node lives as long as the autograd graph. The search that marks
the nodes after a layer is in ``transfer_detection.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording.backward_pass import running_node

KEY = "torch_locoprop"


@dataclass(eq=False)
class Mark:
    """The facts about one autograd node that the search has found."""

    operation: str  # a description for notes
    transfer: Transfer | None = None  # the transfer that the node computes
    consumers: list[Mark] = field(default_factory=list)  # operations that use the node's output
    width: int = 0  # the size of the output's last dimension
    has_parameters: bool = False  # a parameter enters the operation
    inside_loss: bool = False  # the operation is a part of one of PyTorch's losses
    is_layer: bool = False  # the node computes a layer's pre-activation
    gradient: Tensor | None = None  # ∂L/∂(output of this node), if it is recorded


LAYER_INPUT = Mark("a layer")
MODEL_OUTPUT = Mark("the model's output")

# Nodes that only reshape, copy or convert their input and keep the order of its elements.
_TRANSPARENT = {
    f"{name}Backward{i}"
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "ToCopy", "Clone"),
    )
    for i in range(5)
}

# Nodes that return their inputs: of a module's backward hooks, of fully_shard, and of DTensors.
_HOOKS = {
    *("BackwardHookFunctionBackward", "RegisterPostBackwardFunctionBackward"),
    *("_FromTorchTensorBackward", "_ToTorchTensorBackward", "RedistributeBackward"),
}


def matmul_node(node: Node) -> Node:
    """Return the node that computes a layer's pre-activation, before any reshapes of its output."""
    while is_transparent(node) and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def is_transparent(node: Node) -> bool:
    """Return True if a node keeps its input's elements: a reshape or copy, or a module's hook."""
    name = node.name()
    hooked = name in _HOOKS and len(node.next_functions) == 1
    return name in _TRANSPARENT or hooked


def mark_layer(node: Node) -> Mark:
    """Return the mark of the node of a layer's pre-activation, where every search ends.

    Two optimizers on one model share the mark.
    """
    notes = node_notes(node)
    mark = notes.get(KEY)
    if mark is None or not mark.is_layer:
        notes[KEY] = mark = Mark("a layer's output", is_layer=True)
    return mark


def running_mark() -> Mark | None:
    """Return the mark of the autograd node whose backward is running; None if it has none."""
    node = running_node()
    return None if node is None else node_notes(node).get(KEY)


def node_notes(node: Any) -> dict[str, Mark]:
    """Return the marks in a node's metadata (PyTorch's stubs declare this property as a method)."""
    notes: dict[str, Mark] = node.metadata
    return notes
