"""The law of the general defaults: how a loss is written does not change the trajectory.

The same problem with a mean or a sum, multiplied by a constant, in one batch or in several
micro-batches gives the same weights, up to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_close, batch, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp

STEPS = 24
ROWS = 12
Loss = Callable[[Tensor, Tensor], Tensor]


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


class Looked(nn.Module):
    """An embedding and a norm, which the fallback trains, beside layers with local problems."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 5), nn.LayerNorm(5)
        self.layer, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((7 * x[:, 0].abs()).long() % 7)
        return self.head(torch.tanh(self.norm(self.layer(x) + rows)))


def with_fallback() -> nn.Module:
    torch.manual_seed(0)
    return Looked().double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tanh": network,
    "relu": lambda: network("relu"),
    "convolution": convolutional,
    "fallback": with_fallback,
}


def mean(logits: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, y)


WRITTEN: dict[str, Loss] = {
    "mean over the batch": lambda a, y: 3 * mean(a, y),
    "sum": lambda a, y: F.binary_cross_entropy_with_logits(a, y, reduction="sum"),
    "times 1000": lambda a, y: 1000 * mean(a, y),
    "times 0.01": lambda a, y: 0.01 * mean(a, y),
}


def trained(
    model_of: Callable[[], nn.Module], loss: Loss, parts: int = 1, **settings: Any
) -> list[Tensor]:
    model = model_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the fallback is AdamW
        opt = LocoProp(model, **settings)
    for step in range(STEPS):
        x = batch(ROWS, 6, seed=step)
        for part in x.chunk(parts):
            (loss(model(part), part[:, :3].round()) / parts).backward()
        opt.step()
        opt.zero_grad()
    return weights(model)


AVERAGED = {
    "variant": "locoprop-m",
    "solver": "preconditioned-averaged",
    "output_transfer": "sigmoid",
}


@pytest.mark.parametrize("settings", [{}, {"preset": "spectral"}, AVERAGED], ids=str)
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("model", MODELS)
def test_the_scale_of_the_loss_changes_nothing(
    model: str, name: str, settings: dict[str, Any]
) -> None:
    expected = trained(MODELS[model], mean, **settings)
    assert_close(trained(MODELS[model], WRITTEN[name], **settings), expected, 1e-8)


@pytest.mark.parametrize("parts", [2, 3, 12])
@pytest.mark.parametrize("model", MODELS)
def test_micro_batches_change_nothing(model: str, parts: int) -> None:
    expected = trained(MODELS[model], mean)
    assert_close(trained(MODELS[model], mean, parts), expected, 1e-8)


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_of_repeated_rows_changes_nothing(model: str) -> None:
    """The step depends on what the rows are, not on how many there are."""
    twice: Loss = lambda a, y: mean(a.repeat(2, 1), y.repeat(2, 1))  # noqa: E731
    expected = trained(MODELS[model], mean)
    assert_close(trained(MODELS[model], twice), expected, 1e-8)


def test_a_loss_of_any_scale_trains() -> None:
    """Without parameters of a fallback, even a loss whose gradients are far below rounding does."""
    tiny: Loss = lambda a, y: 1e-30 * mean(a, y)  # noqa: E731
    assert_close(trained(network, tiny), trained(network, mean), 1e-8)


@pytest.mark.parametrize(
    "given",
    [
        {"loss_fn": nn.BCEWithLogitsLoss()},
        {"loss_fn": nn.BCEWithLogitsLoss(reduction="sum")},
        {"loss_fn": mean},
        {"loss_fn": lambda a, y: 3 * mean(a, y)},
        {"output_transfer": "sigmoid"},
        {"output_transfer": "softmax"},
    ],
    ids=["mean", "sum", "function", "lambda", "sigmoid", "softmax"],
)
@pytest.mark.parametrize("model", MODELS)
def test_naming_the_loss_changes_nothing(model: str, given: dict[str, Any]) -> None:
    expected = trained(MODELS[model], mean)
    assert_close(trained(MODELS[model], mean, **given), expected, 0.0)
