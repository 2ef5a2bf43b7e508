"""The models and losses of `odd_tasks` that `default_models` does not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.default_models import TransformerBlock, mlp


class BagOfWords(nn.Module):
    """The mean of the embeddings of words, and a linear layer."""

    def __init__(self, words: int, width: int, outputs: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(1))


class RecurrentText(nn.Module):
    """Logits `[N · context, characters]` of the next characters by an LSTM or a GRU."""

    def __init__(self, kind: str, characters: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, 32)
        self.recurrent = getattr(nn, kind)(32, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.characters(x))[0]).flatten(0, 1)


class RecurrentRows(nn.Module):
    """A classifier of images by an LSTM that reads their rows."""

    def __init__(self, side: int, width: int, outputs: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(side, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x.squeeze(1))[0][:, -1])


class VisionTransformer(nn.Module):
    """A classifier of images `[N, 1, 14, 14]` by attention between patches of 2 × 2 pixels.

    Args:
        encoder: `torch` for PyTorch's encoder, which reads the class from a token of its own, or `own`
            for blocks of `default_models`, whose outputs are averaged.
        width: size of the embeddings.
        depth: number of blocks.
    """

    def __init__(self, encoder: str, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Embedding(50, width)
        nn.init.normal_(self.places.weight, std=0.02)
        self.blocks: nn.Module
        self.token = nn.Parameter(torch.zeros(width)) if encoder == "torch" else None
        if encoder == "torch":
            layer = nn.TransformerEncoderLayer(
                *(width, 4, 2 * width, 0.0, "gelu"), batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        else:
            self.blocks = nn.Sequential(*(TransformerBlock(width, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), 1, -1), x], 1)
        x = self.norm(self.blocks(x + self.places.weight[: x.shape[1]]))
        return self.head(x.mean(1) if self.token is None else x[:, 0])


class TiedGPT(nn.Module):
    """A transformer of one block whose last matrix is that of its embedding."""

    def __init__(self, characters: int, width: int, context: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(context, width)
        for table in (self.characters, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.block = TransformerBlock(width, 4)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        self.head.weight = self.characters.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.characters(x) + self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.block(x))).flatten(0, 1)


class Recommender(nn.Module):
    """The rating of an item by a user, from an embedding of each and an MLP."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.rating = mlp((2 * width, 32, 1), "relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.rating(torch.cat([self.users(x[:, 0]), self.items(x[:, 1])], 1))


class Vae(nn.Module):
    """A variational autoencoder; returns logits, means and logarithms of variances."""

    def __init__(self, inputs: int, hidden: int, code: int) -> None:
        super().__init__()
        self.encoder = mlp((inputs, hidden, 2 * code), "relu")
        self.decoder = mlp((code, hidden, inputs), "relu")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


class UnitLength(nn.Module):
    """Divides each row by its length."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1)


class SetModel(nn.Module):
    """A number for each set of points: an MLP of each point, their mean, another MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.whole = mlp((3, 32, 32), "relu"), mlp((32, 32, 1), "relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.points(x).mean(1))


class UNet(nn.Module):
    """Two convolutions down and up again, with the first output beside the last input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(24, 12, 2, 2), nn.Conv2d(24, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.first(x))
        return self.last(torch.cat([wide, F.relu(self.up(F.relu(self.down(wide))))], 1))


def dropout_mlp() -> nn.Sequential:
    """Return an MLP with dropout of half of the hidden features."""
    hidden = (nn.ReLU(), nn.Dropout(0.5))
    return nn.Sequential(
        *(nn.Linear(196, 128), *hidden, nn.Linear(128, 128), *hidden, nn.Linear(128, 10))
    )


def sigmoid_mlp() -> nn.Sequential:
    """Return an MLP with sigmoids."""
    return nn.Sequential(
        *(nn.Linear(196, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 10))
    )


def linear_autoencoder() -> nn.Sequential:
    """Return a linear map to 8 numbers and one back."""
    return nn.Sequential(nn.Linear(196, 8), nn.Linear(8, 196))


def batchnorm_cnn() -> nn.Sequential:
    """Return two convolutions with BatchNorm and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


def depthwise_cnn() -> nn.Sequential:
    """Return a CNN with a depthwise convolution and GroupNorm."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU()),
        *(nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.Conv2d(16, 32, 1)),
        *(nn.GroupNorm(4, 32), nn.SiLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def signal_cnn() -> nn.Sequential:
    """Return a CNN of one dimension."""
    return nn.Sequential(
        *(nn.Conv1d(1, 16, 5, padding=2), nn.ReLU()),
        *(nn.Conv1d(16, 16, 5, 2, padding=2), nn.ReLU()),
        *(nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(16, 2)),
    )


def unit_embedding() -> nn.Sequential:
    """Return an MLP whose outputs have length one."""
    return nn.Sequential(*mlp((196, 64, 16), "relu"), UnitLength())


class Quantiles(nn.Module):
    """The loss of the quantiles 0.1, 0.5 and 0.9."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        levels = outputs.new_tensor([0.1, 0.5, 0.9])
        over = targets - outputs
        return torch.maximum(levels * over, (levels - 1) * over).mean()


class Elbo(nn.Module):
    """The negative evidence lower bound of a `Vae`, the mean over the batch."""

    def forward(self, outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
        logits, mean, log_variance = outputs
        pixels = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        codes = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
        return (pixels + codes) / len(targets)


class Contrastive(nn.Module):
    """The cross-entropy of finding examples of the same class among the others of the batch."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        own = torch.eye(len(outputs), device=outputs.device)
        found = (outputs @ outputs.mT / 0.2 - 1e9 * own).log_softmax(1)
        same = (targets[:, None] == targets).float() - own
        return -((found * same).sum(1) / same.sum(1).clamp_min(1)).mean()


class RewardedChoices(nn.Module):
    """The log-likelihood of choices, weighted by rewards of either sign, and a penalty of logits."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        choices, rewards = targets[:, :1].long(), targets[:, 1]
        likelihood = outputs.log_softmax(1).gather(1, choices).squeeze(1)
        return 0.1 * outputs.square().mean() - (rewards * likelihood).mean()
