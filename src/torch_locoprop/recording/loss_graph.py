"""Reads from the autograd graph of a loss whether it sums or averages its terms, and how many it sums.

PyTorch's losses save their reduction in their autograd nodes. A sum or mean that is written out, such
as ``(output - y).square().sum()``, has a node of its own. Shapes are read from nodes, because saved
tensors are gone after a backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from torch_locoprop.recording.node_marks import KEY, MODEL_OUTPUT, is_transparent, node_notes
from torch_locoprop.recording.node_transfers import output_shape, softmax_dimension

_MEAN, _SUM = 1, 2  # the values of a reduction in PyTorch's autograd nodes
_WRITTEN_OUT = {"SumBackward": _SUM, "MeanBackward": _MEAN}
_BY_ROW = ("NllLoss", "MultiMargin", "MultilabelMargin")  # losses with a term for each row
# What happened to a node's output on its way to the loss.
_UNCHANGED, _MULTIPLIED, _CHANGED = range(3)
# Operations that leave a sum one. PyTorch's own code alone multiplies by MulBackward1: label smoothing
# adds shares of two sums over the same rows.
_SIGNED_SUMS = ("AddBackward0", "SubBackward0", "NegBackward0", "MulBackward1")


class LossFacts(NamedTuple):
    """The facts about the terms of a loss that its autograd graph shows."""

    sums: bool | None  # True: it sums its terms; False: it averages or divides; None: not known
    by_row: bool | None  # True: a term for each row; False: for each element; None: not known
    terms: int | None = None  # how many terms it sums, if one sum is all of it

    def of_any_size(self, shape: Sequence[int]) -> LossFacts:
        """Return the facts that also hold for outputs of other sizes than ``shape``."""
        by_row = self.by_row
        if self.terms is not None:
            sizes = {math.prod(shape): False, math.prod(shape[:-1]): True}
            by_row = self.by_row or sizes.get(self.terms)
        return LossFacts(self.sums, by_row)

    def completed(self, given: LossFacts | None) -> LossFacts:
        """Return these facts of the trained loss, with the user's facts in place of unknown ones."""
        if given is None or self.sums is None:
            return given or self
        return self if self.by_row is not None else self._replace(by_row=given.by_row)


class _Reduction(NamedTuple):
    """A node that sums or averages the terms of a loss."""

    kind: int  # _MEAN or _SUM
    by_row: bool | None
    terms: int | None  # None for a sum that is multiplied afterwards

    def after(self, change: int) -> _Reduction:
        """Return what is known of the reduction if its result was changed on its way to the loss."""
        if self.kind == _MEAN or change == _UNCHANGED:
            return self
        if change == _MULTIPLIED:
            return _Reduction(_SUM, None, None)
        return self._replace(kind=_MEAN)


def inspect_loss(loss: Tensor) -> LossFacts:
    """Return what the autograd graph of a loss tells about its terms.

    A sum that is divided afterwards counts as a mean, because the autograd graph does not keep the
    divisor. A sum that is multiplied counts as a sum of an unknown number of terms. Sums that are
    written out count if none of PyTorch's losses is there, because they may be penalties.
    """
    own, written_out = [], []
    seen: set[tuple[Node, int]] = set()
    stack = [(loss.grad_fn, _UNCHANGED)]
    while stack:
        node, change = stack.pop()
        if node is None or (node, change) in seen or _is_layer(node):
            continue
        seen.add((node, change))
        kind = getattr(node, "_saved_reduction", None)
        if kind is not None:
            if kind in (_MEAN, _SUM):
                own.append(_reduction(node, kind).after(change))
            continue
        kind = _written_out(node)
        if kind is not None and _reaches_layer(node):
            written_out.append(_written_reduction(node, kind).after(change))
        if node.name() == "MulBackward0":
            change = max(change, _MULTIPLIED)
        elif node.name() not in _SIGNED_SUMS and not is_transparent(node):
            change = _CHANGED
        stack += [(below, change) for below, _ in node.next_functions]
    return _facts(own or written_out)


def _facts(found: list[_Reduction]) -> LossFacts:
    """Return what all reductions of a loss have in common."""
    kinds, by_row = {each.kind for each in found}, {each.by_row for each in found}
    sums = None if len(kinds) != 1 else _SUM in kinds
    terms = found[0].terms if len(found) == 1 else None
    if len(by_row) == 1:
        return LossFacts(sums, by_row.pop(), terms)
    return LossFacts(sums, None if sums else False, terms)


def _reduction(node: Node, kind: int) -> _Reduction:
    """Return the reduction of one of PyTorch's losses; losses of class labels count rows.

    A sum with class weights counts as one of an unknown number of terms: the labels, which tell it, are
    gone after the backward pass.
    """
    by_row = node.name().startswith(_BY_ROW)
    if kind == _SUM and by_row and _has_class_weights(node):
        return _Reduction(kind, None, None)
    below = node.next_functions[0][0]
    shape = [] if below is None else output_shape(below)
    features = shape[min(1, len(shape) - 1)] if by_row and shape else 1
    terms = math.prod(shape) // max(features, 1) if shape else None
    return _Reduction(kind, by_row, terms)


def _has_class_weights(node: Any) -> bool:
    """Return True if a loss of classes has a weight for each."""
    try:
        return getattr(node, "_saved_weight", None) is not None
    except RuntimeError:  # there was one: only saved tensors are gone after a backward pass
        return True


def _written_reduction(node: Any, kind: int) -> _Reduction:
    """Return the reduction of a node that sums or averages what is computed from a model's output.

    A cross-entropy that is written out, ``-(y * log_softmax(a)).sum()``, has a term for each row.
    """
    terms = math.prod(node._saved_self_sym_sizes)
    for below in _below(node):
        if below.name() == "LogSoftmaxBackward0":
            shape = output_shape(below)
            rows = math.prod(shape) // max(shape[softmax_dimension(below)], 1)
            return _Reduction(kind, True, min(terms, rows))
    return _Reduction(kind, None, terms)


def _written_out(node: Node) -> int | None:
    """Return the kind of a node that sums or averages all elements of a tensor; otherwise None."""
    kind = _WRITTEN_OUT.get(node.name().rstrip("01"))
    return kind if not output_shape(node) else None


def _is_layer(node: Node) -> bool:
    return node_notes(node).get(KEY, MODEL_OUTPUT).is_layer


def _reaches_layer(node: Node) -> bool:
    """Return True if a node's output is computed from that of a layer: it is no penalty on weights."""
    return any(map(_is_layer, _below(node)))


def _below(node: Node) -> Iterator[Node]:
    """Yield the nodes that a node's output is computed from, up to the layers before it."""
    seen, stack = set(), [node]
    while stack:
        for below, _ in stack.pop().next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                yield below
                if not _is_layer(below):
                    stack.append(below)
