"""LocoProp, AdamW and Muon on a residual network that classifies Fashion-MNIST.

    python examples/fashion_cnn.py --search    # each method's settings, by validation loss
    python examples/fashion_cnn.py             # three seeds of each, at equal steps and equal time
    python examples/fashion_cnn.py --table     # the table again

The data is downloaded once, unless --data-dir or TORCH_LOCOPROP_DATA names a folder that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import comparison
import torch
from muon import adamw, muon_and_adamw
from torch import Tensor, nn
from torch.optim import Optimizer
from training import Batches, Method, Settings, Task

from torch_locoprop import LocoProp
from torch_locoprop.solvers import Exact
from torch_locoprop.study.data import datasets

# ---- the model ----------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions around which the input finds a way of its own."""

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
    """A stem, stages of two blocks that each halve the image but the first, and a linear head."""

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

SHRINK = 1e-4  # of the weights in a step at the full rate, the same for all methods
BETAS = (0.9, 0.99)
INNER = ["blocks.*"]  # layers with local problems: all but the stem and the head, as for Muon
LAYERS = {"inner": INNER, "second": ["blocks.*.second"], "all": None}
MAX_ROWS = 4096  # of the 200,704 to 12,544 rows of a layer: every position of an image is one


def filters_of(model: nn.Module) -> list[nn.Parameter]:
    """Those of the blocks."""
    return [p for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 4]


def by_adamw(model: nn.Module, settings: Settings) -> Optimizer:
    return adamw(model.parameters(), settings["lr"], SHRINK, BETAS)


def by_muon(model: nn.Module, settings: Settings) -> Optimizer:
    """Muon for the filters of the blocks; AdamW for the stem, the head, and all norms."""
    return muon_and_adamw(model.parameters(), filters_of(model), settings, SHRINK, BETAS)


def by_exact_muon(model: nn.Module, settings: Settings) -> Optimizer:
    """LocoProp-S in closed form, ``G (XᵀX + λI)⁻¹``, as the gradient that Muon steps along."""
    return LocoProp(
        model,
        lr=settings["lr"],
        variant="locoprop-s",
        gamma=1.0,
        # One batch has rows enough: in all other steps nothing is kept of them.
        solver=Exact(every=20, damping=settings["damping"]),
        local_reduction="mean",
        max_rows=MAX_ROWS,
        layers=LAYERS[settings["layers"]],
        apply="gradient",
        outer=by_muon(model, settings),
    )


def by_local_steps_adamw(model: nn.Module, settings: Settings) -> Optimizer:
    """LocoProp-S by five plain iterations, as the gradient that AdamW steps along.

    They converge for ``lr < 2 / λ``, with λ the largest eigenvalue of XᵀX / rows, which is below its
    trace: the inputs of a row times their mean square.
    """
    filters = filters_of(model)
    groups = [{"params": [p], "lr": settings["reach"] / p[0].numel()} for p in filters]
    inside = set(filters)
    rest = [p for p in model.parameters() if p not in inside]
    lr = settings["lr"]
    return LocoProp(
        model,
        param_groups=[*groups, {"params": rest}],
        variant="locoprop-s",
        gamma=1.0,
        solver="sgd",
        local_steps=5,
        local_decay="constant",
        local_reduction="mean",
        max_rows=MAX_ROWS,
        layers=INNER,
        apply="gradient",
        outer=lambda filters: adamw(filters, lr, SHRINK, BETAS),
        fallback=lambda rest: adamw(rest, lr, SHRINK, BETAS),
    )


def by_locoprop(model: nn.Module, settings: Settings) -> Optimizer:
    """LocoProp-S as in the paper, with RMSProp; its solution replaces the weights."""
    lr = settings["lr"]
    return LocoProp(
        model,
        lr=lr,
        variant="locoprop-s",
        gamma=settings["gamma"],
        local_steps=5,
        solver="rmsprop",
        momentum=0.9,
        decay=0.9,
        eps=1e-8,
        weight_decay=SHRINK / lr,
        local_reduction="mean",
        max_rows=MAX_ROWS,
        layers=INNER,
        fallback=lambda rest: adamw(rest, settings["fallback_lr"], SHRINK, BETAS),
    )


METHODS = {
    "adamw": Method(
        by_adamw,
        {"lr": 4e-3},
        [
            {"lr": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]},
            {"lr": [1.1e-2, 1.35e-2, 1.9e-2, 2.3e-2]},
        ],
    ),
    "muon": Method(
        by_muon,
        {"lr": 1.6e-2, "momentum": 0.95},
        [
            {"lr": [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2]},
            {"lr": [8e-3, 1.6e-2], "momentum": [0.9, 0.98]},
        ],
    ),
    "locoprop-s-exact-muon": Method(
        by_exact_muon,
        {"lr": 8e-3, "momentum": 0.9, "damping": 1.0, "layers": "inner"},
        [
            {"lr": [4e-3, 8e-3, 1.6e-2], "damping": [1.0, 4.0]},
            {"lr": [8e-3], "momentum": [0.95], "damping": [0.1, 1.0]},
            {"lr": [8e-3], "layers": ["second", "all"]},
        ],
    ),
    "locoprop-s-adamw": Method(
        by_local_steps_adamw,
        {"lr": 4e-3, "reach": 1.0},
        [
            {"lr": [2e-3, 4e-3, 8e-3, 1.6e-2], "reach": [1.0, 3.0]},
            {"lr": [8e-3, 1.6e-2], "reach": [10.0]},
        ],
    ),
    "locoprop-s": Method(
        by_locoprop,
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
    """Bytes ``[N, 28, 28]`` and labels ``[N]`` on the device."""

    train: Tensor
    train_labels: Tensor
    held_out: dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class FashionCNN(Task):
    """Ten kinds of clothes; the last of the training images are for validation."""

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
            raise SystemExit("The labels of Fashion-MNIST are missing. Put them beside the images.")
        return self.divided(
            *(_bytes(data.train).to(device), data.train_labels.to(device)),
            *(_bytes(data.test).to(device), data.test_labels.to(device)),
        )

    def divided(
        self, images: Tensor, labels: Tensor, test_images: Tensor, test_labels: Tensor
    ) -> Images:
        """The images for training, and those for validation and test as the model takes them."""
        kept = len(images) - self.validation
        parts = {
            "validation": (_normalised(images[kept:]), labels[kept:]),
            "test": (_normalised(test_images), test_labels),
        }
        return Images(images[:kept], labels[:kept], parts)

    def model(self, data: Images) -> nn.Module:
        return ResidualNetwork(self.channels)

    def batches(self, data: Images, generator: torch.Generator) -> Batches:
        """Epoch by epoch in a new order, without the rest of an epoch that is no whole batch."""
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
    """Images ``[N, height, width]``, each moved by up to ``far`` pixels and mirrored or not."""
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
    """Bytes ``[N, 28, 28]`` as inputs ``[N, 1, 28, 28]`` of about mean zero and variance one."""
    return (images.float().unsqueeze(1) / 255 - 0.286) / 0.353


def main(arguments: Sequence[str] | None = None) -> None:
    parser = comparison.parser(__doc__, steps=2140)  # ten epochs
    parser.add_argument("--data-dir", type=Path, help="a folder with Fashion-MNIST's files")
    options = parser.parse_args(arguments)
    comparison.main(FashionCNN(options.data_dir, options.bf16), options)


if __name__ == "__main__":
    main()
