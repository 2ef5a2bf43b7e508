"""The deep autoencoder of the paper, its initialisation and its loss."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn


def deep_autoencoder(
    sizes: Sequence[int],
    *,
    transfer: Callable[[], nn.Module] = nn.Tanh,
    generator: Generator | None = None,
) -> nn.Sequential:
    """Return an autoencoder whose decoder mirrors its encoder.

    The transfer follows every layer except the code, which is linear, and the output, which is logits:
    `reconstruction_loss` applies the sigmoid.

    Args:
        sizes: The widths from the input to the code; `(784, 1000, 500, 250, 30)` is the standard
            model of the paper.
        transfer: Returns a new module for the transfer between two layers.
        generator: The random numbers of the initial weights.
    """
    halves = {"encoder": sizes, "decoder": sizes[::-1]}
    model = nn.Sequential(
        OrderedDict((name, _stack(widths, transfer)) for name, widths in halves.items())
    )
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            initialise_(layer, generator)
    return model


def initialise_(layer: nn.Linear, generator: Generator | None = None) -> None:
    """Draw weights Glorot-uniform and biases uniform in ±sqrt(3/d), where d is the layer's width."""
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    bound = math.sqrt(3 / layer.out_features)
    nn.init.uniform_(layer.bias, -bound, bound, generator=generator)


def reconstruction_loss(logits: Tensor, images: Tensor) -> Tensor:
    """Return the sigmoid cross-entropy of `[batch, pixels]`, summed over pixels, mean over images."""
    total = nn.functional.binary_cross_entropy_with_logits(logits, images, reduction="sum")
    return total / len(images)


def entropy(images: Tensor) -> float:
    """Return the mean entropy of an image, which is the loss of a perfect reconstruction."""
    per_pixel = torch.special.entr(images) + torch.special.entr(1 - images)
    return float(per_pixel.sum()) / len(images)


def _stack(widths: Sequence[int], transfer: Callable[[], nn.Module]) -> nn.Sequential:
    """Return linear layers of these widths with the transfer between them, not after the last."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), transfer()]
    return nn.Sequential(*layers[:-1])
