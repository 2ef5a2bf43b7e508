"""Reads two facts from a loss: the transfer inside it, and whether it sums or averages its terms.

Transfers inside the model are found by ``transfer_detection.py``.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from torch_locoprop.paper import transfers
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording.node_marks import (
    KEY,
    MODEL_OUTPUT,
    is_transparent,
    node_notes,
)

_MEAN, _SUM = 1, 2  # the values of a reduction in PyTorch's autograd nodes

_OF_CLASSES = ("CrossEntropyLoss", "cross_entropy", "NLLLoss", "nll_loss")
_LOSS_TRANSFERS = {
    "BCEWithLogitsLoss": "sigmoid",
    "binary_cross_entropy_with_logits": "sigmoid",
    "CrossEntropyLoss": "softmax",
    "cross_entropy": "softmax",
    "MSELoss": "linear",
    "mse_loss": "linear",
    # These losses contain no transfer: the model itself ends in it.
    "BCELoss": None,
    "binary_cross_entropy": None,
    "NLLLoss": None,
    "nll_loss": None,
}


def transfer_inside(loss_fn: object) -> Transfer | None:
    """Return the transfer inside one of PyTorch's losses; None if the loss contains no transfer.

    Args:
        loss_fn: a loss module such as ``nn.CrossEntropyLoss()``, or a function such as
            ``F.cross_entropy``.

    Raises:
        ValueError: if the loss is unknown.
    """
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if name not in _LOSS_TRANSFERS:
        raise ValueError(
            f"The transfer inside loss_fn={name} is not known. Pass output_transfer= (sigmoid, "
            f"softmax or linear) instead, or neither if the model itself ends in its transfer. "
            f"Known losses: {', '.join(_LOSS_TRANSFERS)}."
        )
    known = _LOSS_TRANSFERS[name]
    return None if known is None else transfers.get(known)


class LossFacts(NamedTuple):
    """What the autograd graph of a loss tells about its terms."""

    sums: bool | None  # True: it sums its terms; False: it averages them; None: not known
    by_row: bool  # one term for each row, as the losses of classes have


def facts_of(loss_fn: object) -> LossFacts:
    """Return what is known about the terms of one of the losses of :func:`transfer_inside`."""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    return LossFacts(getattr(loss_fn, "reduction", "") == "sum", name in _OF_CLASSES)


def inspect_loss(loss: Tensor) -> LossFacts:
    """Return what the autograd graph of a loss tells about its terms.

    A sum that is changed afterwards, for example divided by the number of terms, may be a mean: its
    autograd graph does not tell.
    """
    found: set[object] = set()
    names: set[str] = set()
    seen: set[tuple[Node, bool]] = set()
    stack = [(loss.grad_fn, True)]  # nodes; True if the node's output enters the loss unchanged
    while stack:
        node, unchanged = stack.pop()
        if (
            node is None
            or (node, unchanged) in seen
            or node_notes(node).get(KEY, MODEL_OUTPUT).is_layer
        ):
            continue
        seen.add((node, unchanged))
        reduction = getattr(node, "_saved_reduction", None)
        if reduction is None:
            unchanged = unchanged and (
                node.name() in ("AddBackward0", "SubBackward0") or is_transparent(node)
            )
            stack += [(below, unchanged) for below, _ in node.next_functions]
        else:
            found.add(reduction if unchanged or reduction == _MEAN else None)
            names.add(node.name())
    sums = None if len(found) != 1 or not found <= {_MEAN, _SUM} else _SUM in found
    by_row = bool(names) and all(name.startswith("NllLoss") for name in names)
    mixed = not by_row and any(name.startswith("NllLoss") for name in names)
    return LossFacts(None if mixed and sums else sums, by_row)
