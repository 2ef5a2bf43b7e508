"""Passes that are not part of training record nothing, with gradients enabled or disabled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import assert_close, cross_entropy, weights
from promises.loops.plain import STEPS, data, each_model, each_variant, loco, make, plain, train
from torch import Tensor, nn

Evaluate = Callable[[nn.Module, Tensor, Tensor], object]


def gradients_on(model: nn.Module, x: Tensor, y: Tensor) -> None:
    cross_entropy(model(x), y).item()


def eval_mode(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.eval()
    cross_entropy(model(x), y)
    model.train()


def no_grad(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        model(x)


def inference_mode(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with torch.inference_mode():
        model(x)


def functional(model: nn.Module, x: Tensor, y: Tensor) -> None:
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.func.functional_call(model, parameters, (x,))


def saliency(model: nn.Module, x: Tensor, y: Tensor) -> None:
    x = x.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


EVALUATIONS = [gradients_on, eval_mode, no_grad, inference_mode, functional, saliency]


@each_variant
@each_model
@pytest.mark.parametrize("evaluate", EVALUATIONS)
@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_evaluation_changes_nothing(variant, kind, evaluate: Evaluate, place: str) -> None:  # type: ignore[no-untyped-def]
    model = make(kind)
    opt = loco(model, variant)
    other = data(kind, seed=77, rows=11)
    for seed in range(STEPS):
        x, y = data(kind, seed)
        if place == "before":
            evaluate(model, *other)
        loss = cross_entropy(model(x), y)
        if place == "between":
            evaluate(model, *other)
        loss.backward()
        if place == "after":
            evaluate(model, *other)
        opt.step()
        opt.zero_grad()
    assert_close(weights(model), train(variant, kind), 0.0)
    assert all(not layer.calls for layer in opt._layers)


def test_outputs_that_are_kept_hold_no_graph_beyond_their_own() -> None:
    """A list of outputs, as for a metric over an epoch, keeps no rows alive in the optimizer."""
    model = make()
    opt = loco(model)
    kept = [model(data(seed=seed)[0]) for seed in range(4)]
    plain(model, *data())
    assert [len(layer.calls) for layer in opt._layers] == [1, 1, 1]
    opt.step()
    assert len(kept) == 4
    assert all(not layer.calls for layer in opt._layers)


def test_a_model_trained_in_eval_mode() -> None:
    """Enabled gradients decide, not ``module.training``."""
    model = make()
    model.eval()
    opt = loco(model)
    for seed in range(STEPS):
        plain(model, *data(seed=seed))
        opt.step()
        opt.zero_grad()
    assert_close(weights(model), train(), 0.0)
