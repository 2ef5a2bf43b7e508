"""Reads two facts from a loss: the transfer inside it, and whether it sums or averages its terms.

PyTorch's own losses are known by name; of other losses the autograd graph is read (``loss_graph.py``).
Transfers inside the model are found by ``transfer_detection.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from torch_locoprop.paper import transfers
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording import transfer_detection
from torch_locoprop.recording.loss_graph import LossFacts, inspect_loss
from torch_locoprop.recording.node_marks import MODEL_OUTPUT, mark_layer

_OF_CLASSES = ("CrossEntropyLoss", "cross_entropy", "NLLLoss", "nll_loss")
_LOSS_TRANSFERS = {
    "BCEWithLogitsLoss": "sigmoid",
    "binary_cross_entropy_with_logits": "sigmoid",
    "CrossEntropyLoss": "softmax",
    "cross_entropy": "softmax",
    "MSELoss": "linear",
    "mse_loss": "linear",
    # These losses contain no transfer: the model itself ends in the transfer.
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
    name = _known_name(loss_fn)
    if name is None:
        given = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise ValueError(
            f"The transfer inside loss_fn={given} is not known. Pass output_transfer= (sigmoid, "
            f"softmax or linear) instead, or neither if the model itself ends in its transfer. "
            f"Known losses: {', '.join(_LOSS_TRANSFERS)}."
        )
    known = _LOSS_TRANSFERS[name]
    return None if known is None else transfers.get(known)


def _known_name(loss_fn: object) -> str | None:
    """Return the name under which a loss is listed; None if its forward is not PyTorch's."""
    if not isinstance(loss_fn, nn.Module):
        name = getattr(loss_fn, "__name__", "")
        is_torchs = getattr(loss_fn, "__module__", None) == "torch.nn.functional"
        return name if is_torchs and name in _LOSS_TRANSFERS else None
    for name in _LOSS_TRANSFERS:
        base = getattr(nn, name, None)
        if base is not None and isinstance(loss_fn, base):
            return name if type(loss_fn).forward is base.forward else None
    return None


class GivenLoss(NamedTuple):
    """The facts about the loss that the user has given by ``output_transfer=`` and ``loss_fn=``."""

    output_transfer: Transfer | None = None  # as the user gave it
    transfer: Transfer | None = None  # read from loss_fn
    facts: LossFacts | None = None  # read from loss_fn
    unseen: Callable[..., Any] | None = (
        None  # loss_fn, until the first step has looked at its graph
    )
    was_unseen: bool = False  # the first step has looked at its graph

    @property
    def known_transfer(self) -> Transfer | None:
        """The transfer of the model's output, as far as it is known."""
        return self.output_transfer or self.transfer

    def looked_at(self, shape: Sequence[int], like: Tensor) -> GivenLoss:
        """Return these facts, completed by what the autograd graph of ``unseen`` tells."""
        if self.unseen is None:
            return self
        transfer, facts = look_at(self.unseen, shape, like)
        return self._replace(transfer=transfer, facts=facts, unseen=None, was_unseen=True)


OutputTransfer = Literal["linear", "sigmoid", "softmax"]  # the transfers inside PyTorch's losses


def given_loss(
    output_transfer: str | Transfer | None, loss_fn: Callable[..., Any] | None
) -> GivenLoss:
    """Return what ``output_transfer=`` and ``loss_fn=`` tell about the loss.

    Raises:
        TypeError: if ``loss_fn`` is not callable.
        ValueError: if the two contradict each other, or there is no such transfer.
    """
    output = None if output_transfer is None else transfers.get(output_transfer)
    if loss_fn is None:
        return GivenLoss(output)
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise TypeError(
            "loss_fn= takes the loss itself, a module such as nn.CrossEntropyLoss() or a function, "
            f"not {loss_fn!r}. The name of a transfer goes into output_transfer=."
        )
    name = _known_name(loss_fn)
    if name is None:
        return GivenLoss(output, unseen=loss_fn)
    inside = transfer_inside(loss_fn)
    if output is not None and inside is not None and output != inside:
        raise ValueError(
            f"output_transfer={output.name!r} contradicts loss_fn={name}, which has the transfer "
            f"{inside.name!r} inside. Leave output_transfer= out."
        )
    reduction = getattr(loss_fn, "reduction", "mean")
    if reduction == "none":  # the loop sums or averages
        return GivenLoss(output, inside)
    return GivenLoss(output, inside, LossFacts(reduction == "sum", name in _OF_CLASSES))


def warn_of_unusual(output_transfer: str | Transfer | None) -> None:
    """Warn if the transfer that ``output_transfer=`` names is inside none of PyTorch's losses."""
    usual = get_args(OutputTransfer)
    if isinstance(output_transfer, str) and transfers.get(output_transfer).name not in usual:
        warnings.warn(
            f"output_transfer={output_transfer!r}: no loss of PyTorch has this transfer inside; they "
            f"have {', '.join(usual)}. If it is the last module of the model, leave output_transfer= "
            "out: it is detected automatically.",
            stacklevel=3,
        )


def look_at(
    loss_fn: Callable[..., Any], shape: Sequence[int], like: Tensor
) -> tuple[Transfer | None, LossFacts | None]:
    """Return what the autograd graph of a loss tells: the transfer inside it, and its terms.

    The loss is called with zeros for the model's output, and with zeros of several shapes for the
    labels until a call succeeds.

    Args:
        loss_fn: the loss, a function of the model's output and of labels.
        shape: the shape of the model's output.
        like: a tensor with the output's dtype and device.

    Returns:
        The transfer and the facts; None for each that is not known.
    """
    small = [min(size, 2) for size in shape[:-1]] + list(shape[-1:])
    for labels in _possible_labels(small, like):
        output = like.new_zeros(small).requires_grad_() * 1
        assert output.grad_fn is not None
        mark = mark_layer(output.grad_fn)
        try:
            loss = loss_fn(output, labels)
        except Exception:  # whatever a user's function raises for labels of this kind
            continue
        if isinstance(loss, Tensor) and loss.grad_fn is not None:
            transfer_detection.trace(loss, MODEL_OUTPUT)
            facts = inspect_loss(loss).of_any_size(small)
            found = transfer_detection.resolve(mark, small[-1]).transfer
            return found, None if facts.sums is None else facts
    return None, None


def _possible_labels(shape: Sequence[int], like: Tensor) -> Iterator[Tensor]:
    """Yield labels of the usual shapes: classes or values of rows, values of elements, of pixels."""
    yield like.new_zeros(shape[:-1], dtype=torch.long)
    yield like.new_zeros(shape)
    yield like.new_zeros(shape[:-1])
    yield like.new_zeros([*shape[:1], *shape[2:]], dtype=torch.long)
