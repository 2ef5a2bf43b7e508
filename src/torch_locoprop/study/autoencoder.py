"""The deep autoencoder of the benchmark, its initialisation and its loss."""

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

TRANSFERS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


def deep_autoencoder(
    sizes: Sequence[int], *, transfer: str = "tanh", generator: Generator | None = None
) -> nn.Sequential:
    """Return the autoencoder whose encoder has the widths `sizes`, input first, code last; the decoder mirrors it.

    `(784, 1000, 500, 250, 30)` is the standard model of the paper. Every layer but the code and the output has the
    transfer; the code is linear, and the output is logits: the sigmoid belongs to `reconstruction_loss`.
    """
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"Invalid sizes={tuple(sizes)}. Give two or more positive widths, input to code.")
    if transfer not in TRANSFERS:
        raise ValueError(f"Invalid transfer={transfer!r}. Must be one of {sorted(TRANSFERS)}.")
    halves = {"encoder": tuple(sizes), "decoder": tuple(reversed(sizes))}
    model = nn.Sequential(
        OrderedDict((name, _stack(widths, TRANSFERS[transfer])) for name, widths in halves.items())
    )
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            initialise_(layer, generator)
    return model


def initialise_(layer: nn.Linear, generator: Generator | None = None) -> None:
    """Fill in place: weights Glorot-uniform, biases uniform in ±sqrt(3/d) with d outputs, as the paper's runs start."""
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    bound = math.sqrt(3 / layer.out_features)
    nn.init.uniform_(layer.bias, -bound, bound, generator=generator)


def reconstruction_loss(logits: Tensor, images: Tensor) -> Tensor:
    """Return the sigmoid cross-entropy, summed over pixels and averaged over the batch (both `[batch, pixels]`)."""
    total = nn.functional.binary_cross_entropy_with_logits(logits, images, reduction="sum")
    return total / len(images)


def entropy(images: Tensor) -> float:
    """Return the mean entropy of the images' pixels: what `reconstruction_loss` is at a perfect reconstruction."""
    per_pixel = torch.special.entr(images) + torch.special.entr(1 - images)
    return per_pixel.sum().item() / len(images)


def _stack(widths: Sequence[int], transfer: type[nn.Module]) -> nn.Sequential:
    """Return linear layers of these widths with the transfer between them, none after the last."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), transfer()]
    return nn.Sequential(*layers[:-1])
