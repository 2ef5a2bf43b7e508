"""Reads from an autograd node which transfer it computes.

Nodes are known by PyTorch's names for them, such as ``TanhBackward0``, and parameters of a transfer by
the values that the node has saved. The search that finds the nodes is in ``transfer_detection.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.graph import Node

from torch_locoprop.paper import transfers
from torch_locoprop.paper.tensors import has_values
from torch_locoprop.paper.transfers import Transfer

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
INSIDE_LOSS: dict[str, Callable[[Any], Transfer | None]] = {
    "BinaryCrossEntropyWithLogitsBackward0": lambda node: transfers.Sigmoid(),
    "LogSoftmaxBackward0": lambda node: _softmax(node),
    "MseLossBackward0": lambda node: transfers.Linear(),
}

_SOFTPLUS_THRESHOLD = 20  # PyTorch's default
_NON_MONOTONE = {"GeluBackward0", "SiluBackward0", "MishBackward0", "HardswishBackward0"}


def transfer_of(node: Node, adds_one: Callable[[Node], bool] | None = None) -> Transfer | None:
    """Return the transfer that a node computes; None if it is no known, monotone transfer.

    Args:
        node: the node.
        adds_one: returns True for a division ``a / (c + |a|)`` with c = 1; None reads the values that
            autograd has saved.
    """
    if _is_softsign(node, adds_one or _adds_one):
        return transfers.Softsign()
    known = _ACTIVATIONS.get(node.name()) or INSIDE_LOSS.get(node.name())
    try:
        return known(node) if known else None
    except ValueError:  # with these parameters the function decreases somewhere
        return None


def describe(node: Node) -> str:
    """Return a description of a node's operation for notes."""
    name = node.name()
    if name in _NON_MONOTONE:
        return f"{name.removesuffix('Backward0').lower()} is not monotone: it has no matching loss"
    if name == "SoftplusBackward0" and transfer_of(node) is None:
        return _why_no_transfer(node)
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
    checkpointing would compute the whole block again. PyTorch 2.9 does not tell whether there are any.
    """
    saved = division._raw_saved_self, division._raw_saved_other
    if any(getattr(each, "unpack_hook", "not known") is not None for each in saved):
        return False
    try:
        a, denominator = division._saved_self.detach(), division._saved_other.detach()
    except RuntimeError:  # a backward pass has freed them, as in a closure
        return False
    if not has_values(denominator) or denominator.numel() == 0:
        return False
    expected = 1 + a.abs()
    return bool(((denominator == expected) | expected.isnan()).all())


def output_shape(node: Any) -> list[int]:
    """Return the shape of a node's output; empty for nested tensors or if it is not known."""
    known = node._input_metadata
    return list(known[0].shape) if known and not known[0].is_nested_tensor else []


def _softplus(node: Any) -> Transfer | None:
    """Return softplus if its jump at the threshold, ``exp(−threshold)``, is a rounding error."""
    if node._saved_threshold < _SOFTPLUS_THRESHOLD:
        return None
    return transfers.Softplus(float(node._saved_beta))


def _why_no_transfer(softplus: Any) -> str:
    """Return why a softplus is no known transfer."""
    if softplus._saved_threshold < _SOFTPLUS_THRESHOLD:
        return (
            f"softplus with a threshold below {_SOFTPLUS_THRESHOLD} is not monotone: it has no "
            "matching loss"
        )
    return f"softplus with beta={float(softplus._saved_beta)} has no known matching loss"


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
    rank = len(output_shape(node))
    return transfers.Softmax() if rank and softmax_dimension(node) == rank - 1 else None


def softmax_dimension(node: Any) -> int:
    """Return the dimension over which a node computes softmax or its logarithm, counted from 0."""
    dimension, rank = node._saved_dim, len(output_shape(node))
    # Autograd stores the dimension as an unsigned number: -1 may be 2**64 - 1.
    signed = dimension - 2**64 if dimension >= 2**63 else dimension
    return int(signed + rank if signed < 0 else signed)
