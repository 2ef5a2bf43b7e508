"""Compare LocoProp with AdamW and Muon on a residual network that classifies Fashion-MNIST.

    python examples/fashion_cnn.py --search    # choose each method's settings by validation loss
    python examples/fashion_cnn.py             # train three seeds at equal steps and at equal time
    python examples/fashion_cnn.py --table     # print the table of finished runs

Fashion-MNIST is downloaded once. To use files you have, name their folder with --data-dir or the
environment variable TORCH_LOCOPROP_DATA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import comparison
import torch
from methods import INNER, Optimizers
from torch import Tensor, nn
from training import Batches, Method, Task

from torch_locoprop.study.data import datasets

# ---- the model ----------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block: two convolutions with batch norms, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first_norm(self.first(x)).relu()
        y = self.second_norm(self.second(y))
        return (y + self.shortcut(x)).relu()


class ResidualNetwork(nn.Module):
    """A first convolution, stages of two blocks each, and a linear layer for ten classes.

    Every stage but the first halves height and width. `channels` has the channels of each stage.
    """

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(channels[0])
        blocks = []
        for before, now in zip((channels[0], *channels), channels, strict=False):
            blocks += [Block(before, now, 1 if now == before else 2), Block(now, now, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x)).relu()
        features: Tensor = self.blocks(x).mean((-2, -1))
        return self.head(features)  # type: ignore[no-any-return]


# ---- the methods --------------------------------------------------------------------------------

# Every position of every image is a row, 12,544 to 200,704 for each layer; LocoProp keeps 4096 of them.
MAKE = Optimizers(
    {"inner": INNER, "second": ["blocks.*.second"], "all": None},
    max_rows=4096,
)
METHODS = {
    "adamw": Method(
        MAKE.by_adamw,
        {"lr": 4e-3},
        [
            {"lr": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]},
            {"lr": [1.1e-2, 1.35e-2, 1.9e-2, 2.3e-2]},
        ],
    ),
    "muon": Method(
        MAKE.by_muon,
        {"lr": 1.6e-2, "momentum": 0.95},
        [
            {"lr": [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2]},
            {"lr": [8e-3, 1.6e-2], "momentum": [0.9, 0.98]},
        ],
    ),
    "soap": Method(
        MAKE.by_soap,
        {"lr": 4e-3, "momentum": 0.95},
        [
            {"lr": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]},
            {"lr": [4e-3, 8e-3], "momentum": [0.9, 0.98]},
        ],
    ),
    "spectral": Method(
        MAKE.by_spectral,
        {"lr": 8e-3, "momentum": 0.9, "layers": "inner"},
        [
            {"lr": [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2]},
            {"lr": [8e-3, 1.6e-2], "momentum": [0.95]},
            {"lr": [8e-3, 1.6e-2], "layers": ["all"]},
        ],
    ),
    "locoprop-s-exact-muon": Method(
        MAKE.by_exact_muon,
        {"lr": 8e-3, "momentum": 0.9, "damping": 1.0, "layers": "inner"},
        [
            {"lr": [4e-3, 8e-3, 1.6e-2], "damping": [1.0, 4.0]},
            {"lr": [8e-3], "momentum": [0.95], "damping": [0.1, 1.0]},
            {"lr": [8e-3], "layers": ["second", "all"]},
        ],
    ),
    "locoprop-s-adamw": Method(
        MAKE.by_local_steps_adamw,
        {"lr": 4e-3, "reach": 1.0},
        [
            {"lr": [2e-3, 4e-3, 8e-3, 1.6e-2], "reach": [1.0, 3.0]},
            {"lr": [8e-3, 1.6e-2], "reach": [10.0]},
        ],
    ),
    "locoprop-s": Method(
        MAKE.by_locoprop,
        {"lr": 1.5e-4, "gamma": 100.0, "fallback_lr": 4e-3},
        [
            {"lr": [5e-5, 1.5e-4, 5e-4], "gamma": [30.0, 100.0]},
            {"lr": [5e-4, 1.5e-3], "gamma": [10.0]},
            {"lr": [1.5e-3], "gamma": [30.0]},
            {"lr": [5e-4], "gamma": [30.0], "fallback_lr": [8e-3]},
        ],
    ),
}


# ---- the data -----------------------------------------------------------------------------------


class Images(NamedTuple):
    """Training images `[N, 28, 28]` as bytes, labels `[N]`, and the held-out parts, on the device."""

    train: Tensor
    train_labels: Tensor
    held_out: dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class FashionCNN(Task):
    """Classify Fashion-MNIST; the last training images are held out for validation."""

    channels: tuple[int, ...] = (32, 64, 128)
    batch_size: int = 256
    validation: int = 5000

    name = "fashion-cnn"
    methods = METHODS
    shown = ("test accuracy", "test loss")

    def load(self, device: torch.device) -> Images:
        try:
            data = datasets.load("fashion-mnist", self.source)
        except datasets.DatasetError as error:
            raise SystemExit(str(error)) from error
        if data.train_labels is None or data.test_labels is None:
            raise SystemExit("Fashion-MNIST has no label files here. Put them beside the images.")
        return self.divided(
            *(_bytes(data.train).to(device), data.train_labels.to(device)),
            *(_bytes(data.test).to(device), data.test_labels.to(device)),
        )

    def divided(
        self, images: Tensor, labels: Tensor, test_images: Tensor, test_labels: Tensor
    ) -> Images:
        """Hold out validation images; normalise them and the test images."""
        kept = len(images) - self.validation
        parts = {
            "validation": (_normalised(images[kept:]), labels[kept:]),
            "test": (_normalised(test_images), test_labels),
        }
        return Images(images[:kept], labels[:kept], parts)

    def model(self, data: Images) -> nn.Module:
        return ResidualNetwork(self.channels)

    def batches(self, data: Images, generator: torch.Generator) -> Batches:
        """Yield batches forever, in a new order each epoch; incomplete last batches are dropped."""
        count, device = len(data.train), data.train.device
        while True:
            order = torch.randperm(count, generator=generator, device=device)
            for chosen in order.split(self.batch_size):
                if len(chosen) == self.batch_size:
                    images = shifted_and_flipped(data.train[chosen], generator)
                    yield _normalised(images), data.train_labels[chosen]

    def held_out(self, data: Images) -> dict[str, tuple[Tensor, Tensor]]:
        return data.held_out


def shifted_and_flipped(images: Tensor, generator: torch.Generator, far: int = 2) -> Tensor:
    """Shift each of the images `[N, height, width]` by up to `far` pixels and mirror half of them."""
    count, height, width = images.shape
    device = images.device

    def drawn(below: int) -> Tensor:
        return torch.randint(below, (count, 1), generator=generator, device=device)

    rows = torch.arange(height, device=device) + drawn(2 * far + 1)
    columns = torch.arange(width, device=device)
    columns = torch.where(drawn(2) == 1, columns, width - 1 - columns) + drawn(2 * far + 1)
    padded = nn.functional.pad(images, (far, far, far, far))
    one = torch.arange(count, device=device)[:, None, None]
    return padded[one, rows[:, :, None], columns[:, None, :]]


def _bytes(images: Tensor) -> Tensor:
    return (255 * images).round().to(torch.uint8).reshape(-1, 28, 28)


def _normalised(images: Tensor) -> Tensor:
    """Convert bytes `[N, 28, 28]` to inputs `[N, 1, 28, 28]` with mean 0 and variance 1, roughly."""
    return (images.float().unsqueeze(1) / 255 - 0.286) / 0.353


def main(arguments: Sequence[str] | None = None) -> None:
    parser = comparison.parser(__doc__, steps=2140)  # ten epochs
    parser.add_argument("--data-dir", type=Path, help="folder with the files of Fashion-MNIST")
    options = parser.parse_args(arguments)
    comparison.main(FashionCNN(options.data_dir, options.bf16), options)


if __name__ == "__main__":
    main()
