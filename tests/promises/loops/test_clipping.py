"""The local problem uses clipped gradients, also in the gradients of rows."""

from __future__ import annotations

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
    make,
    plain,
    train,
)
from torch import Tensor, nn


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m"])
@each_model
def test_clipping_the_norm_is_a_smaller_loss(variant: str, kind: str) -> None:
    """The gradient times a factor is the gradient of the loss times that factor."""
    factors: list[Tensor] = []

    def clip(model: nn.Module) -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        factors.append(0.05 / (norm + 1e-6))

    clipped = train(variant, kind, before_step=clip)
    assert all(factor < 0.9 for factor in factors)
    remaining = iter(factors)

    def scaled(model: nn.Module, x: Tensor, y: Tensor) -> None:
        (next(remaining) * cross_entropy(model(x), y)).backward()

    assert_close(clipped, train(variant, kind, scaled), 1e-10)
    assert distance(clipped, train(variant, kind)) > 1e-5


@each_variant
def test_a_bound_that_is_not_reached_changes_nothing(variant: str) -> None:
    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        nn.utils.clip_grad_value_(model.parameters(), 1e6)

    assert_close(train(variant, before_step=clip), train(variant), 0.0)


@each_iterated
@pytest.mark.parametrize(
    "clip",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-2),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
        lambda model: [setattr(p, "grad", p.grad.sign()) for p in model.parameters()],
    ],
)
def test_one_iteration_is_sgd_on_the_same_gradients(variant, clip) -> None:  # type: ignore[no-untyped-def]
    model, other = network(), network()
    opt = loco(model, variant, solver="sgd", local_steps=1, lr=0.05)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    for seed in range(3):
        for net, optimizer in ((model, opt), (other, sgd)):
            plain(net, *data(seed=seed))
            clip(net)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(weights(model), weights(other), 1e-12)


@each_variant
def test_clipping_each_micro_batch(variant: str) -> None:
    """The rows of the first micro-batch keep the factor of their part of the gradient."""
    results = []
    for clipped in (True, False):
        model = make()
        opt = loco(model, variant)
        x, y = data()
        cross_entropy(model(x[:5]), y[:5]).backward(retain_graph=not clipped)
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        factor = 0.05 / (torch.stack(norms).norm() + 1e-6)
        assert factor < 0.9
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        else:
            opt.zero_grad()
            (factor * cross_entropy(model(x[:5]), y[:5])).backward()
        cross_entropy(model(x[5:]), y[5:]).backward()
        assert [len(layer.inputs()) for layer in opt._layers] == [8, 8, 8]
        opt.step()
        results.append(weights(model))
    assert_close(*results, 1e-11)
