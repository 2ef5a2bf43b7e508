"""The searches of the autograd graph of one model: where they start and what they have found.

How a search goes from node to node is in ``transfer_detection.py``, and what the graph of a loss tells
in ``loss_graph.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from torch_locoprop.recording import transfer_detection
from torch_locoprop.recording.loss_graph import LossFacts, inspect_loss
from torch_locoprop.recording.node_marks import LAYER_INPUT, MODEL_OUTPUT, Mark
from torch_locoprop.recording.weak_hook import watchers


class GraphSearch:
    """Searches for the transfers behind layers, from the places where a search can start."""

    def __init__(self) -> None:
        self.is_on = True  # search in the next passes
        self.records_gradients = False  # record ∂L/∂y at the operations found
        self.leaves: set[int] = set()  # ids of leaves used by operations outside of layers
        self.output_shape: torch.Size | None = None  # shape of the model's output, if a tensor
        self.loss_facts = LossFacts(None, by_row=False)  # facts about the loss of a closure

    def from_inputs(self, inputs: Iterable[Tensor]) -> None:
        """Search from the inputs of a layer."""
        for tensor in inputs:
            self._from(tensor, LAYER_INPUT)

    def from_output(self, output: object) -> None:
        """Search from all tensors in what the model returns."""
        if isinstance(output, Tensor) and not output.is_nested:  # nested tensors have no shape
            self.output_shape = output.shape
        for tensor in sorted(_tensors(output), key=_is_scalar):
            self._from(tensor, MODEL_OUTPUT)

    def from_loss(self, loss: object) -> None:
        """Search the loss that a closure returned for the output's transfer and its reduction."""
        if not isinstance(loss, Tensor):
            return
        if self.loss_facts.sums is not False:
            found = inspect_loss(loss)
            known = self.loss_facts.sums is not None
            self.loss_facts = self.loss_facts._replace(terms=found.terms) if known else found
        if self.is_on:
            transfer_detection.trace(loss, MODEL_OUTPUT)

    def _from(self, tensor: Tensor, sink: Mark) -> None:
        """Search from a tensor backwards to the layers before it."""
        leaves = transfer_detection.trace(tensor, sink, self.records_gradients)
        if not _is_scalar(tensor):  # a scalar is a loss, which may have a penalty on weights
            # Other hooks on this model need these leaves: their searches end at marked nodes.
            for each in watchers():
                each.search.leaves |= leaves


def without_view(out: Tensor) -> Tensor:
    """Return an output in the same memory that is no view, so that in-place activations are found.

    A Linear with bias returns a view of its matrix product for inputs of more than two dimensions, and
    autograd hides an in-place operation on a view inside ``CopySlices``. No other code holds the base.
    """
    base = out._base
    if base is None or base.grad_fn is None or out.grad_fn is None:
        return out
    directly_above = out.grad_fn.name() == "ViewBackward0" and out.is_contiguous()
    if not directly_above or base.numel() != out.numel():
        return out
    return torch.ops.aten._unsafe_view.default(base, out.shape)  # type: ignore[no-any-return]


def _is_scalar(tensor: Tensor) -> bool:
    return tensor.dim() == 0


def _tensors(output: object, outer: tuple[object, ...] = ()) -> Iterator[Tensor]:
    """Yield all tensors in the output of a model.

    Args:
        output: what the model returns, or a part of it.
        outer: the containers that the part is in; none of them is searched again.
    """
    values: Iterable[object] = ()
    if isinstance(output, Tensor):
        yield output
    elif any(output is each for each in outer):
        return
    elif isinstance(output, dict):
        values = output.values()
    elif isinstance(output, (tuple, list)):
        values = output
    elif is_dataclass(output):
        slots = {field.name: getattr(output, field.name, None) for field in fields(output)}
        values = {**slots, **getattr(output, "__dict__", {})}.values()
    for value in values:
        yield from _tensors(value, (*outer, output))
