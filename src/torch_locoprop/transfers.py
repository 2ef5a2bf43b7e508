"""Transfer functions ``y = f(a)`` and their matching losses.

Pass a transfer, or its name, to ``LocoProp(transfers=..., output_transfer=...)`` for layers whose
transfer is not detected automatically. Subclass :class:`Transfer` to add one.

    >>> from torch_locoprop.transfers import Tanh, get
    >>> get("tanh") == Tanh()
    True
"""

from torch_locoprop.paper.divergences import bregman, matching_loss
from torch_locoprop.paper.transfers import (
    CELU,
    ELU,
    NAMES,
    NON_MONOTONE,
    SELU,
    TRANSFERS,
    Arctan,
    Hardtanh,
    LeakyReLU,
    Linear,
    LogSigmoid,
    ReLU,
    ReLU6,
    Sigmoid,
    Softmax,
    Softplus,
    Softsign,
    SquaredReLU,
    Step,
    Tanh,
    Transfer,
    get,
)

__all__ = [
    "CELU",
    "ELU",
    "NAMES",
    "NON_MONOTONE",
    "SELU",
    "TRANSFERS",
    "Arctan",
    "Hardtanh",
    "LeakyReLU",
    "Linear",
    "LogSigmoid",
    "ReLU",
    "ReLU6",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Softsign",
    "SquaredReLU",
    "Step",
    "Tanh",
    "Transfer",
    "bregman",
    "get",
    "matching_loss",
]
