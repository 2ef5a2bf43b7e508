"""``torch.autograd.grad`` for other purposes, and penalties on gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import assert_close, cross_entropy, network, weights
from promises.loops.plain import (
    data,
    distance,
    each_iterated,
    each_model,
    each_variant,
    loco,
    plain,
    train,
)
from torch import Tensor, nn


def before(model: nn.Module, x: Tensor, y: Tensor) -> None:
    asked = x.clone().requires_grad_()
    torch.autograd.grad(cross_entropy(model(asked), y), asked)
    plain(model, x, y)


def after(model: nn.Module, x: Tensor, y: Tensor) -> None:
    plain(model, x, y)
    asked = x.clone().requires_grad_()
    torch.autograd.grad(cross_entropy(model(asked), y), asked)


def in_the_same_graph(model: nn.Module, x: Tensor, y: Tensor) -> None:
    asked = x.clone().requires_grad_()
    loss = cross_entropy(model(asked), y)
    torch.autograd.grad(loss, asked, retain_graph=True)
    loss.backward()


def of_the_weights(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = cross_entropy(model(x), y)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()


def by_a_jacobian(model: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.autograd.functional.jacobian(lambda z: model(z).sum(0), x)
    plain(model, x, y)


@each_variant
@each_model
@pytest.mark.parametrize("ask", [before, after, in_the_same_graph, of_the_weights, by_a_jacobian])
def test_asking_for_other_gradients_changes_nothing(variant, kind, ask) -> None:  # type: ignore[no-untyped-def]
    assert_close(train(variant, kind, ask), train(variant, kind))


def penalized(model: nn.Module, x: Tensor, y: Tensor, weight: float = 0.5) -> Tensor:
    """Return a loss and the squared norm of its gradient with respect to the inputs."""
    asked = x.clone().requires_grad_()
    loss = cross_entropy(model(asked), y)
    (gradient,) = torch.autograd.grad(loss, asked, create_graph=True)
    return loss + weight * len(x) * gradient.square().sum()


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
@each_model
def test_a_penalty_on_the_gradient(variant: str, kind: str) -> None:
    """The penalty's part of ``p.grad`` belongs to the problem; the rows are those of the loss."""

    def in_the_loss(model: nn.Module, x: Tensor, y: Tensor) -> None:
        penalized(model, x, y).backward()

    def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> None:
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(penalized(model, x, y), parameters)
        plain(model, x, y)
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g

    one, other = (train(variant, kind, b) for b in (in_the_loss, by_hand))
    assert_close(one, other, 1e-11)
    assert distance(one, train(variant, kind)) > 1e-6


@each_iterated
def test_one_iteration_on_a_penalized_loss_is_sgd(variant: str) -> None:
    model, other = network(), network()
    opt = loco(model, variant, solver="sgd", local_steps=1, lr=0.05)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    for seed in range(3):
        for net, optimizer in ((model, opt), (other, sgd)):
            penalized(net, *data(seed=seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(weights(model), weights(other), 1e-12)


@each_variant
@pytest.mark.parametrize("regularize", [lambda p: p.square().sum(), lambda p: p.abs().sum()])
def test_a_penalty_on_the_weights(variant: str, regularize: Callable[[Tensor], Tensor]) -> None:
    """The penalty is part of the loss, or has its own backward pass."""

    def in_the_loss(model: nn.Module, x: Tensor, y: Tensor) -> None:
        loss = cross_entropy(model(x), y)
        (loss + 0.1 * torch.stack([regularize(p) for p in model.parameters()]).sum()).backward()

    def apart(model: nn.Module, x: Tensor, y: Tensor) -> None:
        cross_entropy(model(x), y).backward()
        (0.1 * torch.stack([regularize(p) for p in model.parameters()]).sum()).backward()

    assert_close(train(variant, backward=in_the_loss), train(variant, backward=apart), 1e-11)
