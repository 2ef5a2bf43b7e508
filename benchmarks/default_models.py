"""The small models of the tasks in `default_tasks`, with PyTorch's usual initialisation."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


def mlp(sizes: tuple[int, ...], activation: str) -> nn.Sequential:
    """Return linear layers of these sizes with the activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def normalised_mlp(
    inputs: int, width: int, depth: int, outputs: int, norm: str, activation: str
) -> nn.Sequential:
    """Return `depth` hidden layers, each with LayerNorm or BatchNorm before its activation."""
    layers: list[nn.Module] = []
    for size in (inputs, *[width] * (depth - 1)):
        layers.append(nn.Linear(size, width))
        layers.append(nn.LayerNorm(width) if norm == "layer" else nn.BatchNorm1d(width))
        layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def autoencoder(encoder: tuple[int, ...], activation: str) -> nn.Sequential:
    """Return an encoder of these sizes and its mirror image; the code layer is linear."""
    half = mlp(encoder, activation)
    mirrored = mlp(encoder[::-1], activation)
    return nn.Sequential(*half, *mirrored)


def cnn(activation: str, channels: tuple[int, int], side: int, outputs: int = 10) -> nn.Sequential:
    """Return two convolutions with stride 2 on images `[N, 1, side, side]`, and a linear layer."""
    first, second = channels
    left = -(-side // 4)  # two strides of 2, rounded up
    return nn.Sequential(
        nn.Conv2d(1, first, 5, stride=2, padding=2),
        ACTIVATIONS[activation](),
        nn.Conv2d(first, second, 3, stride=2, padding=1),
        ACTIVATIONS[activation](),
        nn.Flatten(),
        nn.Linear(second * left * left, outputs),
    )


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm beside the identity, or beside a 1 × 1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.beside = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.beside(x) + self.second_norm(self.second(hidden)))


def residual_cnn(width: int, outputs: int = 10) -> nn.Sequential:
    """Return a convolution, three residual blocks, the mean over all pixels and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        ResidualBlock(width, width, 1),
        ResidualBlock(width, 2 * width, 2),
        ResidualBlock(2 * width, 2 * width, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, outputs),
    )


class TransformerBlock(nn.Module):
    """Causal self-attention, then two linear layers with GELU, each beside the identity."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.hidden_norm = nn.LayerNorm(width)
        self.hidden_in = nn.Linear(width, 4 * width)
        self.hidden_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention_in(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(found.transpose(1, 2).flatten(2))
        result: Tensor = x + self.hidden_out(F.gelu(self.hidden_in(self.hidden_norm(x))))
        return result


class GPT(nn.Module):
    """A GPT that returns the logits `[N · context, characters]` of the next characters.

    Args:
        characters: size of the vocabulary.
        layers: number of transformer blocks.
        width: size of the embeddings.
        heads: attention heads of a block.
        context: number of positions.
        projections: start of the last matrix of each branch: `small`, as in GPT-2, or `zero`.
    """

    def __init__(
        self, characters: int, layers: int, width: int, heads: int, context: int, projections: str
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        for name, p in self.named_parameters():
            if name.endswith("_out.weight"):
                nn.init.normal_(p, std=0.02 * (2 * layers) ** -0.5 * (projections == "small"))
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[-1], device=text.device)
        x = self.characters(text) + self.positions(places)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.flatten(0, 1)
