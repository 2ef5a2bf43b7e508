"""The transfer inside ``loss_fn=`` is that of a layer only if the loss gets the layer's own output."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_locoprop import LocoProp
from torch_locoprop.recording.transfer_assignment import CHANGED

Y = torch.tensor([0, 2, 1, 0, 2, 1])
Change = Callable[[Tensor], Any]


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * g


def found(loss: nn.Module, model: nn.Module, take_loss: Change) -> tuple[str | None, str]:
    """Return transfer and note of the model's last layer after a step."""
    opt = LocoProp(model, loss_fn=loss, variant="locoprop-m", lr=1e-3)
    take_loss(model).backward()
    opt.step()
    layer = opt._layers[-1]
    return layer.transfer and layer.transfer.name, layer.note


def flat_model(d: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, d))


X, SEQUENCE = batch(6, 4).float(), batch(2, 3, 4).float()
BARE: dict[str, Change] = {
    "as it is": lambda m: (m(X), Y),
    "in another precision": lambda m: (m(X).double(), Y),
    "some rows": lambda m: (m(X)[:4], Y[:4]),
    "masked rows": lambda m: (m(X)[Y > 0], Y[Y > 0]),
    "rows joined": lambda m: (m(SEQUENCE).view(-1, 3), Y),
    "features first": lambda m: (m(SEQUENCE).transpose(1, 2), Y.view(2, 3)),
    "the next token": lambda m: (m(SEQUENCE)[:, :-1].transpose(1, 2), Y.view(2, 3)[:, 1:]),
    "the last token": lambda m: (m(SEQUENCE)[:, -1], Y[:2]),
    "two calls": lambda m: (torch.cat([m(X[:2]), m(X[2:])]), Y),
}
CHANGED_BEFORE: dict[str, Change] = {
    "a temperature": lambda m: (m(X) / 2, Y),
    "a margin": lambda m: (m(X) - F.one_hot(Y, 3), Y),
    "a mask of classes": lambda m: (m(X).masked_fill(torch.arange(3) > 1, -9.0), Y % 2),
    "another model behind it": lambda m: (nn.Linear(3, 3)(m(X)), Y),
    "some classes": lambda m: (m(X)[:, :2], Y % 2),
    "classes of two calls": lambda m: (torch.cat([m(X), m(X)], 1), Y),
    "of another model": lambda m: (flat_model()(X) + 0 * m(X).sum(), Y),
}


@pytest.mark.parametrize("how", BARE)
def test_a_loss_of_the_output_itself(how: str) -> None:
    loss = nn.CrossEntropyLoss()
    assert found(loss, flat_model(), lambda m: loss(*BARE[how](m))) == ("softmax", "")


@pytest.mark.parametrize("how", CHANGED_BEFORE)
def test_a_loss_of_something_else(how: str) -> None:
    loss = nn.CrossEntropyLoss()
    arguments = CHANGED_BEFORE[how]
    assert found(loss, flat_model(), lambda m: loss(*arguments(m))) == (None, CHANGED)


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.MSELoss()])
def test_elements_may_be_moved_if_each_has_a_transfer_of_its_own(loss: nn.Module) -> None:
    name = "sigmoid" if isinstance(loss, nn.BCEWithLogitsLoss) else "linear"
    target = torch.rand(6, 2)
    assert found(loss, flat_model(), lambda m: loss(m(X)[:, :2], target)) == (name, "")
    assert found(loss, flat_model(), lambda m: loss(0.5 * m(X)[:, :2], target)) == (None, CHANGED)
    assert found(loss, flat_model(1), lambda m: loss(m(X).squeeze(-1), target[:, 0])) == (name, "")


def test_a_generator_does_not_get_the_transfer_of_the_discriminators_loss() -> None:
    loss, discriminator = nn.BCEWithLogitsLoss(), flat_model(1)
    generator = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
    one = torch.ones(6, 1)
    assert found(loss, generator, lambda m: loss(discriminator(m(X)), one)) == (None, CHANGED)
    other = LocoProp(discriminator, loss_fn=loss, variant="locoprop-m", lr=1e-3)
    other.zero_grad()
    (loss(discriminator(X), one) + loss(discriminator(generator(X).detach()), 0 * one)).backward()
    other.step()
    assert other._layers[-1].transfer is not None
    assert other._layers[-1].transfer.name == "sigmoid"


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x), self.other(x)


def test_a_head_that_another_loss_trains() -> None:
    loss, model = nn.CrossEntropyLoss(), TwoHeads()
    opt = LocoProp(model, loss_fn=loss, variant="locoprop-m", lr=1e-3)
    a, b = model(X)
    (loss(a, Y) + b.square().mean()).backward()
    opt.step()
    known = [(layer.transfer and layer.transfer.name, layer.note) for layer in opt._layers]
    assert known == [("softmax", ""), (None, CHANGED)]
    assert CHANGED in opt.summary()


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


UNKNOWN: dict[str, tuple[nn.Module, Change]] = {
    "the user's autograd function": (flat_model(), lambda a: Scale.apply(a)),
    "a checkpoint": (Checkpointed(*flat_model()), lambda a: a),
}


@pytest.mark.parametrize("how", UNKNOWN)
def test_where_it_is_not_known_what_the_loss_gets(how: str) -> None:
    loss, (model, change) = nn.CrossEntropyLoss(), UNKNOWN[how]
    assert CHANGED not in found(loss, model, lambda m: loss(change(m(X)), Y))


def test_a_loss_that_is_not_called_by_the_loop_is_believed() -> None:
    loss, model = nn.CrossEntropyLoss(), flat_model()
    with torch.no_grad():
        loss(model(X) / 2, Y)
    assert found(loss, model, lambda m: F.cross_entropy(m(X), Y)) == ("softmax", "")


def test_what_the_user_names_is_believed() -> None:
    loss, model = nn.CrossEntropyLoss(), flat_model()
    opt = LocoProp(model, loss_fn=loss, output_transfer="softmax", variant="locoprop-m", lr=1e-3)
    loss(model(X) / 2, Y).backward()
    opt.step()
    assert opt._layers[-1].transfer is not None


def test_the_loss_keeps_no_hook_when_the_optimizer_is_gone() -> None:
    loss, model = nn.CrossEntropyLoss(), flat_model()
    opt = LocoProp(model, loss_fn=loss)
    assert loss._forward_hooks
    again = copy.deepcopy(opt)
    del opt
    assert not loss._forward_hooks
    loss(again._model(X), Y).backward()
    again.step()
