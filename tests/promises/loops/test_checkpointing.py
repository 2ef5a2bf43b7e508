"""Activation checkpointing equals the plain run; the summary says if a transfer is hidden."""

from __future__ import annotations

import pytest
import torch
from cases import assert_close, cross_entropy, network
from promises.loops.plain import data, each_model, each_variant, loco, make, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Checkpointed(nn.Module):
    """A model with all layers but the last inside a checkpoint."""

    def __init__(self, net: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.net = net
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if self.reentrant else x  # or it would find nothing to do
        return self.net[-1](checkpoint(self.net[:-1], x, use_reentrant=self.reentrant))


@each_variant
@each_model
def test_it_is_the_plain_run(variant: str, kind: str) -> None:
    model = Checkpointed(make(kind), reentrant=False)
    assert_close(train(variant, kind, model=model), train(variant, kind), 1e-12)


@each_variant
def test_every_layer_by_itself(variant: str) -> None:
    class Each(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            for module in self.net:
                x = checkpoint(module, x, use_reentrant=False)
            return x

    model = Each(network(), reentrant=False)
    assert_close(train(variant, model=model), train(variant), 1e-12)


@each_variant
def test_segments(variant: str) -> None:
    class Segments(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.net, 2, x, use_reentrant=False)

    model = Segments(network(), reentrant=False)
    assert_close(train(variant, model=model), train(variant), 1e-12)


@each_variant
def test_an_activation_at_the_start_of_a_checkpoint(variant: str) -> None:
    """The activation that the backward pass computes again is not a second use of the layer."""

    class Late(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net[1:], self.net[0](x), use_reentrant=False)

    model = Late(network(), reentrant=False)
    assert_close(train(variant, model=model), train(variant), 1e-12)


@each_variant
def test_with_accumulation(variant: str) -> None:
    def in_parts(model: nn.Module, x: Tensor, y: Tensor) -> None:
        for x_part, y_part in zip(x.split([5, 3]), y.split([5, 3]), strict=True):
            (cross_entropy(model(x_part), y_part) * len(x_part) / len(x)).backward()

    model = Checkpointed(network(), reentrant=False)
    assert_close(train(variant, backward=in_parts, model=model), train(variant), 1e-11)


def test_layers_are_called_twice_and_recorded_once() -> None:
    model = Checkpointed(network(), reentrant=False)
    opt = loco(model)
    calls = []
    model.net[0].register_forward_hook(lambda *args: calls.append(1))
    x, y = data()
    cross_entropy(model(x), y).backward()
    assert len(calls) == 2
    assert [len(layer.calls) for layer in opt._layers] == [1, 1, 1]


# The old, reentrant form recomputes inside the backward pass, where no graph shows what follows.


def test_reentrant_without_transfers_is_locoprop_s_and_says_so() -> None:
    model = Checkpointed(network(), reentrant=True)
    opt = loco(model)
    for seed in range(2):
        x, y = data(seed=seed)
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    rows = [line.split() for line in opt.summary().splitlines()[2:5]]
    assert [row[4] for row in rows] == ["locoprop-s", "locoprop-s", "locoprop-m"]
    assert opt.summary().count("recomputed in the backward pass") == 2
    assert [layer.is_output for layer in opt._layers] == [False, False, True]


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m"])
@each_model
def test_reentrant_with_transfers_by_name_is_the_plain_run(variant: str, kind: str) -> None:
    named = {"linear": ("tanh", "tanh"), "conv": ("tanh", "softplus")}[kind]
    transfers = {f"net.{i}": name for i, name in zip((0, 2), named, strict=True)}
    model = Checkpointed(make(kind), reentrant=True)
    found = train(variant, kind, model=model, transfers=transfers)
    assert_close(found, train(variant, kind), 1e-10)


def test_random_numbers_are_the_same_in_both_passes() -> None:
    """With dropout under a checkpoint, the rows are those of the pass that made the loss."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()
    results = []
    for model in (Checkpointed(net, reentrant=False), net):
        state = {name: value.clone() for name, value in net.state_dict().items()}
        torch.manual_seed(1)
        results.append(train(model=model))
        net.load_state_dict(state)
    assert_close(*results, 1e-12)
