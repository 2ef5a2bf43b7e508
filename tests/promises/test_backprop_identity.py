"""One local iteration is a BackProp step, for every variant, transfer and input shape."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import (
    ACTIVATIONS,
    BACKPROP_VARIANTS,
    assert_close,
    batch,
    cross_entropy,
    network,
    weights,
)
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.paper.transfers import get
from torch_locoprop.recording import row_gradients
from torch_locoprop.recording.transfer_assignment import assign_transfer

SHAPES = {2: (7,), 3: (4, 3), 4: (2, 3, 2)}


def sgd_step(model: nn.Module, x: Tensor, y: Tensor, lr: float) -> list[Tensor]:
    """Return the weights after a step of plain SGD, by autograd."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(cross_entropy(model(x), y), parameters)
    return [p.detach() - lr * g for p, g in zip(parameters, gradients, strict=True)]


@pytest.mark.parametrize("dimensions", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("variant", BACKPROP_VARIANTS)
def test_one_iteration_is_backprop(
    variant: str, activation: str, bias: bool, dimensions: int
) -> None:
    model = network(activation, bias)
    x, y = batch(*SHAPES[dimensions], 6), batch(*SHAPES[dimensions], 3, seed=2)
    expected = sgd_step(model, x, y, lr=0.03 * 5.0)
    before = weights(model)
    opt = LocoProp(
        model,
        lr=0.03,
        gamma=5.0,
        variant=variant,
        solver="sgd",
        local_steps=1,
        output_transfer="sigmoid",
    )
    cross_entropy(model(x), y).backward()
    opt.step()
    assert_close(weights(model), expected)
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@pytest.mark.parametrize("variant", BACKPROP_VARIANTS)
@pytest.mark.parametrize("activation", ["tanh", "softplus", "softmax"])
def test_residual_at_the_start_is_gamma_times_the_gradient(variant: str, activation: str) -> None:
    """δ₀ᵀX computed from recorded rows is γ G too, without the shortcut through ``p.grad``."""
    model = network(activation)
    x, y = batch(9, 6), batch(9, 3, seed=2)
    opt = LocoProp(model, variant=variant, gamma=5.0, output_transfer="sigmoid")
    for layer in opt._layers:  # record ∂L/∂a for every variant
        layer.needs = layer.needs | {"g"}
        layer.use_of_rows = None  # and its rows
    cross_entropy(model(x), y).backward()
    for layer in opt._layers:
        assign_transfer(layer, get("sigmoid"), None)
        chosen = opt._plan.of(layer).variant
        weight, bias = layer.tensors["weight"], layer.tensors["bias"]
        rows = layer.inputs()
        a = layer.kind.linear_map.forward(rows, weight.detach(), bias.detach())
        g, v = row_gradients.gradients(layer), row_gradients.post_gradients(layer)
        if v is None:  # the transfer is inside the loss
            v = layer.transfer.pull_back(a, g)
        target = chosen.target(a, layer.transfer, g, v, 5.0)
        delta = chosen.loss.residual(a, target, layer.transfer)
        torch.testing.assert_close(delta.mT @ rows, 5.0 * weight.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(delta.sum(0), 5.0 * bias.grad, rtol=1e-10, atol=1e-12)


def test_more_iterations_are_not_backprop() -> None:
    x, y = batch(7, 6), batch(7, 3, seed=2)
    one, ten = network(), copy.deepcopy(network())
    for model, steps in ((one, 1), (ten, 10)):
        opt = LocoProp(model, lr=0.05, gamma=5.0, solver="sgd", local_steps=steps)
        cross_entropy(model(x), y).backward()
        opt.step()
    difference = max((a - b).abs().max() for a, b in zip(weights(one), weights(ten), strict=True))
    assert difference > 1e-3
