"""Small models of many architectures, each with the structure of its original."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

# Images -----------------------------------------------------------------------------------------


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3)
        self.hidden, self.head = nn.Linear(24, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(torch.tanh(self.one(x)), 2)
        x = torch.tanh(self.two(x)).flatten(1)
        return self.head(torch.tanh(self.hidden(x)))


class Residual(nn.Module):
    """Convolution, BatchNorm and in-place ReLU, twice, with a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride) if stride > 1 else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(inside + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(Residual(4, 4, 1), Residual(4, 8, 2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))


class UNet(nn.Module):
    """Skip connections by concatenation, and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.up2 = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(12, 4, 3, stride=2, padding=1, output_padding=1)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.relu(self.down1(x))
        two = torch.relu(self.down2(one))
        x = self.up2(F.elu(self.bottom(two)))
        x = torch.relu(self.up1(torch.cat([x, two], 1)))
        return self.head(torch.cat([x, one], 1))


class MobileBlock(nn.Module):
    """Inverted bottleneck: expand, depthwise, project without a transfer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(channels, 2 * channels, 1)
        self.depthwise = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels)
        self.project = nn.Conv2d(2 * channels, channels, 1, groups=2)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu6(self.depthwise(F.relu6(self.expand(x))))
        return x + self.norm(self.project(inside))


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(1, 4, 3, stride=2), MobileBlock(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(F.hardswish(self.stem(x))).mean((2, 3)))


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 4, (1, 3, 3), stride=2)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.softplus(self.two(F.leaky_relu(self.one(x), 0.1))).mean((2, 3, 4)))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens1, self.tokens2 = nn.Linear(tokens, 6), nn.Linear(6, tokens)
        self.channels1, self.channels2 = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens2(F.gelu(self.tokens1(self.norm1(x).mT))).mT
        return x + self.channels2(torch.relu(self.channels1(self.norm2(x))))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.block = MixerBlock(4, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        return self.head(self.block(x).mean(1))


# Attention --------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2, causal: bool = False) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        parts = (self.query(x), self.key(context), self.value(context))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block with the norms before the layers."""

    def __init__(self, width: int, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, causal=causal)
        self.cross = Attention(width) if cross else None
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x))
        if self.cross is not None:
            x = x + self.cross(x, context)
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.class_token, self.places = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(5, 8))  # fmt: skip # noqa: E501
        self.blocks = nn.Sequential(*(Block(8, causal=False) for _ in range(2)))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


class GPT(nn.Module):
    """A decoder; with ``tied`` the head shares the embedding's weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(Block(8, causal=True) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class EncoderDecoder(nn.Module):
    """A transformer with its own attention, and cross-attention in the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(12, 8), nn.Embedding(12, 8)
        self.encoder = Block(8, causal=False)
        self.decoder = Block(8, causal=True, cross=True)
        self.head = nn.Linear(8, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.decoder(self.target(target), self.encoder(self.source(source))))


class TorchTransformer(nn.Module):
    """PyTorch's encoder-decoder, whose attention does not call its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(source), self.tokens(target)))


class SharedInDepth(nn.Module):
    """One block applied three times: each of its layers is called three times in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block, self.head = nn.Embedding(12, 8), Block(8, True), nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


# Sequences --------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.project = nn.Linear(8, 8)
        self.gru = nn.GRU(8, 6, batch_first=True, bidirectional=True)
        self.hidden, self.head = nn.Linear(12, 8), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.gru(torch.tanh(self.project(self.tokens(tokens))))
        return self.head(torch.tanh(self.hidden(x)))


class Elman(nn.Module):
    """A recurrent network: one layer, called at every position, with tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.cell, self.head = nn.Linear(16, 8), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        state, states = torch.zeros(len(tokens), 8, dtype=self.cell.weight.dtype), []
        for x in self.tokens(tokens).unbind(1):
            state = torch.tanh(self.cell(torch.cat([x, state], -1)))
            states.append(state)
        return self.head(torch.stack(states, 1))


class TextCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.widths = nn.ModuleList(nn.Conv1d(8, 4, k, padding="same") for k in (1, 3))
        self.dilated = nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens).mT
        x = torch.cat([torch.relu(conv(x)) for conv in self.widths], 1)
        return self.head(F.dropout(torch.sigmoid(self.dilated(x)), 0.1).amax(2))


# Others -----------------------------------------------------------------------------------------


class VAE(nn.Module):
    """Returns the reconstruction's logits and the two halves of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.scale = nn.Linear(16, 12), nn.Linear(12, 3), nn.Linear(12, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.ELU(), nn.Linear(12, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.encoder(x))
        mean, scale = self.mean(hidden), F.softplus(self.scale(hidden))
        return self.decoder(mean + scale * torch.randn_like(mean)), mean, scale


class Experts(nn.Module):
    """Each row goes to one of three experts; the last expert gets no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.softmax(self.gate(x), -1)
        choice = (x[:, 0] > 0.5).long()
        out = x.new_zeros(len(x), 4)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, weight[rows, i, None] * expert(x[rows]))
        return out


class Graph(nn.Module):
    """Graph convolutions: an average over neighbours between a layer and its transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        neighbours = torch.softmax(x @ x.mT, -1)
        x = torch.relu(neighbours @ self.one(x))
        return self.head(torch.relu(self.two(neighbours @ x)))


class Odd(nn.Module):
    """Layers used in many unusual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 8).requires_grad_(False)
        self.frozen_norm = nn.LayerNorm(8).requires_grad_(False)
        self.twice = nn.Linear(8, 8)
        self.normed = parametrizations.weight_norm(nn.Linear(8, 8))
        self.spectral = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.functional = nn.Linear(8, 8)
        self.silent, self.detached, self.unused = (nn.Linear(8, 8) for _ in range(3))
        self.head, self.other_head = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.frozen_norm(torch.relu(self.frozen(x))))
        x = torch.sigmoid(self.twice(torch.tanh(self.twice(x))))
        x = torch.tanh(self.normed(x)) + torch.tanh(self.spectral(x))
        x = torch.tanh(F.linear(x, self.functional.weight, self.functional.bias))
        with torch.no_grad():
            shift = self.silent(x)
        x = x + shift + self.detached(x).detach()
        return self.head(x), self.other_head(x)


# A pair -----------------------------------------------------------------------------------------


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 16)
        self.norm = nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1, bias=False)
        self.out = nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = torch.relu(self.project(z)).unflatten(1, (4, 2, 2))
        return torch.sigmoid(self.out(torch.relu(self.norm(self.up(x)))))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 4, 4, stride=2, padding=1)
        self.two = parametrizations.spectral_norm(nn.Conv2d(4, 6, 4, stride=2, padding=1))
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.one(x), 0.2, inplace=True)
        return self.head(F.leaky_relu(self.two(x), 0.2).flatten(1))
