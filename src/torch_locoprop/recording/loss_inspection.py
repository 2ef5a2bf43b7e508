"""What a loss says about the output layer: the transfer inside it, and whether it sums its terms."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

from torch_locoprop.paper import transfers
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording.transfer_detection import (
    KEY,
    MODEL_OUTPUT,
    is_transparent,
    node_notes,
)

_MEAN, _SUM = 1, 2  # reductions as PyTorch's losses save them

_LOSS_TRANSFERS = {
    "BCEWithLogitsLoss": "sigmoid",
    "binary_cross_entropy_with_logits": "sigmoid",
    "CrossEntropyLoss": "softmax",
    "cross_entropy": "softmax",
    "MSELoss": "linear",
    "mse_loss": "linear",
    # Losses of models that end in their transfer.
    "BCELoss": None,
    "binary_cross_entropy": None,
    "NLLLoss": None,
    "nll_loss": None,
}


def transfer_inside(loss_fn: object) -> Transfer | None:
    """Return the transfer inside one of PyTorch's losses, a module or a function; None if it has none.

    Raises:
        ValueError: if the loss is not one of those that are known.
    """
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if name not in _LOSS_TRANSFERS:
        raise ValueError(
            f"The transfer inside loss_fn={name} is not known. Pass output_transfer= (sigmoid, "
            f"softmax or linear) instead, or none where the model itself ends in its transfer. "
            f"Known losses: {', '.join(_LOSS_TRANSFERS)}."
        )
    known = _LOSS_TRANSFERS[name]
    return None if known is None else transfers.get(known)


def sums_terms(loss: Tensor) -> bool | None:
    """Return whether a loss sums its terms instead of averaging them; None if its graph leaves it open.

    A sum that is changed afterwards, such as divided by the number of terms, may be a mean.
    """
    found: set[object] = set()
    seen: set[tuple[Node, bool]] = set()
    stack = [(loss.grad_fn, True)]  # and whether it enters the loss unchanged
    while stack:
        node, plain = stack.pop()
        if (
            node is None
            or (node, plain) in seen
            or node_notes(node).get(KEY, MODEL_OUTPUT).is_layer
        ):
            continue
        seen.add((node, plain))
        reduction = getattr(node, "_saved_reduction", None)
        if reduction is None:
            plain = plain and (
                node.name() in ("AddBackward0", "SubBackward0") or is_transparent(node)
            )
            stack += [(below, plain) for below, _ in node.next_functions]
        else:
            found.add(reduction if plain or reduction == _MEAN else None)
    return None if len(found) != 1 or not found <= {_MEAN, _SUM} else _SUM in found
