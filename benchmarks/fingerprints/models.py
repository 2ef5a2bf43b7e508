"""Small models for fingerprints, one for each kind of layer and each way to use one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "hardtanh": nn.Hardtanh,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "celu": nn.CELU,
    "softsign": nn.Softsign,
    "logsigmoid": nn.LogSigmoid,
    "softmax": lambda: nn.Softmax(-1),
}
"""The activation module of each transfer function."""

Activation = Callable[[], nn.Module]


@dataclass(frozen=True)
class Model:
    """A model and the shape of its data.

    Args:
        build: makes the model from the constructor of its activation.
        shape: the shape of one input.
        outputs: the number of output features.
        rows: the number of inputs in a batch.
    """

    build: Callable[[Activation], nn.Module]
    shape: tuple[int, ...] = (12,)
    outputs: int = 5
    rows: int = 16


def perceptron(*sizes: int, bias: bool = True) -> Callable[[Activation], nn.Sequential]:
    """Return a builder of linear layers with activations between them."""

    def build(activation: Activation) -> nn.Sequential:
        modules: list[nn.Module] = []
        for n, d in pairwise(sizes):
            modules += [nn.Linear(n, d, bias=bias), activation()]
        return nn.Sequential(*modules[:-1])

    return build


class Shared(nn.Module):
    """A model that calls its middle layer twice."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, 9), nn.Linear(9, 9), nn.Linear(9, 5)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        x = self.activation(self.middle(x))
        return self.last(self.activation(self.middle(x)))


class Sequences(nn.Module):
    """A model of sequences `[rows, 4, 12]` whose embedding and norm have no local problem."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 12)
        self.inner, self.norm, self.last = nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.embedding(torch.arange(4))
        return self.last(self.norm(self.activation(self.inner(x))).mean(1))


def frozen(name: str) -> Callable[[Activation], nn.Module]:
    """Return a builder of a perceptron in which the parameters that begin with `name` are frozen."""

    def build(activation: Activation) -> nn.Module:
        model = perceptron(12, 10, 8, 5)(activation)
        for own, parameter in model.named_parameters():
            if own.startswith(name):
                parameter.requires_grad_(False)
        return model

    return build


def convolution(activation: Activation) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), activation(), nn.Conv2d(4, 6, 3, stride=2, padding=1), activation()),
        *(nn.Flatten(), nn.Linear(24, 5)),
    )


def large_convolution(activation: Activation) -> nn.Module:
    """Return a convolution with more output positions than weights for each output channel."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), activation(), nn.Conv2d(16, 32, 3, bias=False)),
        *(activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)),
    )


def grouped_convolution(activation: Activation) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(4, 8, 3, groups=4), activation(), nn.Conv2d(8, 6, 3, groups=2, bias=False)),
        *(activation(), nn.Flatten(), nn.Linear(24, 5)),
    )


def transposed_convolution(activation: Activation) -> nn.Module:
    return nn.Sequential(
        *(nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), activation()),
        *(nn.ConvTranspose2d(4, 4, 2, groups=2), activation(), nn.Flatten(), nn.Linear(324, 5)),
    )


def other_convolutions(activation: Activation) -> nn.Module:
    """Return a model of one-dimensional and three-dimensional convolutions."""
    return nn.Sequential(
        *(nn.Conv1d(2, 4, 3, padding=2, padding_mode="circular", dilation=2), activation()),
        *(nn.Unflatten(2, (2, 2, 2)), nn.Conv3d(4, 3, 2), activation()),
        *(nn.Flatten(), nn.Linear(3, 5)),
    )


def gpt2(activation: Activation) -> nn.Module:
    """Return a model of GPT-2's layers; needs `transformers`."""
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(Conv1D(9, 12), activation(), Conv1D(5, 9))


MODELS: dict[str, Model] = {
    "mlp": Model(perceptron(12, 10, 8, 5)),
    "no-bias": Model(perceptron(12, 10, 8, 5, bias=False)),
    "many-rows": Model(perceptron(12, 10, 8, 5), rows=100),
    # Above the size from which the CPU's fast path takes a problem: 2**22 multiplications.
    "large": Model(perceptron(256, 128, 256), shape=(256,), outputs=256, rows=256),
    "large-no-bias": Model(
        perceptron(256, 128, 256, bias=False), shape=(256,), outputs=256, rows=256
    ),
    "large-few-rows": Model(perceptron(256, 512, 256), shape=(256,), outputs=256, rows=64),
    "shared": Model(Shared),
    "sequences": Model(Sequences, shape=(4, 12)),
    "frozen-layer": Model(frozen("2.")),
    "frozen-weight": Model(frozen("2.weight")),
    "frozen-bias": Model(frozen("0.bias")),
    "conv": Model(convolution, shape=(3, 6, 6)),
    "conv-large": Model(large_convolution, shape=(3, 12, 12)),
    "conv-grouped": Model(grouped_convolution, shape=(4, 6, 6)),
    "conv-transposed": Model(transposed_convolution, shape=(3, 3, 3), rows=8),
    "conv-others": Model(other_convolutions, shape=(2, 8)),
    "gpt2": Model(gpt2),
}
