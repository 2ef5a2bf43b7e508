"""The state of an outer optimizer goes through tools that keep ``state`` and ``param_groups`` alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import batch, cross_entropy, weights
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from torch_locoprop import LocoProp
from torch_locoprop.stepping.outer_state import without_absent

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # by PyTorch 2.9 itself
]


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()


class Counting(torch.optim.Adam):
    """An optimizer whose state dict has more than state and groups."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        super().load_state_dict(state_dict)


def two(params: list[nn.Parameter]) -> list[Optimizer]:
    matrices = [p for p in params if p.ndim == 2]
    rest = [p for p in params if p.ndim != 2]
    groups: list[dict[str, Any]] = [{"params": rest[1:]}, {"params": rest[:1], "lr": 0.1}]
    return [Counting(matrices, lr=0.02), torch.optim.SGD(groups, lr=0.1, momentum=0.9)]


def reversed_adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(reversed([*model.parameters()]), lr=0.01)


def fallback(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


OUTER: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "two optimizers": lambda model: {"outer": two, "fallback": fallback},
    "of all parameters": lambda model: {"outer": reversed_adamw(model)},
    "of two groups": lambda model: {
        "outer": reversed_adamw(model),
        "param_groups": [{"params": model[:2].parameters()}, {"params": model[2].parameters()}],
    },
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
SOLVERS = ("rmsprop", "sgd", "exact")  # with a state and without


def made(name: str, solver: str, seed: int) -> tuple[nn.Sequential, LocoProp]:
    model = network(seed)
    own = {"variant": "locoprop-s", "solver": solver, "lr": 1e-3, "gamma": 1.0, "local_steps": 3}
    options = {"apply": "gradient", **own, **OUTER[name](model)}
    return model, LocoProp(model, output_transfer="sigmoid", **options)


def train(model: nn.Module, opt: LocoProp, seeds: range) -> None:
    for seed in seeds:
        cross_entropy(model(batch(8, 6, seed=seed)), batch(8, 3, seed=seed + 50)).backward()
        opt.step()
        opt.zero_grad()


def entries(opt: LocoProp) -> dict[tuple[int, str], list[float]]:
    """Return all numbers of a state, by parameter and name."""
    state = opt.state_dict()["state"]
    return {(i, name): e.tolist() for i, own in state.items() for name, e in own.items()}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", OUTER)
def test_training_goes_on_from_a_checkpoint(name: str, solver: str, tmp_path: Path) -> None:
    model, opt = made(name, solver, seed=0)
    outer = opt._outer
    assert outer is not None
    train(model, opt, range(3))
    outer.param_groups[-1]["lr"] *= 0.5  # as a schedule of the outer optimizer does
    before = copy.deepcopy(opt.state_dict())
    state = dict(zip(("model", "opt"), get_state_dict(model, opt), strict=True))
    assert str(opt.state_dict()) == str(before)  # a look at it does not change it
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    other, loaded = made(name, solver, seed=1)
    state = dict(zip(("model", "opt"), get_state_dict(other, loaded), strict=True))
    dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    set_state_dict(other, loaded, model_state_dict=state["model"], optim_state_dict=state["opt"])
    assert loaded.state_dict()["state"].keys() == before["state"].keys()
    for each, trained in ((model, opt), (other, loaded)):
        train(each, trained, range(3, 6))
    assert all(map(torch.equal, weights(model), weights(other)))
    assert loaded._outer is not None
    counted = [
        getattr(each, "steps", None) for each in (*outer.optimizers, *loaded._outer.optimizers)
    ]
    assert counted == ([6, None] * 2 if name == "two optimizers" else [None] * 2)


@pytest.mark.parametrize("name", OUTER)
def test_training_goes_on_from_a_full_state(name: str) -> None:
    """Without the tensors' placements, and without what is empty, as tools write it."""
    whole = StateDictOptions(full_state_dict=True)
    model, opt = made(name, "rmsprop", seed=0)
    train(model, opt, range(3))
    state, opt_state = copy.deepcopy(get_state_dict(model, opt, options=whole))
    for rest in opt_state["param_groups"][0]["outer"]:
        if not rest["state"]:
            del rest["state"]
    other, loaded = made(name, "rmsprop", seed=1)
    given = {"model_state_dict": state, "optim_state_dict": opt_state}
    set_state_dict(other, loaded, **given, options=whole)
    for each, trained in ((model, opt), (other, loaded)):
        train(each, trained, range(3, 6))
    assert all(map(torch.equal, weights(model), weights(other)))


@pytest.mark.parametrize("used", [False, True], ids=["into a new one", "into a used one"])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", OUTER)
def test_training_goes_on_from_a_flattened_state(name: str, solver: str, used: bool) -> None:
    """Of the loading optimizer PyTorch reads the names in ``state`` and ``param_groups`` alone."""
    model, opt = made(name, solver, seed=0)
    train(model, opt, range(3))
    assert opt._outer is not None
    opt._outer.param_groups[-1]["lr"] *= 0.5
    state, opt_state = copy.deepcopy(get_state_dict(model, opt, options=FLAT))
    other, loaded = made(name, solver, seed=1)
    train(other, loaded, range(2 if used else 0))
    given = {"model_state_dict": state, "optim_state_dict": opt_state}
    set_state_dict(other, loaded, **given, options=FLAT)
    assert entries(loaded) == entries(opt)
    for each, trained in ((model, opt), (other, loaded)):
        train(each, trained, range(3, 6))
    assert all(map(torch.equal, weights(model), weights(other)))


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."),
    reason="PyTorch 2.9 raises KeyError for such a parameter, with AdamW too",
)
def test_a_parameter_without_a_state_has_none_after_a_flattened_one() -> None:
    model, opt = made("of all parameters", "rmsprop", seed=0)
    other, loaded = made("of all parameters", "rmsprop", seed=0)
    for seed in range(2):
        cross_entropy(model(batch(8, 6, seed=seed)), batch(8, 3, seed=seed + 50)).backward()
        model[1].weight.grad = None
        opt.step()
        opt.zero_grad()
    state, opt_state = copy.deepcopy(get_state_dict(model, opt, options=FLAT))
    given = {"model_state_dict": state, "optim_state_dict": opt_state}
    set_state_dict(other, loaded, **given, options=FLAT)
    assert entries(loaded) == entries(opt)
    for each, trained in ((model, opt), (other, loaded)):
        train(each, trained, range(2, 4))
    assert all(map(torch.equal, weights(model), weights(other)))


def test_a_state_is_absent_if_all_its_entries_are() -> None:
    """Of a parameter's own state and of that of an outer optimizer, each for itself."""
    state = {
        0: {"square": 1.0, "momentum": {}, "outer.step": {}, "outer.exp_avg": {}},
        1: {"square": {}, "momentum": {}, "outer.step": 2.0, "outer.exp_avg": {}},
        2: {"square": {}},
        3: {"square": 3.0, "outer.step": 4.0},
    }
    assert without_absent({"state": state, "param_groups": []}) == {
        "state": {
            0: {"square": 1.0, "momentum": {}},
            1: {"outer.step": 2.0, "outer.exp_avg": {}},
            2: {},
            3: {"square": 3.0, "outer.step": 4.0},
        },
        "param_groups": [],
    }


@pytest.mark.parametrize("name", OUTER)
def test_a_loaded_state_is_where_tools_look_for_its_names(name: str) -> None:
    (model, opt), (other, loaded) = (made(name, "rmsprop", seed) for seed in range(2))
    train(model, opt, range(2))
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert loaded.state[q].keys() == opt.state[p].keys()
        for key, entry in loaded.state[q].items():
            assert torch.equal(torch.as_tensor(entry), torch.as_tensor(opt.state[p][key]))
    assert any(key.startswith("outer.") for key in loaded.state[other[0].weight])


def test_a_flattened_state_with_an_outer_optimizer_is_refused_without_one() -> None:
    model, opt = made("two optimizers", "rmsprop", seed=0)
    train(model, opt, range(1))
    state = get_optimizer_state_dict(model, opt, options=FLAT)
    own = {"variant": "locoprop-s", "solver": "rmsprop", "lr": 1e-3}
    plain = LocoProp(model, fallback=fallback, output_transfer="sigmoid", **own)
    gamma = plain.param_groups[0]["gamma"]
    with pytest.raises(ValueError, match=r"one has an outer optimizer\. Make"):
        set_optimizer_state_dict(model, plain, state, options=FLAT)
    assert plain.param_groups[0]["gamma"] == gamma != opt.param_groups[0]["gamma"]


def test_the_place_of_the_outer_state_is_not_shown_and_may_be_given_back() -> None:
    model, opt = made("two optimizers", "rmsprop", seed=0)
    assert "outer" not in repr(opt)
    LocoProp(
        model, param_groups=opt.param_groups[:1], fallback=fallback, apply="gradient", outer=two
    )


@pytest.mark.parametrize("name", OUTER)
def test_a_state_that_was_asked_for_too_early_has_no_effect(name: str) -> None:
    model, opt = made(name, "rmsprop", seed=0)
    plain, other = made(name, "rmsprop", seed=0)
    get_state_dict(model, opt)
    assert all(map(torch.equal, weights(model), weights(plain)))
    train(model, opt, range(1))
    train(plain, other, range(1))
    for i in (0, 2):  # the fallback counts the step with which its state was made
        assert torch.equal(model[i].weight, plain[i].weight)
        assert torch.equal(model[i].bias, plain[i].bias)


def test_a_state_of_another_number_of_outer_optimizers_is_refused() -> None:
    _, opt = made("two optimizers", "sgd", seed=0)
    model = network(0)
    one = LocoProp(
        model, lr=1e-3, apply="gradient", outer=fallback, fallback=fallback,
        variant="locoprop-s", solver="sgd", output_transfer="sigmoid",
    )  # fmt: skip
    with pytest.raises(ValueError, match="has 2 outer optimizers, but this optimizer has 1"):
        one.load_state_dict(opt.state_dict())
