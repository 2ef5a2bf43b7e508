"""The table of transfer functions by name (Table 2 of the paper), and :func:`get`.

This module offers every transfer. The interface is in ``transfer_base.py``, the functions are in
``piecewise_transfers.py`` and ``smooth_transfers.py``. The divergences that a transfer induces are in
``divergences.py``; the targets and losses of the LocoProp variants are in ``targets.py`` and
``losses.py``.
"""

from torch_locoprop.paper.names import did_you_mean
from torch_locoprop.paper.piecewise_transfers import (
    CELU,
    ELU,
    SELU,
    Hardtanh,
    LeakyReLU,
    Linear,
    ReLU,
    ReLU6,
    SquaredReLU,
    Step,
)
from torch_locoprop.paper.smooth_transfers import (
    Arctan,
    LogSigmoid,
    Sigmoid,
    Softmax,
    Softplus,
    Softsign,
    Tanh,
)
from torch_locoprop.paper.transfer_base import Transfer

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
    "get",
]

# The first ten are those of the paper's Table 2.
TRANSFERS: dict[str, Transfer] = {
    kind.name: kind()
    for kind in (
        *(Step, Linear, ReLU, LeakyReLU, Sigmoid, Softmax, Tanh, Arctan, Softplus, ELU),
        *(Hardtanh, ReLU6, SELU, CELU, Softsign, LogSigmoid, SquaredReLU),
    )
}
NAMES = tuple(TRANSFERS)
# Common activations without a matching loss: they decrease somewhere.
NON_MONOTONE = frozenset({"gelu", "silu", "swish", "mish", "hardswish"})


def get(transfer: str | Transfer) -> Transfer:
    """Return a transfer by name, with torch's default parameters.

    Args:
        transfer: one of ``NAMES`` (upper case and hyphens are accepted), or a :class:`Transfer`,
            which is returned as it is.

    Raises:
        ValueError: if the name is unknown, or names an activation that is not non-decreasing.

    Example::

        >>> get("leaky-relu")
        LeakyReLU(slope=0.01)
    """
    if isinstance(transfer, Transfer):
        return transfer
    name = str(transfer).lower().replace("-", "_")
    if name in NON_MONOTONE:
        raise ValueError(
            f"Invalid transfer={transfer!r}. It is not non-decreasing, so it has no matching loss."
        )
    if name not in TRANSFERS:
        raise ValueError(
            f"Invalid transfer={transfer!r}.{did_you_mean(name, NAMES)} Must be a Transfer or one of "
            f"{', '.join(NAMES)}."
        )
    return TRANSFERS[name]
