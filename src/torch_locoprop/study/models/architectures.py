"""Models by name: the presets of the paper, or a string of widths, with any transfer of the library.

Initial weights depend on the seed alone: they are drawn on the CPU, also for training on a GPU.
"""

import torch
from torch import Generator, Tensor, nn

from torch_locoprop.paper import transfers
from torch_locoprop.paper.names import did_you_mean
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.study.models.autoencoder import deep_autoencoder

PRESETS: dict[str, tuple[int, ...]] = {
    "standard": (784, 1000, 500, 250, 30),
    "deep": (784, 1000, *(8 * [500]), 250, 30),
    "wide": (784, 4000, 2000, 1000, 120),
}
"""The models of the paper as widths from the input to the code; the decoder mirrors them."""

UNSUITABLE = {
    "softmax": "It couples the units of a layer",
    "step": "It is flat, so no gradient passes through it",
}
"""Transfers of the library that cannot be used between two layers, and the reason."""

SUITABLE = tuple(name for name in transfers.NAMES if name not in UNSUITABLE)

TORCH: dict[str, type[nn.Module]] = {
    **{"tanh": nn.Tanh, "relu": nn.ReLU, "softplus": nn.Softplus},
    **{"elu": nn.ELU, "selu": nn.SELU, "celu": nn.CELU},
}
"""Modules of torch for transfers whose formula takes several operations; LocoProp detects them."""


class Elementwise(nn.Module):
    """A transfer of the library as a module."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__()
        self.transfer = transfer

    def forward(self, a: Tensor) -> Tensor:
        return self.transfer.f(a)

    def extra_repr(self) -> str:
        return self.transfer.name


def sizes_of(model: str) -> tuple[int, ...]:
    """Return the widths from the input to the code of a preset, or of a string such as `784-64-16`.

    Raises:
        ValueError: If `model` is neither.
    """
    if model in PRESETS:
        return PRESETS[model]
    widths = model.split("-")
    if len(widths) < 2 or not all(width.isdecimal() and int(width) > 0 for width in widths):
        raise ValueError(
            f"Invalid model={model!r}.{did_you_mean(model, PRESETS)} Must be one of "
            f"{', '.join(PRESETS)}, or two or more positive widths from the input to the code, such as "
            "784-64-16."
        )
    return tuple(map(int, widths))


def transfer_between(name: str) -> Transfer:
    """Return the transfer of this name.

    Raises:
        ValueError: If there is none, or if it cannot be used between two layers.
    """
    if name.lower().replace("-", "_") not in (*transfers.NAMES, *transfers.NON_MONOTONE):
        hint = did_you_mean(name, SUITABLE)
        raise ValueError(f"Invalid transfer={name!r}.{hint} Must be one of {', '.join(SUITABLE)}.")
    transfer = transfers.get(name)
    if transfer.name in UNSUITABLE:
        raise ValueError(
            f"Invalid transfer={name!r}. {UNSUITABLE[transfer.name]}: it cannot be used between "
            f"layers. Use one of {', '.join(SUITABLE)}."
        )
    return transfer


def build(model: str, transfer: str = "tanh", seed: int = 0) -> nn.Sequential:
    """Return the untrained model on the CPU, with the initialisation of the paper."""
    sizes, between = sizes_of(model), transfer_between(transfer)
    with torch.random.fork_rng(devices=[]):  # nn.Linear draws from the global generator
        return deep_autoencoder(
            sizes,
            transfer=TORCH.get(between.name, lambda: Elementwise(between)),
            generator=Generator().manual_seed(seed),
        )
