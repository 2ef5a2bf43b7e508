"""Several losses and backward calls equal one backward pass of their sum."""

from __future__ import annotations

import pytest
import torch
from cases import assert_close, cross_entropy, weights
from promises.loops.plain import data, distance, each_model, each_variant, loco, make, plain, train
from torch import Tensor, nn


def both(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    (cross_entropy(out, y) + 0.5 * out.square().sum()).backward()


def one_after_the_other(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    cross_entropy(out, y).backward(retain_graph=True)
    (0.5 * out.square().sum()).backward()


def at_the_same_time(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    torch.autograd.backward([cross_entropy(out, y), 0.5 * out.square().sum()])


@each_variant
@each_model
@pytest.mark.parametrize("backward", [one_after_the_other, at_the_same_time])
def test_two_losses_on_one_graph(variant, kind, backward) -> None:  # type: ignore[no-untyped-def]
    """The rows of the call count once, with the sum of both gradients."""
    assert_close(train(variant, kind, backward), train(variant, kind, both), 1e-11)
    assert distance(train(variant, kind, both), train(variant, kind)) > 1e-6


class TwoHeads(nn.Module):
    """One body and two heads; a loss may use one head or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 5)
        self.one, self.two = nn.Linear(5, 3), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.one(h), self.two(h)


@each_variant
def test_a_loss_for_each_head(variant: str) -> None:
    def separate(model: nn.Module, x: Tensor, y: Tensor) -> None:
        one, two = model(x)
        cross_entropy(one, y).backward(retain_graph=True)
        cross_entropy(two, 1 - y).backward()

    def together(model: nn.Module, x: Tensor, y: Tensor) -> None:
        one, two = model(x)
        (cross_entropy(one, y) + cross_entropy(two, 1 - y)).backward()

    results = [train(variant, backward=b, model=TwoHeads()) for b in (separate, together)]
    assert_close(*results, 1e-11)


def test_a_head_without_a_loss_keeps_its_weights() -> None:
    model = TwoHeads()
    before = weights(model.two)

    def first(model: nn.Module, x: Tensor, y: Tensor) -> None:
        cross_entropy(model(x)[0], y).backward()

    train(model=model, backward=first)
    assert_close(weights(model.two), before, 0.0)


@each_variant
def test_two_models_in_one_loss(variant: str) -> None:
    """Each has its own optimizer; the generator trains through an unchanged discriminator."""

    def pair(detour: bool) -> list[Tensor]:
        first, second = make(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        torch.manual_seed(1)
        for p in second.parameters():
            nn.init.normal_(p, std=0.3)
        opts = loco(first, variant), loco(second, variant)
        for seed in range(3):
            x, y = data(seed=seed)
            cross_entropy(second(first(x)), y).backward()
            opts[0].step()
            opts[0].zero_grad()
            opts[1].zero_grad()
            hidden = first(x).detach() if detour else first(x)
            cross_entropy(second(hidden), 1 - y).backward()
            opts[1].step()
            opts[1].zero_grad()
            opts[0].zero_grad()
        return [*weights(first), *weights(second)]

    assert_close(pair(detour=True), pair(detour=False), 1e-12)


def test_a_scalar_gradient_weights_the_loss() -> None:
    def weighted(model: nn.Module, x: Tensor, y: Tensor) -> None:
        cross_entropy(model(x), y).backward(torch.tensor(0.5, dtype=x.dtype))

    def halved(model: nn.Module, x: Tensor, y: Tensor) -> None:
        (0.5 * cross_entropy(model(x), y)).backward()

    for variant in ("locoprop-m", "pocoprop-s"):
        one, other = (train(variant, backward=b) for b in (weighted, halved))
        assert_close(one, other, 1e-12)
        assert distance(one, train(variant, backward=plain)) > 1e-6
