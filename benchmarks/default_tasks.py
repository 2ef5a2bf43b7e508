"""The tasks on which `defaults` compares optimizers: small models, real data, few steps.

A task is data, a model, a loss, a batch size and a number of steps. The seed decides the start of the
weights and the order of the batches, so that all methods see the same batches.

MNIST, Fashion-MNIST and CURVES come from `torch_locoprop.study.data.datasets`; the text is
`tinyshakespeare/input.txt` in the folder of `--data-dir` or of `TORCH_LOCOPROP_DATA`. The regression
`friedman` is a function of the literature and needs no file.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.default_models import GPT, autoencoder, cnn, mlp, normalised_mlp, residual_cnn
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import VARIABLE, DatasetError

Loss = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[Tensor, Tensor]

TESTED = 2000
"""Number of examples in the test loss, or of text positions."""


@dataclass(frozen=True, eq=False)
class Data:
    """Training and test examples on a device.

    Args:
        size: number of training examples.
        batch: returns inputs and targets of the training examples with these indices.
        test: inputs and targets of the test examples.
    """

    size: int
    batch: Callable[[Tensor], Pair]
    test: Pair


@dataclass(frozen=True)
class Task:
    """One task.

    Args:
        name: its name, which ends in the number of steps.
        about: what it is, in a few words.
        data: returns its data, from a data folder and a device.
        model: makes the model.
        loss: the loss, a callable of outputs and targets.
        batch: examples of a batch.
        steps: number of steps.
        large: True for a task meant for a GPU; `all` does not include it.
        held_out: True for a task on which no setting was chosen; `all` does not include it.
        odd: True for a task of `odd_tasks`; `all` does not include it.
    """

    name: str
    about: str
    data: Callable[[Path | None, str], Data]
    model: Callable[[], nn.Module]
    loss: Loss
    batch: int
    steps: int
    large: bool = False
    held_out: bool = False
    odd: bool = False

    @property
    def fingerprint(self) -> str:
        """A hash of what decides a run besides the method, so that a changed task is run anew."""
        with torch.random.fork_rng(devices=[]):
            model = self.model()
        parts = [self.batch, self.steps, repr(model), repr(self.loss)]
        parts += [_described(self.data), _described(self.model)]
        own = {type(part) for part in (*model.modules(), self.loss) if _is_own(type(part))}
        parts += sorted(inspect.getsource(part) for part in own)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _described(function: Callable[..., object]) -> str:
    """Return the source of a function with the arguments that are bound to it."""
    if isinstance(function, partial):
        arguments = (function.args, sorted(function.keywords.items()))
        return f"{inspect.getsource(function.func)}{arguments}"
    return inspect.getsource(function)


def _is_own(kind: type) -> bool:
    return kind.__module__.startswith("benchmarks")


# ---- data ---------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _dataset(name: str, folder: Path | None) -> datasets.Dataset:
    return datasets.load(name, folder, download=False)


def _images(
    folder: Path | None,
    device: str,
    *,
    name: str,
    target: str,
    side: int = 28,
    shape: str = "row",
) -> Data:
    """Return images and what a model has to predict of them.

    Args:
        folder: the data folder.
        device: where the data go.
        name: name of the data set.
        target: `label`, `image` for autoencoders, or `lower half` for the upper half as input.
        side: 28, or 14 for means over 2 × 2 pixels.
        shape: `row`, or `square` for standardised images `[N, 1, side, side]`.
    """
    data = _dataset(name, folder)

    def pair(images: Tensor, labels: Tensor | None) -> Pair:
        squares = images.view(-1, 1, 28, 28)
        if side == 14:
            squares = F.avg_pool2d(squares, 2)
        rows = squares.flatten(1).to(device)
        if target == "image":
            return rows, rows
        if target == "lower half":
            upper, lower = rows.chunk(2, dim=1)
            return upper.contiguous(), lower.contiguous()
        if labels is None:
            raise DatasetError(f"{name} has no labels; put its label files beside the images.")
        if shape == "square":
            rows = ((squares - data.train.mean()) / data.train.std()).to(device)
        return rows, labels.to(device)

    inputs, targets = pair(data.train, data.train_labels)
    test_labels = None if data.test_labels is None else data.test_labels[:TESTED]
    return Data(
        len(inputs), lambda i: (inputs[i], targets[i]), pair(data.test[:TESTED], test_labels)
    )


def _text(folder: Path | None, device: str, *, context: int) -> Data:
    """Return stretches of text and, flat, the next character at each of their positions."""
    base = folder or os.environ.get(VARIABLE)
    path = Path(base or ".") / "tinyshakespeare" / "input.txt"
    if not path.is_file():
        raise DatasetError(
            f"{path} not found. Name the folder that has tinyshakespeare/input.txt with --data-dir "
            f"or {VARIABLE}."
        )
    text = path.read_text()
    places = {character: place for place, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([places[character] for character in text], device=device)
    cut = int(0.9 * len(codes))
    steps = torch.arange(context + 1, device=device)

    def taken(part: Tensor, starts: Tensor) -> Pair:
        rows = part[starts.unsqueeze(1) + steps]
        return rows[:, :-1], rows[:, 1:].flatten()

    train, test = codes[:cut], codes[cut:]
    starts = torch.arange(0, len(test) - context, context, device=device)[: TESTED // context]
    return Data(len(train) - context, lambda i: taken(train, i), taken(test, starts))


CHARACTERS = 65
"""Number of different characters in the text."""


def _friedman(folder: Path | None, device: str, *, examples: int) -> Data:
    """Return Friedman's first regression problem: 10 inputs, 5 of which matter, no noise.

    Inputs and targets have mean zero and variance one.
    """
    numbers = torch.Generator().manual_seed(0)
    x = torch.rand(examples + TESTED, 10, generator=numbers)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = y + 10 * x[:, 3] + 5 * x[:, 4]
    x, y = (x - 0.5) * 12**0.5, ((y - y.mean()) / y.std()).unsqueeze(1)
    x, y = x.to(device), y.to(device)
    return Data(examples, lambda i: (x[i], y[i]), (x[examples:], y[examples:]))


# ---- losses -------------------------------------------------------------------------------------


class BceSummedOverPixels(nn.BCEWithLogitsLoss):
    """Cross-entropy summed over the pixels and averaged over the batch, the loss of the paper."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(input, target, reduction="sum") / len(input)


# ---- the tasks ----------------------------------------------------------------------------------


def ordinary() -> list[Task]:
    """Return the tasks of `all`."""
    mnist = partial(partial, _images, name="mnist")
    fashion = partial(partial, _images, name="fashion-mnist")
    curves = partial(partial, _images, name="curves", target="image")
    classes, bce, mse = nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss()
    bce_sum = nn.BCEWithLogitsLoss(reduction="sum")
    small = mnist(target="label", side=14)
    small_fashion = fashion(target="label", side=14)
    return [
        Task(
            "classifier-100",
            "MLP classifier, MNIST, ReLU",
            mnist(target="label"),
            partial(mlp, (784, 200, 100, 10), "relu"),
            *(classes, 128, 100),
        ),
        Task(
            "classifier-16-300",
            "MLP classifier, Fashion-MNIST, ReLU, small batches",
            small_fashion,
            partial(mlp, (196, 128, 128, 10), "relu"),
            *(classes, 16, 300),
        ),
        Task(
            "classifier-2000",
            "MLP classifier, Fashion-MNIST, tanh",
            small_fashion,
            partial(mlp, (196, 64, 64, 10), "tanh"),
            *(classes, 64, 2000),
        ),
        Task(
            "deep-layernorm-100",
            "MLP of 10 layers with LayerNorm, Fashion-MNIST, GELU",
            small_fashion,
            partial(normalised_mlp, 196, 64, 10, 10, "layer", "gelu"),
            *(classes, 256, 100),
        ),
        Task(
            "deep-batchnorm-600",
            "MLP of 8 layers with BatchNorm, MNIST, ReLU",
            small,
            partial(normalised_mlp, 196, 64, 8, 10, "batch", "relu"),
            *(classes, 100, 600),
        ),
        Task(
            "autoencoder-mean-100",
            "autoencoder, mean cross-entropy, MNIST, tanh",
            mnist(target="image"),
            partial(autoencoder, (784, 200, 100, 30), "tanh"),
            *(bce, 100, 100),
        ),
        Task(
            "autoencoder-mean-2000",
            "autoencoder, mean cross-entropy, MNIST, GELU",
            mnist(target="image", side=14),
            partial(autoencoder, (196, 64, 16), "gelu"),
            *(bce, 50, 2000),
        ),
        Task(
            "autoencoder-pixels-100",
            "autoencoder, cross-entropy summed over the pixels, CURVES, tanh",
            curves(),
            partial(autoencoder, (784, 200, 50, 10), "tanh"),
            *(BceSummedOverPixels(), 1000, 100),
        ),
        Task(
            "autoencoder-sum-200",
            "autoencoder, cross-entropy summed over pixels and batch, Fashion-MNIST, ReLU",
            fashion(target="image", side=14),
            partial(autoencoder, (196, 128, 64, 16), "relu"),
            *(bce_sum, 200, 200),
        ),
        Task(
            "autoencoder-mse-200",
            "autoencoder, mean squared error, Fashion-MNIST, ReLU",
            fashion(target="image", side=14),
            partial(autoencoder, (196, 128, 64, 16), "relu"),
            *(mse, 500, 200),
        ),
        Task(
            "halves-300",
            "regression of the lower from the upper half, MNIST, GELU",
            mnist(target="lower half", side=14),
            partial(mlp, (98, 128, 128, 98), "gelu"),
            *(mse, 32, 300),
        ),
        Task(
            "friedman-200",
            "regression of Friedman's function, ReLU",
            partial(_friedman, examples=4000),
            partial(mlp, (10, 64, 64, 1), "relu"),
            *(mse, 200, 200),
        ),
        Task(
            "friedman-2000",
            "regression of Friedman's function, tanh",
            partial(_friedman, examples=4000),
            partial(mlp, (10, 64, 64, 1), "tanh"),
            *(mse, 64, 2000),
        ),
        Task(
            "cnn-200",
            "CNN, MNIST, ReLU",
            mnist(target="label", shape="square"),
            partial(cnn, "relu", (8, 16), 28),
            *(classes, 64, 200),
        ),
        Task(
            "cnn-2000",
            "CNN, Fashion-MNIST, tanh",
            fashion(target="label", shape="square", side=14),
            partial(cnn, "tanh", (8, 16), 14),
            *(classes, 32, 2000),
        ),
        Task(
            "residual-cnn-100",
            "residual CNN with BatchNorm, Fashion-MNIST, ReLU",
            fashion(target="label", shape="square"),
            partial(residual_cnn, 12),
            *(classes, 64, 100),
        ),
        Task(
            "gpt-300",
            "GPT of 2 blocks, Shakespeare, GELU",
            partial(_text, context=32),
            partial(GPT, CHARACTERS, 2, 64, 4, 32, "small"),
            *(classes, 16, 300),
        ),
        Task(
            "gpt-2000",
            "GPT of 1 block with projections that start at zero, Shakespeare, GELU",
            partial(_text, context=32),
            partial(GPT, CHARACTERS, 1, 48, 3, 32, "zero"),
            *(classes, 16, 2000),
        ),
    ]


def large() -> list[Task]:
    """Return larger tasks for a GPU, which `all` does not include."""
    mnist = partial(partial, _images, name="mnist")
    fashion = partial(partial, _images, name="fashion-mnist")
    classes = nn.CrossEntropyLoss()
    return [
        Task(
            "large-classifier-1000",
            "MLP of 6 layers with LayerNorm, Fashion-MNIST, GELU",
            fashion(target="label"),
            partial(normalised_mlp, 784, 1024, 6, 10, "layer", "gelu"),
            *(classes, 512, 1000),
            large=True,
        ),
        Task(
            "large-autoencoder-mean-1000",
            "the paper's autoencoder, mean cross-entropy, MNIST, tanh",
            mnist(target="image"),
            partial(autoencoder, (784, 1000, 500, 250, 30), "tanh"),
            *(nn.BCEWithLogitsLoss(), 1000, 1000),
            large=True,
        ),
        Task(
            "large-autoencoder-mse-1000",
            "the paper's autoencoder, mean squared error, Fashion-MNIST, ReLU",
            fashion(target="image"),
            partial(autoencoder, (784, 1000, 500, 250, 30), "relu"),
            *(nn.MSELoss(), 256, 1000),
            large=True,
        ),
        Task(
            "large-residual-cnn-600",
            "residual CNN with BatchNorm, Fashion-MNIST, ReLU",
            fashion(target="label", shape="square"),
            partial(residual_cnn, 64),
            *(classes, 256, 600),
            large=True,
        ),
        Task(
            "large-gpt-1000",
            "GPT of 6 blocks, Shakespeare, GELU",
            partial(_text, context=128),
            partial(GPT, CHARACTERS, 6, 384, 6, 128, "small"),
            *(classes, 32, 1000),
            large=True,
        ),
    ]


def held_out() -> list[Task]:
    """Return tasks like those of `all` on which no setting of ours was chosen."""
    mnist = partial(partial, _images, name="mnist")
    fashion = partial(partial, _images, name="fashion-mnist")
    curves = partial(partial, _images, name="curves", target="image")
    classes, bce, mse = nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss()
    small = mnist(target="label", side=14)
    small_squares = partial(_images, target="label", shape="square", side=14)
    return [
        Task(
            "held-batchnorm-400",
            "MLP of 4 layers with BatchNorm, Fashion-MNIST, GELU",
            fashion(target="label", side=14),
            partial(normalised_mlp, 196, 128, 4, 10, "batch", "gelu"),
            *(classes, 64, 400),
            held_out=True,
        ),
        Task(
            "held-batchnorm-1000",
            "MLP of 5 layers with BatchNorm, MNIST, tanh",
            small,
            partial(normalised_mlp, 196, 48, 5, 10, "batch", "tanh"),
            *(classes, 50, 1000),
            held_out=True,
        ),
        Task(
            "held-layernorm-400",
            "MLP of 6 layers with LayerNorm, MNIST, ReLU",
            small,
            partial(normalised_mlp, 196, 96, 6, 10, "layer", "relu"),
            *(classes, 32, 400),
            held_out=True,
        ),
        Task(
            "held-residual-200",
            "residual CNN with BatchNorm, MNIST, ReLU",
            partial(small_squares, name="mnist"),
            partial(residual_cnn, 16),
            *(classes, 32, 200),
            held_out=True,
        ),
        Task(
            "held-residual-600",
            "residual CNN with BatchNorm, Fashion-MNIST, ReLU",
            partial(small_squares, name="fashion-mnist"),
            partial(residual_cnn, 8),
            *(classes, 128, 600),
            held_out=True,
        ),
        Task(
            "held-cnn-100",
            "CNN, MNIST, GELU",
            mnist(target="label", shape="square"),
            partial(cnn, "gelu", (12, 24), 28),
            *(classes, 256, 100),
            held_out=True,
        ),
        Task(
            "held-classifier-60",
            "MLP classifier, MNIST, tanh, large batches",
            mnist(target="label"),
            partial(mlp, (784, 300, 10), "tanh"),
            *(classes, 1000, 60),
            held_out=True,
        ),
        Task(
            "held-classifier-1000",
            "MLP classifier, MNIST, ReLU",
            small,
            partial(mlp, (196, 100, 100, 10), "relu"),
            *(classes, 32, 1000),
            held_out=True,
        ),
        Task(
            "held-curves-300",
            "autoencoder, mean cross-entropy, CURVES, ReLU",
            curves(),
            partial(autoencoder, (784, 250, 100, 20), "relu"),
            *(bce, 100, 300),
            held_out=True,
        ),
        Task(
            "held-autoencoder-600",
            "autoencoder, cross-entropy summed over the pixels, Fashion-MNIST, tanh",
            fashion(target="image", side=14),
            partial(autoencoder, (196, 100, 50, 8), "tanh"),
            *(BceSummedOverPixels(), 50, 600),
            held_out=True,
        ),
        Task(
            "held-halves-600",
            "regression of the lower from the upper half, Fashion-MNIST, ReLU",
            fashion(target="lower half", side=14),
            partial(mlp, (98, 200, 98), "relu"),
            *(mse, 128, 600),
            held_out=True,
        ),
        Task(
            "held-friedman-600",
            "regression of Friedman's function, GELU",
            partial(_friedman, examples=4000),
            partial(mlp, (10, 96, 96, 96, 1), "gelu"),
            *(mse, 32, 600),
            held_out=True,
        ),
        Task(
            "held-gpt-400",
            "GPT of 1 block, Shakespeare, GELU, small batches",
            partial(_text, context=64),
            partial(GPT, CHARACTERS, 1, 96, 4, 64, "small"),
            *(classes, 8, 400),
            held_out=True,
        ),
        Task(
            "held-gpt-600",
            "GPT of 3 blocks, Shakespeare, GELU",
            partial(_text, context=32),
            partial(GPT, CHARACTERS, 3, 32, 4, 32, "small"),
            *(classes, 32, 600),
            held_out=True,
        ),
    ]
