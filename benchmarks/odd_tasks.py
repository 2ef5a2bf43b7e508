"""Tasks of other kinds than those of `default_tasks`: unusual losses, models, sizes and units.

`python -m benchmarks.defaults run --tasks odd` runs them. Images are the first 10,000 of a data set, at
14 × 14 pixels; most other data are random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import default_tasks, odd_models
from benchmarks.default_models import autoencoder, mlp
from benchmarks.default_tasks import CHARACTERS, TESTED, Data, Task

IMAGES = 10_000
RANDOM = 4_000
"""Training examples of images and of random numbers."""

WORDS = 2_000


def _data(x: Tensor, y: Tensor, device: str, test: int = TESTED) -> Data:
    """Return data whose last examples are the test."""
    x, y = x.to(device), y.to(device)
    size = len(x) - test
    return Data(size, lambda i: (x[i], y[i]), (x[size:], y[size:]))


def _images(
    folder: Path | None, device: str, *, name: str = "mnist", target: str, scale: float = 1.0
) -> Data:
    """Return images `[N, 196]`, or `[N, 1, 14, 14]` for the targets `denoised` and `square label`.

    Args:
        folder: the data folder.
        device: where the data go.
        name: name of the data set.
        target: `label`, `square label`, `noisy label`, `properties` of digits, `rewarded choices`,
            `image`, or `denoised`.
        scale: factor of the pixels, which are between 0 and 1.
    """
    data = default_tasks._dataset(name, folder)
    squares = torch.cat([data.train[:IMAGES], data.test[:TESTED]]).view(-1, 1, 28, 28)
    squares = F.avg_pool2d(squares, 2)
    assert data.train_labels is not None
    assert data.test_labels is not None
    labels = torch.cat([data.train_labels[:IMAGES], data.test_labels[:TESTED]])
    numbers = torch.Generator().manual_seed(0)
    if target == "denoised":
        noise = torch.randn(squares.shape, generator=numbers)
        return _data(squares + 0.3 * noise, squares, device)
    if target == "square label":
        return _data(scale * squares, labels, device)
    rows = squares.flatten(1)
    if target == "image":
        targets = rows
    elif target == "label":
        targets = labels
    elif target == "properties":
        named = [labels % 2 == 0, labels > 4, labels % 3 == 0, labels == 7, labels < 2]
        targets = torch.stack(named, 1).float()
    else:
        others = torch.randint(10, labels.shape, generator=numbers)
        if target == "noisy label":
            targets = torch.where(torch.rand(len(labels), generator=numbers) < 0.4, others, labels)
        else:  # rewarded choices
            targets = torch.stack([others.float(), 10.0 * (others == labels) - 1], 1)
    return _data(scale * rows, targets, device)


def _normals(*shape: int) -> tuple[Tensor, torch.Generator]:
    """Return random inputs for training and test, and the generator of further numbers."""
    numbers = torch.Generator().manual_seed(0)
    return torch.randn(RANDOM + TESTED, *shape, generator=numbers), numbers


def _regression(folder: Path | None, device: str, *, target: str) -> Data:
    """Return 8 normal inputs and a function of the first three."""
    x, numbers = _normals(8)
    first, second, third = x[:, :1], x[:, 1:2], x[:, 2:3]
    wave = torch.sin(2 * first)
    if target == "hundreds":
        y = 100 * (wave + second * third)
    elif target == "outliers":
        y = 100 * (wave + second * third)
        y = torch.where(torch.rand(y.shape, generator=numbers) < 0.03, 20 * y, y)
    elif target == "offset":
        y = 50 + wave
    elif target == "noisy":
        y = 10 * torch.sin(first) + 3 * torch.randn(first.shape, generator=numbers)
    else:  # counts
        rate = (1 + 0.8 * first + 0.5 * second * third).clamp(max=4).exp()
        y = torch.poisson(rate, generator=numbers)
    return _data(x, y, device)


def _linear(folder: Path | None, device: str) -> Data:
    """Return a linear function of 30 inputs, with noise."""
    x, numbers = _normals(30)
    weights = torch.randn(30, 1, generator=numbers)
    return _data(x, x @ weights + 0.1 * torch.randn(len(x), 1, generator=numbers), device)


def _rare_labels(folder: Path | None, device: str) -> Data:
    """Return 30 labels, each true for about one example of 70."""
    x, numbers = _normals(20)
    scores = x @ torch.randn(20, 30, generator=numbers) / 20**0.5
    return _data(x, (scores > 2.2).float(), device)


def _table(folder: Path | None, device: str, *, scaled: bool) -> Data:
    """Return 10 columns and 3 classes; columns that are not scaled have sizes from 0.01 to 1000."""
    x, _ = _normals(10)
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).long() + (x[:, 3] > 1).long()
    if not scaled:
        x = x * torch.tensor([1, 1, 10, 100, 0.1, 0.01, 1000, 1, 5, 0.5])
        x = x + torch.tensor([0, 5, 0, 100, 0, 0, 1000, 0, 0, 3])
    return _data(x, y, device)


def _quadrants(folder: Path | None, device: str) -> Data:
    """Return points of a square and whether their coordinates have the same sign."""
    x = 2 * torch.rand(RANDOM + TESTED, 2, generator=torch.Generator().manual_seed(0)) - 1
    return _data(x, (x[:, :1] * x[:, 1:] > 0).float(), device)


def _sine(folder: Path | None, device: str) -> Data:
    """Return three waves of a sine."""
    x = 6 * torch.rand(RANDOM + TESTED, 1, generator=torch.Generator().manual_seed(0)) - 3
    return _data(x, torch.sin(3 * x), device)


def _spiral(folder: Path | None, device: str) -> Data:
    """Return points on three spirals."""
    noise, numbers = _normals(2)
    classes, radius = torch.arange(len(noise)) % 3, 3 * torch.rand(len(noise), generator=numbers)
    angle = 2 * radius + 2 * torch.pi / 3 * classes
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1) / 3
    return _data(points + 0.02 * noise, classes, device)


def _ratings(folder: Path | None, device: str) -> Data:
    """Return users, items, and inner products of four hidden numbers of each."""
    numbers = torch.Generator().manual_seed(0)
    tables = [torch.randn(size, 4, generator=numbers) for size in (500, 300)]
    x = torch.stack(
        [torch.randint(len(t), (20_000 + TESTED,), generator=numbers) for t in tables], 1
    )
    users, items = (table[column] for table, column in zip(tables, x.T, strict=True))
    return _data(x, (users * items).sum(1, keepdim=True) / 2, device)


def _signals(folder: Path | None, device: str) -> Data:
    """Return noise and whether the mean of five neighbours is above one anywhere."""
    x, _ = _normals(1, 64)
    return _data(x, (x.unfold(2, 5, 1).mean(-1).abs().amax((1, 2)) > 1).long(), device)


def _sets(folder: Path | None, device: str) -> Data:
    """Return sets of 12 points in space and the largest distance from the origin."""
    x, _ = _normals(12, 3)
    return _data(x, x.norm(dim=2).amax(1, keepdim=True), device)


def _words(folder: Path | None, device: str) -> Data:
    """Return bags of 40 runs of three characters, and from which fifth of a text they are."""
    text = default_tasks._text(folder, device, context=42)
    starts = torch.arange(0, min(300_000, text.size), 42, device=device)
    codes = text.batch(starts)[0]
    runs = (codes[:, :-2] * CHARACTERS + codes[:, 1:-1]) * CHARACTERS + codes[:, 2:]
    fifths = 5 * starts // (int(starts[-1]) + 1)
    numbers = torch.Generator().manual_seed(0)
    order = torch.randperm(len(starts), generator=numbers).to(device)
    return _data((runs % WORDS)[order], fifths[order], device, test=len(starts) // 5)


# ---- the tasks ----------------------------------------------------------------------------------


def tasks() -> list[Task]:
    """Return the tasks."""
    images = partial(partial, _images)
    classes, mse = nn.CrossEntropyLoss(), nn.MSELoss()
    label, square = images(target="label"), images(target="square label")
    image = images(target="image")
    text = partial(default_tasks._text, context=32)
    hundreds = partial(_regression, target="hundreds")
    small = partial(mlp, (196, 64, 10), "relu")
    table = partial(mlp, (10, 64, 64, 3), "relu")
    regression = partial(mlp, (8, 64, 64, 1), "relu")
    smooth_regression = partial(mlp, (8, 64, 64, 1), "tanh")
    rows: list[tuple[str, str, Callable[..., Data], Callable[[], nn.Module], Any, int]] = [
        ("bag-400", "bags of words, embedding and one layer", _words,
         partial(odd_models.BagOfWords, WORDS, 32, 5), classes, 32),
        ("lstm-text-300", "LSTM, Shakespeare", text,
         partial(odd_models.RecurrentText, "LSTM", CHARACTERS, 64), classes, 32),
        ("gru-text-300", "GRU, Shakespeare", text,
         partial(odd_models.RecurrentText, "GRU", CHARACTERS, 64), classes, 32),
        ("lstm-rows-200", "LSTM over the rows of images", square,
         partial(odd_models.RecurrentRows, 14, 48, 10), classes, 64),
        ("l1-300", "autoencoder, L1 loss", image,
         partial(autoencoder, (196, 100, 50, 16), "relu"), nn.L1Loss(), 64),
        ("smooth-l1-300", "autoencoder, smooth L1 loss, Fashion-MNIST",
         images(name="fashion-mnist", target="image"),
         partial(autoencoder, (196, 100, 50, 16), "tanh"), nn.SmoothL1Loss(), 64),
        ("two-numbers-300", "autoencoder with a code of 2 numbers", image,
         partial(autoencoder, (196, 64, 2), "tanh"), mse, 64),
        ("linear-autoencoder-300", "linear autoencoder", image,
         odd_models.linear_autoencoder, mse, 64),
        ("huber-400", "regression with outliers, targets of size 100, Huber loss",
         partial(_regression, target="outliers"), regression, nn.HuberLoss(), 32),
        ("hundreds-400", "regression, targets of size 100", hundreds, regression, mse, 32),
        ("hundreds-2000", "regression, targets of size 100", hundreds, regression, mse, 32),
        ("offset-400", "regression, targets near 50", partial(_regression, target="offset"),
         smooth_regression, mse, 32),
        ("properties-300", "five properties of digits", images(target="properties"),
         partial(mlp, (196, 64, 5), "gelu"), nn.BCEWithLogitsLoss(), 64),
        ("rare-labels-300", "30 rare labels", _rare_labels,
         partial(mlp, (20, 64, 30), "relu"), nn.BCEWithLogitsLoss(), 64),
        ("table-unscaled-400", "table with columns of sizes from 0.01 to 1000",
         partial(_table, scaled=False), table, classes, 64),
        ("table-400", "table with columns of size 1", partial(_table, scaled=True), table,
         classes, 64),
        ("pixels-255-400", "MLP, pixels from 0 to 255", images(target="label", scale=255.0),
         small, classes, 64),
        ("pixels-0.01-400", "MLP, pixels from 0 to 0.01", images(target="label", scale=0.01),
         small, classes, 64),
        ("vit-200", "vision transformer of PyTorch's modules", square,
         partial(odd_models.VisionTransformer, "torch", 48, 2), classes, 32),
        ("vit-own-200", "vision transformer of linear layers", square,
         partial(odd_models.VisionTransformer, "own", 48, 2), classes, 32),
        ("batchnorm-8-400", "CNN with BatchNorm, batches of 8", square, odd_models.batchnorm_cnn,
         classes, 8),
        ("batch-1-400", "MLP, batches of 1", label, small, classes, 1),
        ("mlp-2-16-1-500", "MLP 2-16-1, quadrants", _quadrants, partial(mlp, (2, 16, 1), "tanh"),
         nn.BCEWithLogitsLoss(), 16),
        ("sine-500", "MLP 1-32-32-1, sine", _sine, partial(mlp, (1, 32, 32, 1), "tanh"), mse, 100),
        ("spiral-300", "MLP 2-64-64-3, spirals, all examples in each batch", _spiral,
         partial(mlp, (2, 64, 64, 3), "relu"), classes, RANDOM),
        ("logistic-300", "logistic regression", label, partial(nn.Linear, 196, 10), classes, 64),
        ("linear-300", "linear regression", _linear, partial(nn.Linear, 30, 1), mse, 32),
        ("ratings-600", "recommender of two embeddings and an MLP", _ratings,
         partial(odd_models.Recommender, 500, 300, 16), mse, 64),
        ("noisy-labels-400", "MLP, four of ten labels are random", images(target="noisy label"),
         partial(mlp, (196, 128, 10), "relu"), classes, 64),
        ("dropout-400", "MLP with dropout, Fashion-MNIST",
         images(name="fashion-mnist", target="label"), odd_models.dropout_mlp, classes, 64),
        ("vae-400", "variational autoencoder", image, partial(odd_models.Vae, 196, 100, 16),
         odd_models.Elbo(), 64),
        ("contrastive-300", "contrastive loss", label, odd_models.unit_embedding,
         odd_models.Contrastive(), 64),
        ("poisson-400", "regression of counts, Poisson loss", partial(_regression, target="counts"),
         smooth_regression, nn.PoissonNLLLoss(), 32),
        ("quantiles-400", "regression of three quantiles", partial(_regression, target="noisy"),
         partial(mlp, (8, 64, 3), "relu"), odd_models.Quantiles(), 32),
        ("sigmoid-300", "MLP with sigmoids", label, odd_models.sigmoid_mlp, classes, 64),
        ("deep-300", "MLP of 9 layers without norms", label,
         partial(mlp, (196, *[64] * 8, 10), "relu"), classes, 64),
        ("signals-300", "CNN of one dimension", _signals, odd_models.signal_cnn, classes, 32),
        ("unet-200", "removal of noise by a U-Net", images(target="denoised"), odd_models.UNet, mse,
         32),
        ("depthwise-300", "depthwise CNN with GroupNorm, Fashion-MNIST",
         images(name="fashion-mnist", target="square label"), odd_models.depthwise_cnn, classes,
         32),
        ("tied-gpt-300", "GPT with tied embeddings, Shakespeare", text,
         partial(odd_models.TiedGPT, CHARACTERS, 48, 32), classes, 16),
        ("sets-400", "regression on sets of points", _sets, odd_models.SetModel, mse, 32),
        ("rewards-400", "classes weighted by rewards of either sign",
         images(target="rewarded choices"), partial(mlp, (196, 64, 10), "tanh"),
         odd_models.RewardedChoices(), 64),
    ]  # fmt: skip
    return [
        Task(f"odd-{name}", *others, steps=int(name.rsplit("-", 1)[1]), odd=True)
        for name, *others in rows
    ]
