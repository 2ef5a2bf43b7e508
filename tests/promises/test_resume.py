"""A run that is saved, loaded and continued equals an uninterrupted run, bit for bit."""

from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import FIRST_ORDER, VARIANTS, batch, cross_entropy, network, weights
from torch import nn

from torch_locoprop import LocoProp, Variant
from torch_locoprop.paper.losses import Squared
from torch_locoprop.paper.targets import NaturalGradient
from torch_locoprop.solvers import AveragedPreconditioned, Exact, Spectral

pytestmark = pytest.mark.filterwarnings("ignore:.* no effect with solver")

CASES: list[dict[str, Any]] = [
    {"preset": "general"},
    {"preset": "spectral", "solver": Spectral(every=3)},
    *({"variant": "locoprop-m", "solver": name, "lr": 1e-3} for name in FIRST_ORDER),
    *({"variant": name, "solver": "rmsprop", "lr": 1e-3} for name in VARIANTS),
    {"variant": "locoprop-s", "solver": Exact(decay=0.9, every=3, damping=1e-2), "lr": 0.1},
    {"variant": "locoprop-m", "solver": Exact(decay=0.9, every=3), "lr": 0.1},
    {"variant": "locoprop-m", "solver": "preconditioned", "lr": 0.5},
    {"variant": "locoprop-m", "solver": AveragedPreconditioned(every=3)},
    {"variant": "locoprop-m", "regularizer": "fisher", "solver": "sgd", "lr": 1e-3},
    {"variant": Variant("every 3", NaturalGradient(every=3), Squared()), "lr": 1e-3},
]


def train(model: nn.Module, opt: LocoProp, steps: range) -> None:
    for step in steps:
        x = batch(8, 6, seed=step)
        cross_entropy(model(x), x[:, :3]).backward()
        opt.step()
        opt.zero_grad()


def make(case: dict[str, Any], seed: int = 0) -> tuple[nn.Module, LocoProp]:
    model = network(seed=seed)
    own = {"momentum": 0.9, "output_transfer": "sigmoid"} | (
        {} if "preset" in case else {"gamma": 2.0}
    )
    return model, LocoProp(model, **own, **case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_resumed_run_is_bit_identical(case: dict[str, Any]) -> None:
    model, opt = make(case)
    train(model, opt, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    train(model, opt, range(5, 10))

    file.seek(0)
    saved = torch.load(file)  # weights_only=True is the default: tensors, numbers, strings
    resumed, other = make(case, seed=7)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    train(resumed, other, range(5, 10))
    for one, two in zip(weights(model), weights(resumed), strict=True):
        assert torch.equal(one, two)


def test_the_state_matters() -> None:
    """Without the optimizer's state the weights differ: the test above can fail."""
    model, opt = make({"lr": 1e-3})
    train(model, opt, range(5))
    fresh, other = make({"lr": 1e-3})
    fresh.load_state_dict(model.state_dict())
    train(model, opt, range(5, 10))
    train(fresh, other, range(5, 10))
    assert not torch.equal(weights(model)[0], weights(fresh)[0])


def test_same_seed_same_bits() -> None:
    results = []
    for _ in range(2):
        model, opt = make({"variant": "natural-s", "lr": 1e-3})
        train(model, opt, range(10))
        results.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_sampling_labels_leaves_the_global_random_state_alone() -> None:
    model, opt = make({"variant": "natural-s", "lr": 1e-3})
    before = torch.get_rng_state()
    train(model, opt, range(3))
    assert torch.equal(before, torch.get_rng_state())


def test_state_follows_a_change_of_dtype() -> None:
    model, opt = make({"lr": 1e-3})
    train(model, opt, range(3))
    small = network().float()
    small.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    other = LocoProp(small, momentum=0.9, gamma=2.0, output_transfer="sigmoid", lr=1e-3)
    other.load_state_dict(opt.state_dict())
    assert all(
        value.dtype == torch.float32
        for state in other.state.values()
        for key, value in state.items()
        if key != "step"
    )
    for step in range(3, 6):
        for net, o, dtype in ((model, opt, torch.float64), (small, other, torch.float32)):
            x = batch(8, 6, seed=step).to(dtype)
            cross_entropy(net(x), x[:, :3]).backward()
            o.step()
            o.zero_grad()
    for one, two in zip(weights(model), weights(small), strict=True):
        torch.testing.assert_close(one, two.double(), rtol=1e-4, atol=1e-5)


def test_state_follows_a_change_of_device() -> None:
    """The meta device replaces an accelerator: every tensor of the state moves to it."""
    model, opt = make({"lr": 1e-3})
    train(model, opt, range(2))
    elsewhere = network().to("meta")
    other = LocoProp(elsewhere, momentum=0.9, output_transfer="sigmoid")
    other.load_state_dict(opt.state_dict())
    devices = {v.device.type for state in other.state.values() for v in state.values()}
    assert devices == {"meta"}


def test_unknown_component_in_a_state_dict_changes_nothing() -> None:
    model, opt = make({"lr": 1e-3})
    train(model, opt, range(2))
    state = opt.state_dict()
    state["param_groups"][0]["solver"] = "mine"
    _, other = make({"lr": 5e-3})
    with pytest.raises(ValueError, match="Unknown solver 'mine'"):
        other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 5e-3
    assert not other.state


def test_a_state_of_other_components_is_refused() -> None:
    _, opt = make({"solver": Exact(decay=0.9)})
    for solver in ("exact", Exact(decay=0.5)):
        _, other = make({"solver": solver})
        with pytest.raises(ValueError, match="same components as the one that was saved"):
            other.load_state_dict(opt.state_dict())


def test_a_state_that_draws_labels_is_refused_where_the_loss_is_not_known() -> None:
    _, opt = make({"variant": "natural-s"})
    other = LocoProp(network(), preset="paper-m")
    with pytest.raises(ValueError, match=r"does not fit.* Say which by loss_fn="):
        other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["variant"] == "locoprop-m"


def test_a_state_of_other_shapes_is_refused() -> None:
    small, large = nn.Linear(3, 2), nn.Linear(3, 4)
    state = LocoProp(large).state_dict()
    with pytest.raises(
        ValueError, match="another model: its parameter 0 is 4×3, and here it is 2×3"
    ):
        LocoProp(small).load_state_dict(state)


def test_a_state_of_another_fallback_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    state = LocoProp(model, fallback=lambda p: torch.optim.SGD(p, lr=0.1)).state_dict()
    opt = LocoProp(model, fallback=torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"fallback of type SGD, .* is of type AdamW"):
        opt.load_state_dict(state)
    assert opt.param_groups[1]["lr"] == 1e-3


def test_a_state_of_another_optimizer_is_refused() -> None:
    model, opt = make({"lr": 1e-3})
    for other in ({}, model.state_dict()):
        with pytest.raises(
            ValueError, match=r"not the state dict of an optimizer.*opt\.state_dict"
        ):
            opt.load_state_dict(other)
    with pytest.raises(ValueError, match="not the state dict of a LocoProp optimizer"):
        opt.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    assert opt.param_groups[0]["lr"] == 1e-3


def test_a_state_that_knows_fewer_settings_loads() -> None:
    """A state saved before a setting existed gets the default of the setting."""
    model, opt = make({})
    train(model, opt, range(2))
    state = deepcopy(opt.state_dict())
    for group in state["param_groups"]:
        del group["local_products"]
    other, resumed = make({}, seed=0)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    train(other, resumed, range(2, 4))
    train(model, opt, range(2, 4))
    assert all(map(torch.equal, weights(other), weights(model)))
