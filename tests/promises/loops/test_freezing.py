"""Freezing and unfreezing layers, weights or biases during training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from promises.loops.plain import data, each_model, each_variant, loco, make, plain
from torch import nn

from torch_locoprop import LocoProp

NAMED = {
    "linear": {"0": "tanh", "2": "tanh"},
    "conv": {"0": "tanh", "2": "softplus"},
}


@each_variant
@each_model
@pytest.mark.parametrize("layer", [0, 2])
def test_a_frozen_layer_is_one_without_a_gradient(variant: str, kind: str, layer: int) -> None:
    """A layer is frozen at first, unfrozen after two steps, and frozen again.

    The other layers train as in a run with the transfers given by name, in which nothing is frozen and
    the layer's gradients are set to None.
    """
    results = []
    for freeze in (True, False):
        model = make(kind)
        part = model[layer]
        if freeze:
            part.requires_grad_(False)
        opt = loco(model, variant, transfers=None if freeze else NAMED[kind])
        for seed in range(6):
            frozen = seed < 2 or seed == 4
            part.requires_grad_(not (freeze and frozen))
            plain(model, *data(kind, seed))
            if frozen:
                part.zero_grad()
            opt.step()
            opt.zero_grad()
        results.append(weights(model))
    assert_close(*results, 1e-12)


@each_variant
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_one_tensor_of_a_layer(variant: str, name: str) -> None:
    results = []
    for freeze in (True, False):
        model = make()
        opt = loco(model, variant)
        tensor = getattr(model[2], name)
        for seed in range(5):
            frozen = seed in (1, 2)
            tensor.requires_grad_(not (freeze and frozen))
            plain(model, *data(seed=seed))
            if frozen:
                tensor.grad = None
            before = tensor.detach().clone()
            opt.step()
            assert torch.equal(before, tensor) == frozen
            opt.zero_grad()
        results.append(weights(model))
    assert_close(*results, 1e-12)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_tensors_stay_and_the_rest_solves_around_them(frozen: str) -> None:
    """Squared loss and sgd, so the minimum with the other tensor held fixed is a linear solve."""
    model = nn.Linear(4, 3).double()
    getattr(model, frozen).requires_grad_(False)
    opt = LocoProp(
        model, lr=0.02, gamma=2.0, variant="locoprop-m", solver="sgd", local_steps=3000,
        local_decay="constant", regularizer="l2", output_transfer="sigmoid",
    )  # fmt: skip
    x, y = batch(9, 4), batch(9, 3, seed=2)
    w0, b0 = weights(model)
    cross_entropy(model(x), y).backward()
    opt.step()
    w1, b1 = weights(model)
    assert torch.equal(w1 if frozen == "weight" else b1, w0 if frozen == "weight" else b0)
    # stationarity of D + R in the tensor that moved, from the definition of LocoProp-M
    a0 = x @ w0.mT + b0
    target = torch.sigmoid(a0) - 2.0 * (torch.sigmoid(a0) - y) / 9
    delta = torch.sigmoid(x @ w1.mT + b1) - target
    if frozen == "bias":
        assert_close([delta.mT @ x + (w1 - w0) / 0.02], [torch.zeros(3, 4).double()], 1e-9)
    else:
        assert_close([delta.sum(0) + (b1 - b0) / 0.02], [torch.zeros(3).double()], 1e-9)
    assert not torch.equal(b1 if frozen == "weight" else w1, b0 if frozen == "weight" else w0)


def test_the_summary_names_frozen_layers() -> None:
    model = network()
    model[2].requires_grad_(False)
    opt = loco(model)
    plain(model, *data())
    opt.step()
    assert "frozen" in opt.summary()
    model[2].requires_grad_(True)
    assert "frozen" not in opt.summary()


def transfers_of(opt: LocoProp) -> dict[str, Any]:
    return {layer.name: layer.transfer and layer.transfer.name for layer in opt._layers}


def test_layers_thawed_later_are_decided_in_that_step() -> None:
    """The head is trained first, then all layers, as in fine-tuning."""
    model = network()
    model[:4].requires_grad_(False)
    opt = loco(model)
    for seed in range(2):
        plain(model, *data(seed=seed))
        opt.step()
        opt.zero_grad()
    assert transfers_of(opt) == {"0": None, "2": None, "4": "sigmoid"}
    model.requires_grad_(True)
    plain(model, *data(seed=2))
    opt.step()
    assert transfers_of(opt) == {"0": "tanh", "2": "tanh", "4": "sigmoid"}
    assert [layer.is_output for layer in opt._layers] == [False, False, True]


def test_everything_frozen_is_told() -> None:
    model = network()
    opt = loco(model)
    model.requires_grad_(False)
    x = data()[0].requires_grad_()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="No layer recorded a backward pass"):
        opt.step()
