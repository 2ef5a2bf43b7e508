"""Parameters that the user takes out of ``param_groups``, which ``torch.optim`` then does not train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import weights
from promises.loops.plain import data, plain
from torch import nn
from torch.optim import Optimizer

from torch_locoprop import LocoProp

OPTIONS: dict[str, dict[str, Any]] = {
    "general": {},
    "spectral": {"preset": "spectral"},
    "locoprop-s": {"variant": "locoprop-s"},
    "locoprop-m": {"variant": "locoprop-m"},
    "pocoprop-m": {"variant": "pocoprop-m", "diagnose": True},
    "exact": {"solver": "exact"},
    "preconditioned": {"solver": "preconditioned"},
    "averaged": {"solver": "preconditioned-averaged"},
    "natural-s": {"variant": "natural-s"},
}
REMOVED = {
    "weight": ["2.weight"],
    "bias": ["2.bias"],
    "layer": ["2.weight", "2.bias"],
    "norm": ["3.weight"],
    "first": ["0.weight", "0.bias", "3.bias"],
}
each = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
    ).double()


def loco(model: nn.Module, **options: Any) -> LocoProp:
    given = {"output_transfer": "sigmoid", "fallback": sgd, **options}
    return LocoProp(model, **{name: each for name, each in given.items() if each is not None})


def sgd(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def take_out(opt: Optimizer, *params: nn.Parameter) -> None:
    for group in opt.param_groups:
        group["params"] = [p for p in group["params"] if all(p is not other for other in params)]


def steps(opt: Any, model: nn.Module, first: int, last: int) -> None:
    for seed in range(first, last):
        plain(model, *data(seed=seed))
        opt.step()
        model.zero_grad()


@each
@pytest.mark.parametrize("names", REMOVED.values(), ids=REMOVED)
def test_they_are_frozen_until_they_are_put_back(names: list[str], options: dict[str, Any]) -> None:
    results = []
    for removes in (True, False):
        model = network()
        opt = loco(model, **options)
        gone = [model.get_parameter(name) for name in names]
        before = [list(group["params"]) for group in opt.param_groups]
        steps(opt, model, 0, 2)
        start = [p.detach().clone() for p in gone]
        if removes:
            take_out(opt, *gone)
        else:
            for p in gone:
                p.requires_grad_(False)
        steps(opt, model, 2, 4)
        assert all(map(torch.equal, start, gone))
        opt.summary()
        if removes:
            for group, params in zip(opt.param_groups, before, strict=True):
                group["params"] = params
        else:
            for p in gone:
                p.requires_grad_(True)
        opt.summary()
        steps(opt, model, 4, 6)
        assert not any(map(torch.equal, start, gone))
        results.append(weights(model))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("gone", [slice(2, 4), slice(None)])
def test_they_may_be_put_back_right_away(forward: bool, gone: slice) -> None:
    results = []
    for removes in (True, False):
        model = network()
        opt = loco(model, variant="locoprop-m", solver="sgd")
        steps(opt, model, 0, 2)
        if removes:
            group = opt.param_groups[0]
            before = list(group["params"])
            take_out(opt, *before[gone])
            if forward:
                model(data()[0])
            else:
                opt.summary()
            group["params"] = before
        steps(opt, model, 2, 4)
        results.append(weights(model))
    assert all(map(torch.equal, *results))


@each
def test_they_may_be_taken_out_after_the_backward_pass(options: dict[str, Any]) -> None:
    model = network()
    opt = loco(model, **options)
    steps(opt, model, 0, 2)
    gone = model[2].weight, model[2].bias
    start = [p.detach().clone() for p in gone]
    others = [model[0].weight.detach().clone(), model[5].bias.detach().clone()]
    plain(model, *data(seed=2))
    take_out(opt, *gone)
    opt.step()
    assert all(map(torch.equal, start, gone))
    assert not any(map(torch.equal, others, [model[0].weight, model[5].bias]))


@pytest.mark.parametrize("names", REMOVED.values(), ids=REMOVED)
def test_the_state_is_that_of_the_parameters_in_the_groups(names: list[str]) -> None:
    model = network()
    opt = loco(model)
    steps(opt, model, 0, 2)
    take_out(opt, *map(model.get_parameter, names))
    state = copy.deepcopy(opt.state_dict())
    assert len(state["state"]) == 8 - len(names)
    other = copy.deepcopy(model)
    resumed = loco(other)
    take_out(resumed, *map(other.get_parameter, names))
    resumed.load_state_dict(state)
    model_and_copy = copy.deepcopy((model, opt))
    start = weights(model)
    for each_model, each_opt in ((model, opt), (other, resumed), model_and_copy):
        steps(each_opt, each_model, 2, 4)
    for one, two, three, old, (name, _) in zip(
        weights(model),
        weights(other),
        weights(model_and_copy[0]),
        start,
        model.named_parameters(),
        strict=True,
    ):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
        assert torch.equal(one, old) == (name in names)


def test_saving_changes_nothing_for_those_that_are_put_back() -> None:
    results = []
    for saves in (True, False):
        model = network()
        opt = loco(model)
        before = [list(group["params"]) for group in opt.param_groups]
        steps(opt, model, 0, 3)
        take_out(opt, model[2].weight, model[5].bias)
        steps(opt, model, 3, 4)
        if saves:
            opt.state_dict()
        for group, params in zip(opt.param_groups, before, strict=True):
            group["params"] = params
        steps(opt, model, 4, 8)
        results.append(weights(model))
    assert all(map(torch.equal, *results))


def test_whole_groups_may_be_taken_out() -> None:
    model = network()
    groups = [{"params": list(model[i].parameters())} for i in (0, 2, 3, 5)]
    opt = loco(model, param_groups=groups)
    steps(opt, model, 0, 2)
    for order, i in ((0, 0), (2, 3), (0, 2), (0, 5)):  # the fallback's group is the last one
        start = weights(model[i])
        opt.param_groups.pop(order)
        steps(opt, model, 2, 4)
        opt.summary()
        opt.state_dict()
        assert all(map(torch.equal, start, model[i].parameters()))
    assert opt.param_groups == []


def test_groups_that_the_fallback_was_given_stay_its_own() -> None:
    model, made = network(), []

    def fallback(params: list[nn.Parameter]) -> Optimizer:
        made.append(sgd(params))
        return made[0]

    opt = loco(model, fallback=fallback)
    more = nn.Parameter(torch.ones(1))
    made[0].add_param_group({"params": [more]})
    more.grad = torch.ones(1)
    steps(opt, model, 0, 1)
    assert more.item() != 1


def test_the_summary_names_them() -> None:
    model = network()
    opt = loco(model)
    take_out(opt, model[2].weight, model[2].bias)
    row = next(line for line in opt.summary().splitlines() if line.startswith("2 "))
    assert row.endswith("not given to this optimizer")


def test_a_parameter_that_was_in_no_group_is_refused() -> None:
    model = network()
    opt = loco(model)
    steps(opt, model, 0, 1)
    opt.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3)))
    start = weights(model)
    with pytest.raises(RuntimeError, match="Call add_param_group"):
        steps(opt, model, 1, 2)
    assert all(map(torch.equal, start, weights(model)))


def test_outer_optimizers_must_not_have_them_either() -> None:
    model = network()
    outer = sgd(list(model.parameters()))
    opt = loco(model, variant="locoprop-s", fallback=None, apply="gradient", outer=outer)
    steps(opt, model, 0, 2)
    gone, start = (model[2].weight, model[3].bias), weights(model)
    take_out(opt, *gone)
    plain(model, *data())
    with pytest.raises(RuntimeError, match=r"requires_grad_\(False\)"):
        opt.step()
    assert all(map(torch.equal, start, weights(model)))
    take_out(outer, *gone)
    opt.step()
    for old, p in zip(start, model.parameters(), strict=True):
        assert torch.equal(old, p) == any(p is each for each in gone)
