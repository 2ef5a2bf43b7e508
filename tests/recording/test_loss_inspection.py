"""What ``loss_fn=`` and ``output_transfer=`` tell: any loss is accepted, contradictions are named."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_close, batch, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp, transfers

ROWS = 5


class Renamed(nn.CrossEntropyLoss):
    """A subclass that computes what its base class computes."""


class Other(nn.CrossEntropyLoss):
    """A subclass that computes another loss."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(input.sigmoid(), target)


class Wrapped(nn.Module):
    def forward(self, logits: Tensor, classes: Tensor) -> Tensor:
        return 0.5 * F.cross_entropy(logits.reshape(-1, 4), classes.reshape(-1))


def binary_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The loss with logits, under the name of PyTorch's loss of probabilities."""
    return F.binary_cross_entropy_with_logits(logits, y)


CLASSES = torch.arange(ROWS) % 4
LOSSES: list[tuple[Callable[..., Tensor], Tensor, str]] = [
    (Renamed(), CLASSES, "softmax"),
    (Other(), batch(ROWS, 4), "sigmoid"),
    (Wrapped(), CLASSES, "softmax"),
    (lambda a, y: F.cross_entropy(a, y), CLASSES, "softmax"),
    (partial(F.cross_entropy, label_smoothing=0.1), CLASSES, "softmax"),
    (partial(F.mse_loss, reduction="sum"), batch(ROWS, 4), "linear"),
    (binary_cross_entropy, batch(ROWS, 4), "sigmoid"),
]


def model_of(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, width)).double()


def one_step(opt: LocoProp, model: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
    loss(model(batch(ROWS, 6))).backward()
    opt.step()
    opt.zero_grad()


def closure_step(opt: LocoProp, model: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
    def closure() -> Tensor:
        opt.zero_grad()
        value = loss(model(batch(ROWS, 6)))
        value.backward()
        return value

    opt.step(closure)


def last_row(opt: LocoProp) -> str:
    return next(line for line in opt.summary().splitlines() if line.startswith("2 "))


@pytest.mark.parametrize(("loss_fn", "y", "name"), LOSSES, ids=lambda v: str(v)[:24])
def test_the_transfer_is_read_from_the_graph_of_any_loss(
    loss_fn: Callable[..., Tensor], y: Tensor, name: str
) -> None:
    model, named = model_of(), model_of()
    opt = LocoProp(model, preset="paper-m", lr=1e-3, loss_fn=loss_fn)
    expected = LocoProp(named, preset="paper-m", lr=1e-3, output_transfer=name)
    for _ in range(2):
        one_step(opt, model, lambda a: loss_fn(a, y))
        one_step(expected, named, lambda a: loss_fn(a, y))
    assert name in last_row(opt)
    assert_close(weights(model), weights(named), 0.0)


def test_the_reduction_is_read_from_the_graph_too() -> None:
    settings: dict[str, Any] = {"preset": "paper-s", "lr": 1e-3, "local_reduction": "mean"}
    summed = partial(F.mse_loss, reduction="sum")
    model, known = model_of(), model_of()
    opt = LocoProp(model, loss_fn=summed, **settings)
    expected = LocoProp(known, loss_fn=nn.MSELoss(reduction="sum"), **settings)
    one_step(opt, model, lambda a: summed(a, batch(ROWS, 4)))
    one_step(expected, known, lambda a: summed(a, batch(ROWS, 4)))
    assert_close(weights(model), weights(known), 0.0)


@pytest.mark.parametrize("loss_fn", [nn.L1Loss(), lambda a: a.square().mean(), lambda a, y: 1.0])
def test_a_loss_without_a_known_transfer_is_accepted(loss_fn: Callable[..., Any]) -> None:
    model = model_of()
    opt = LocoProp(model, preset="paper-m", loss_fn=loss_fn)
    one_step(opt, model, lambda a: a.square().mean())
    assert "locoprop-s" in last_row(opt)
    assert "no known transfer is inside loss_fn=" in last_row(opt)


def test_looking_at_a_loss_draws_no_random_numbers_and_warns_of_nothing() -> None:
    def noisy(a: Tensor, y: Tensor) -> Tensor:
        warnings.warn("the user's own", stacklevel=1)
        return F.mse_loss(F.dropout(a), y)

    model = model_of()
    opt = LocoProp(model, preset="paper-m", loss_fn=noisy)
    before = torch.get_rng_state()
    one_step(opt, model, lambda a: a.square().mean())
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizer_is_pickled_once_its_loss_was_looked_at() -> None:
    model = model_of()
    opt = LocoProp(model, loss_fn=lambda a, y: F.mse_loss(a, y))
    one_step(opt, model, lambda a: a.square().mean())
    assert "linear" in last_row(opt)
    pickle.loads(pickle.dumps(opt))


def test_a_loss_is_a_function() -> None:
    with pytest.raises(TypeError, match=r"loss_fn= takes the loss itself.*not 'sigmoid'"):
        LocoProp(model_of(), loss_fn="sigmoid")


@pytest.mark.parametrize(
    "given", [{"loss_fn": nn.BCEWithLogitsLoss()}, {"output_transfer": "sigmoid"}]
)
@pytest.mark.parametrize("preset", ["general", "paper-m"])
def test_a_closure_that_trains_another_loss_is_named(given: dict[str, Any], preset: str) -> None:
    model = model_of()
    opt = LocoProp(model, preset=preset, **given)
    with pytest.warns(UserWarning, match=r"'softmax' inside, and .*= says 'sigmoid'") as found:
        closure_step(opt, model, lambda a: F.cross_entropy(a, CLASSES))
    assert len(found) == 1
    assert found[0].filename == __file__
    closure_step(opt, model, lambda a: F.cross_entropy(a, CLASSES))  # warns once


@pytest.mark.parametrize(
    ("given", "loss"),
    [
        ({"loss_fn": nn.MSELoss()}, lambda a: F.mse_loss(a.sigmoid(), batch(ROWS, 4))),
        ({"loss_fn": nn.BCELoss()}, lambda a: F.binary_cross_entropy(a.sigmoid(), batch(ROWS, 4))),
        ({"loss_fn": nn.CrossEntropyLoss()}, lambda a: 3 * F.cross_entropy(a, CLASSES)),
        ({"output_transfer": transfers.Tanh()}, lambda a: (a.cosh().log() - a).sum()),
    ],
    ids=["mse", "bce", "cross entropy", "tanh"],
)
def test_a_loss_that_agrees_is_no_contradiction(given: dict[str, Any], loss: Any) -> None:
    model = model_of()
    closure_step(LocoProp(model, preset="paper-m", **given), model, loss)


@pytest.mark.parametrize("name", ["tanh", "relu", "step"])
def test_an_output_transfer_that_no_loss_has_inside_is_named(name: str) -> None:
    with pytest.warns(UserWarning, match=f"output_transfer='{name}': no loss of PyTorch has"):
        LocoProp(model_of(), output_transfer=name)


def test_a_frozen_model_is_named() -> None:
    model = model_of().requires_grad_(False)
    with pytest.warns(UserWarning, match="All parameters of the model are frozen"):
        LocoProp(model)
    model[0].requires_grad_(True)
    LocoProp(model)


def test_the_class_of_a_loss_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a module such as nn.CrossEntropyLoss\(\)"):
        LocoProp(nn.Linear(3, 2), loss_fn=nn.CrossEntropyLoss)
