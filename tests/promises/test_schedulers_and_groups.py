"""The local iterations use schedules and settings of parameter groups."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import nn
from torch.optim import lr_scheduler

from torch_locoprop import LocoProp
from torch_locoprop.paper.regularizers import L1
from torch_locoprop.paper.variants import VARIANTS
from torch_locoprop.solvers import Spectral

each_preset = pytest.mark.parametrize("preset", ["paper-m", "spectral", "general"])


def step(model: nn.Module, opt: LocoProp, seed: int = 1) -> None:
    x = batch(8, 6, seed=seed)
    cross_entropy(model(x), x[:, :3]).backward()
    opt.step()
    opt.zero_grad()


def after_one_step(model: nn.Sequential | None = None, **options: Any) -> list[torch.Tensor]:
    model = model or network()
    step(model, LocoProp(model, **{"preset": "paper-m", "output_transfer": "sigmoid", **options}))
    return weights(model)


@each_preset
def test_scheduled_lr_is_the_one_used(preset: str) -> None:
    model = network()
    opt = LocoProp(model, preset=preset, lr=1.0, output_transfer="sigmoid")
    lr_scheduler.LambdaLR(opt, lambda epoch: 1e-3)
    step(model, opt)
    assert_close(weights(model), after_one_step(preset=preset, lr=1e-3))


@each_preset
def test_one_cycle_moves_lr_and_momentum(preset: str) -> None:
    model, reference = network(), network()
    options = {"preset": preset, "lr": 1e-3, "momentum": 0.9, "output_transfer": "sigmoid"}
    opt, plain = LocoProp(model, **options), LocoProp(reference, **options)
    scheduler = lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=6)
    seen = set()
    for k in range(6):
        seen.add((opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]))
        plain.param_groups[0].update(
            lr=opt.param_groups[0]["lr"], momentum=opt.param_groups[0]["momentum"]
        )
        step(model, opt, seed=k)
        step(reference, plain, seed=k)
        scheduler.step() if k < 5 else None
    assert len(seen) == 6
    assert_close(weights(model), weights(reference))


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 1),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
        lambda o: lr_scheduler.CyclicLR(o, 1e-5, 1e-3, cycle_momentum=True),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ],
)
def test_torch_schedulers_run(make: Any) -> None:
    model = network()
    opt = LocoProp(model, preset="paper-m", lr=1e-3, output_transfer="sigmoid")
    scheduler = make(opt)
    rates = []
    for k in range(4):
        step(model, opt, seed=k)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SequentialLR warns about its own use of epochs
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(1.0) if plateau else scheduler.step()
        rates.append(opt.param_groups[0]["lr"])
    assert len(set(rates)) > 1


OVERRIDES: list[dict[str, Any]] = [
    {"lr": 5e-3},
    {"gamma": 3.0},
    {"local_steps": 3},
    {"momentum": 0.5},
    {"decay": 0.5},
    {"eps": 0.5},
    {"weight_decay": 10.0},
    {"variant": "locoprop-s"},
    {"variant": VARIANTS["pocoprop-s"]},
    {"solver": "adam"},
    {"regularizer": "l2"},
    {"regularizer": L1(strength=0.5)},
    {"local_decay": "constant"},
    {"local_reduction": "mean"},
    {"maximize": True},
]


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda own: next(iter(own)))
def test_a_group_overrides_any_setting_for_its_layer(override: dict[str, Any]) -> None:
    """The layer moves as if all layers had the setting, the others as if none had."""
    base = {"lr": 1e-3, "momentum": 0.9}
    model = network()
    groups = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), **override},
        {"params": [*model[4].named_parameters()]},
    ]
    mixed = after_one_step(model, **base, param_groups=groups)
    everywhere, nowhere = after_one_step(**{**base, **override}), after_one_step(**base)
    assert_close(mixed[2:4], everywhere[2:4])
    assert_close(mixed[:2] + mixed[4:], nowhere[:2] + nowhere[4:])
    assert not torch.equal(everywhere[2], nowhere[2])


SPECTRAL_OVERRIDES: list[dict[str, Any]] = [
    {"lr": 5e-3},
    {"momentum": 0.5},
    {"decay": 0.5},
    {"weight_decay": 10.0},
    {"solver": Spectral(every=3, averaging=0.5, damping=0.3, agreement=0.5)},
    {"variant": "locoprop-m", "solver": "rmsprop"},
    {"maximize": True},
]


@pytest.mark.parametrize("override", SPECTRAL_OVERRIDES, ids=lambda own: next(iter(own)))
@pytest.mark.parametrize("preset", ["spectral", "general"])
def test_a_group_overrides_settings_of_a_spectral_step(
    preset: str, override: dict[str, Any]
) -> None:
    """The layer moves as if all layers had the setting, the others as if none had."""
    ends = []
    for first, second in ((override, {}), (override, override), ({}, {})):
        model = network()
        groups = [
            {"params": model[0].parameters(), **first},
            {"params": [*model[2].parameters(), *model[4].parameters()], **second},
        ]
        opt = LocoProp(
            model, preset=preset, lr=1e-3, output_transfer="sigmoid", param_groups=groups
        )
        start = copy.deepcopy(model.state_dict())
        for seed in range(3):  # all gradients are those at the start, so they are equal in all runs
            x = batch(8, 6, seed=seed)
            moved = copy.deepcopy(model.state_dict())
            model.load_state_dict(start)
            cross_entropy(model(x), x[:, :3]).backward()
            model.load_state_dict(moved)
            opt.step()
            opt.zero_grad()
        ends.append(weights(model))
    mixed, everywhere, nowhere = ends
    assert_close(mixed[:2], everywhere[:2])
    assert_close(mixed[2:], nowhere[2:])
    assert not torch.equal(everywhere[0], nowhere[0])


def test_weight_and_bias_may_be_in_different_groups() -> None:
    model = network()
    groups = [
        {"params": [m.weight for m in model if isinstance(m, nn.Linear)]},
        {"params": [m.bias for m in model if isinstance(m, nn.Linear)], "lr": 0.0},
    ]
    before = weights(model)
    mixed = after_one_step(
        model, lr=1e-3, momentum=0.0, local_steps=1, solver="sgd", param_groups=groups
    )
    plain = after_one_step(lr=1e-3, momentum=0.0, local_steps=1, solver="sgd")
    assert_close(mixed[::2], plain[::2])
    assert_close(mixed[1::2], before[1::2], 0.0)


@pytest.mark.parametrize(
    "setting", [{"gamma": 3.0}, {"variant": "locoprop-s"}, {"solver": "adam"}, {"maximize": True}]
)
def test_weight_and_bias_must_agree_on_their_problem(setting: dict[str, Any]) -> None:
    model = network()
    rest = [p for p in model.parameters() if p is not model[2].bias]
    groups = [{"params": rest}, {"params": [model[2].bias], **setting}]
    with pytest.raises(ValueError, match=rf"layer '2' solve one.*differ in {next(iter(setting))}"):
        LocoProp(model, preset="paper-m", param_groups=groups)


def test_weight_and_bias_must_agree_on_the_rate_of_an_exact_solution() -> None:
    model = network()
    rest = [p for p in model.parameters() if p is not model[2].bias]
    groups = [{"params": rest}, {"params": [model[2].bias], "lr": 0.0}]
    with pytest.raises(ValueError, match="differ in lr"):
        LocoProp(model, solver="exact", param_groups=groups)


def test_settings_that_have_no_effect_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    groups = [
        {"params": model[0].parameters()},
        {"params": model[1].parameters(), "lr": 0.1, "weight_decay": 0.0},
    ]
    with pytest.warns(UserWarning, match=r"2 parameters of a group.*lr, weight_decay do not apply"):
        LocoProp(
            model,
            preset="paper-m",
            fallback=lambda p: torch.optim.SGD(p, lr=0.1),
            param_groups=groups,
        )


def test_a_part_of_the_model() -> None:
    """Parameters that are not given to the optimizer do not change."""
    model = network()
    before = weights(model)
    x = batch(8, 6)
    opt = LocoProp(
        model,
        preset="paper-m",
        lr=1e-2,
        output_transfer="sigmoid",
        param_groups=[{"params": [model[0].weight, model[2].weight, model[2].bias]}],
    )
    cross_entropy(model(x), x[:, :3]).backward()
    opt.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    assert moved == [True, False, True, True, False, False]
    assert "not given to this optimizer" in opt.summary()


def test_add_param_group_serves_a_layer_that_came_later() -> None:
    model = network()
    opt = LocoProp(model, preset="paper-m", lr=1e-3, output_transfer="sigmoid")
    step(model, opt)
    model.append(nn.Linear(3, 3).double())
    opt.add_param_group({"params": model[-1].parameters(), "lr": 5e-3})
    before = weights(model)
    step(model, opt)
    step(model, opt)
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    rows = opt.summary().splitlines()
    assert rows[4].split()[3] == "linear"  # what was the output layer now feeds a layer
    assert rows[5].split()[3] == "sigmoid"
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": model[0].parameters()})


@pytest.mark.parametrize("second", ["adam", "momentum", "adagrad"])
def test_a_solver_that_replaces_another_begins_anew(second: str) -> None:
    """Also in a resumed run; state entries of the same name have another meaning."""
    model = network()
    opt = LocoProp(model, preset="paper-m", lr=1e-3, output_transfer="sigmoid")
    step(model, opt)
    resumed = LocoProp(model, preset="paper-m", output_transfer="sigmoid")
    resumed.load_state_dict(opt.state_dict())
    resumed.param_groups[0]["solver"] = second
    expected = after_one_step(copy.deepcopy(model), lr=1e-3, solver=second)
    step(model, resumed)
    assert_close(weights(model), expected, 0.0)


def test_maximize_is_the_negated_loss() -> None:
    model, other = network(), network()
    up = LocoProp(model, preset="paper-m", lr=1e-3, maximize=True, output_transfer="sigmoid")
    down = LocoProp(other, preset="paper-m", lr=1e-3, output_transfer="sigmoid")
    x = batch(8, 6)
    cross_entropy(model(x), x[:, :3]).backward()
    (-cross_entropy(other(x), x[:, :3])).backward()
    up.step()
    down.step()
    assert_close(weights(model), weights(other))


def test_a_group_that_is_refused_leaves_all_as_it_was() -> None:
    model = network()
    opt = LocoProp(
        model,
        preset="paper-m",
        param_groups=[{"params": [p for p in model.parameters() if p is not model[0].bias]}],
        output_transfer="sigmoid",
    )
    before = weights(model)
    with pytest.raises(ValueError, match="differ in gamma"):
        opt.add_param_group({"params": [model[0].bias], "gamma": 3.0})
    assert len(opt.param_groups) == 1
    step(model, opt)
    assert not torch.equal(before[0], model[0].weight)


def test_groups_have_names() -> None:
    model = network()
    opt = LocoProp(
        model, preset="paper-m", param_groups=[{"params": model.parameters(), "name": "all"}]
    )
    step(model, opt)
    assert opt.param_groups[0]["name"] == "all"
    assert opt.state_dict()["param_groups"][0]["name"] == "all"


@pytest.mark.parametrize("variant", ["pocoprop-s", "pocoprop-m"])
def test_a_variant_that_asks_for_more_is_taken_from_the_next_forward_pass_on(variant: str) -> None:
    model = network()
    opt = LocoProp(model, lr=1e-3, gamma=20.0, solver="sgd", output_transfer="sigmoid")
    step(model, opt)
    own = {"lr": 1e-3, "gamma": 20.0, "solver": "sgd", "variant": variant}
    expected = after_one_step(copy.deepcopy(model), **own)
    opt.param_groups[0]["variant"] = variant
    step(model, opt)
    assert_close(weights(model), expected, 1e-12)
    opt.param_groups[0]["variant"] = "locoprop-s"
    step(model, opt)
    opt.zero_grad()
    model(batch(8, 6)).square().sum().backward()
    before = weights(model)
    opt.param_groups[0]["variant"] = variant
    with pytest.raises(RuntimeError, match="gradients of its outputs, which were not kept"):
        opt.step()
    assert_close(weights(model), before, 0.0)


def test_a_model_called_by_its_parts_takes_another_variant_from_the_second_pass_on() -> None:
    model = network()
    opt = LocoProp(model, lr=1e-3, gamma=20.0, solver="sgd", output_transfer="sigmoid")

    def by_parts() -> None:
        opt.zero_grad()
        a = batch(8, 6)
        for part in model:
            a = part(a)
        a.square().sum().backward()
        opt.step()

    by_parts()
    opt.param_groups[0]["variant"] = "pocoprop-s"
    with pytest.raises(RuntimeError, match="from now on it is kept"):
        by_parts()
    before = weights(model)
    by_parts()
    assert not torch.equal(before[0], model[0].weight)


def test_a_batch_that_was_dropped_does_not_keep_a_variant_from_being_taken() -> None:
    model = network()
    opt = LocoProp(model, lr=1e-3, gamma=20.0, solver="sgd", output_transfer="sigmoid")
    step(model, opt)
    model(batch(8, 6)).square().sum().backward()
    model.zero_grad()
    opt.param_groups[0]["variant"] = "pocoprop-s"
    own = {"lr": 1e-3, "gamma": 20.0, "solver": "sgd", "variant": "pocoprop-s"}
    expected = after_one_step(copy.deepcopy(model), **own)
    step(model, opt)
    assert_close(weights(model), expected, 1e-12)


@pytest.mark.parametrize("setting", [{"max_rows": 3}, {"local_steps": 5}, {"gate": True}])
def test_other_settings_are_taken_from_the_next_forward_pass_on(setting: dict[str, Any]) -> None:
    """One iteration keeps no rows, so the next forward pass must record what five need."""
    model = network()
    own = {"lr": 1e-2, "gamma": 20.0, "solver": "sgd", "local_steps": 1}
    opt = LocoProp(model, preset="paper-m", **own, output_transfer="sigmoid")
    step(model, opt)
    opt.param_groups[0].update(setting)
    fresh = LocoProp(
        other := copy.deepcopy(model),
        preset="paper-m",
        **{**own, **setting},
        output_transfer="sigmoid",
    )
    fresh.param_groups[0]["steps"] = 1
    fresh._require()  # which rows are drawn depends on it
    step(other, fresh)
    step(model, opt)
    assert_close(weights(model), weights(other), 1e-12)


def test_a_group_that_was_replaced_is_the_group_that_counts() -> None:
    """As one that was changed in place."""
    changes = {"local_steps": 1, "variant": "locoprop-s", "solver": "sgd", "cap": 1e-4}
    found = []
    for replace in (False, True):
        model = network()
        opt = LocoProp(model, preset="paper-m", lr=1e-3, output_transfer="sigmoid")
        for step in range(4):
            if step == 2 and replace:
                opt.param_groups[0] = {**opt.param_groups[0], **changes}
            elif step == 2:
                opt.param_groups[0].update(changes)
            cross_entropy(model(batch(7, 6)), batch(7, 3, seed=2)).backward()
            opt.step()
            opt.zero_grad()
        found.append(weights(model))
    assert_close(found[0], found[1], 0.0)


def split(model: nn.Module) -> list[dict[str, Any]]:
    """Return the usual groups: biases without weight decay."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for name, p in named.items() if name.endswith("weight")]},
        {"params": [p for name, p in named.items() if name.endswith("bias")], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(
    "settings", [{}, {"variant": "locoprop-s", "solver": "exact"}], ids=["default", "exact"]
)
def test_a_later_rate_for_biases_alone_is_refused_like_one_of_the_constructor(
    settings: dict[str, Any],
) -> None:
    model = network()
    opt = LocoProp(model, param_groups=split(model), output_transfer="sigmoid", **settings)
    for rate in (0.02, 0.03):
        for group in opt.param_groups:
            group["lr"] = rate
        cross_entropy(model(batch(7, 6)), batch(7, 3)).backward()
        opt.step()
        opt.zero_grad()
    before = weights(model)
    cross_entropy(model(batch(7, 6)), batch(7, 3)).backward()
    opt.param_groups[1]["lr"] = 0.0
    with pytest.raises(ValueError, match=r"their groups differ in lr\. Give both the same"):
        opt.step()
    assert all(map(torch.equal, weights(model), before))


@pytest.mark.parametrize(("name", "value"), [("lr", -1.0), ("momentum", 2.0), ("decay", -0.1)])
def test_later_numbers_out_of_range_are_refused(name: str, value: float) -> None:
    model = network()
    opt = LocoProp(model, output_transfer="sigmoid")
    cross_entropy(model(batch(7, 6)), batch(7, 3)).backward()
    opt.param_groups[0][name] = value
    before = weights(model)
    with pytest.raises(ValueError, match=f"Invalid {name}={value}"):
        opt.step()
    assert all(map(torch.equal, weights(model), before))
