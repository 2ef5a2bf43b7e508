"""Models, data and losses shared by the tests; everything in float64 and seeded."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "step": lambda a: 0.5 * (1 + a.sign()),
    "linear": lambda a: a,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda a: torch.softmax(a, -1),
    "tanh": torch.tanh,
    "arctan": torch.arctan,
    "softplus": F.softplus,
    "elu": F.elu,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "selu": F.selu,
    "celu": F.celu,
    "softsign": F.softsign,
    "logsigmoid": F.logsigmoid,
    "squared_relu": lambda a: F.relu(a).square(),
}

VARIANTS = ("locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m", "natural-s", "proxprop")
BACKPROP_VARIANTS = tuple(name for name in VARIANTS if name != "natural-s")
FIRST_ORDER = ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam")


class Activation(nn.Module):
    """Any function as a module, for models built from ACTIVATIONS."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = ACTIVATIONS[name]

    def forward(self, a: Tensor) -> Tensor:
        return self.function(a)


def network(
    activation: str = "tanh",
    bias: bool = True,
    sizes: tuple[int, ...] = (6, 5, 4, 3),
    seed: int = 0,
) -> nn.Sequential:
    """Linear layers with the activation between them, none after the last."""
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for n, d in pairwise(sizes):
        modules += [nn.Linear(n, d, bias=bias), Activation(activation)]
    return nn.Sequential(*modules[:-1]).double()


def batch(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Sigmoid cross-entropy, summed over features and averaged over the batch."""
    return F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / len(logits)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
