"""Weights apart from biases, as the study's weight decay and some optimizers need them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def weights_and_biases(
    parameters: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of two or more dimensions, and the others."""
    parameters = list(parameters)
    return [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]


def decay_weights_only(
    parameters: Iterable[nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Return parameter groups in which weights decay and biases do not."""
    weights, biases = weights_and_biases(parameters)
    return [
        {"params": weights, "weight_decay": weight_decay},
        {"params": biases, "weight_decay": 0.0},
    ]
