"""Presets: which values a constructor starts from, and what overrides them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cases import batch, network
from torch import nn

from torch_locoprop import Guards, LocoProp
from torch_locoprop.config.presets import PRESETS
from torch_locoprop.config.settings import DEFAULTS, SETTINGS

PUBLISHED = {
    "lr": 1e-5,
    "gamma": 10.0,
    "local_steps": 10,
    "momentum": 0.999,
    "decay": 0.9,
    "eps": 1e-5,
}


def settings_of(**arguments: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = LocoProp(network(), output_transfer="sigmoid", **arguments)
    return {name: opt.param_groups[0][name] for name in SETTINGS}


def test_nothing_given_is_the_general_preset() -> None:
    found = settings_of()
    assert found == settings_of(preset="general")
    assert found["lr"] == 0.04
    assert found["variant"] == "locoprop-s"
    assert found["solver"] == "general"


@pytest.mark.parametrize(
    ("preset", "variant"), [("paper-m", "locoprop-m"), ("paper-s", "locoprop-s")]
)
def test_a_variant_starts_from_its_paper_values(preset: str, variant: str) -> None:
    found = settings_of(preset=preset)
    assert found == settings_of(variant=variant)
    assert found["variant"] == variant
    assert found["solver"] == "rmsprop"
    assert {name: found[name] for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize(
    "given",
    [
        {"gamma": 2.0},
        {"local_steps": 3},
        {"solver": "adam"},
        {"eps": 1e-3},
        {"gate": True},
        {"guards": Guards(gate=True)},
        {"regularizer": "l2"},
        {"every": 2},
        {"local_reduction": "mean"},
        {"apply": "gradient", "outer": lambda params: torch.optim.SGD(params, lr=0.1)},
    ],
    ids="-".join,
)
def test_settings_of_iterations_start_from_the_paper(given: dict[str, Any]) -> None:
    found = settings_of(**given)
    own = {k: v for k, v in given.items() if k in SETTINGS}
    changed = {k: v for k, v in found.items() if v != DEFAULTS[k] and k not in own}
    assert changed.pop("regularizer", "none") == "none"
    assert changed.keys() <= {"gate", "lr"}
    assert found["variant"] == "locoprop-m"


@pytest.mark.parametrize(
    "given", [{"lr": 0.1}, {"momentum": 0.5}, {"weight_decay": 0.1}, {"cap": 1.0}]
)
def test_other_settings_stay_with_the_general_preset(given: dict[str, Any]) -> None:
    assert settings_of(**given) == {**settings_of(), **given}


@pytest.mark.parametrize(
    "given",
    [
        {"gate": False},
        {"regularizer": None},
        {"every": 1},
        {"max_rows": 5},
        {"guards": Guards(cap=0.1)},
    ],
    ids="-".join,
)
def test_defaults_that_are_given_do_not_change_the_method(given: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings without effect
        opt = LocoProp(network(), **given)
    assert opt.param_groups[0]["solver"] == "general"


def test_guards_and_their_settings_are_the_same() -> None:
    assert settings_of(guards=Guards(cap=0.1)) == settings_of(cap=0.1)


def test_explicit_settings_override_a_preset() -> None:
    found = settings_of(preset="paper-m", lr=1e-3, solver="adam")
    assert (found["lr"], found["solver"], found["gamma"]) == (1e-3, "adam", 10.0)
    assert settings_of(preset="spectral", lr=0.5)["lr"] == 0.5


def test_the_solver_spectral_starts_from_its_preset() -> None:
    assert settings_of(solver="spectral") == settings_of(preset="spectral")


def test_groups_have_presets_of_their_own() -> None:
    model = network()
    first, second, third = (list(m.parameters()) for m in model if isinstance(m, nn.Linear))
    opt = LocoProp(
        model,
        lr=0.02,
        output_transfer="sigmoid",
        param_groups=[
            {"params": first},
            {"params": second, "variant": "locoprop-m"},
            {"params": third, "preset": "spectral", "lr": 0.5},
        ],
    )
    general, iterated, spectral = opt.param_groups
    assert general["solver"] == "general"
    assert (iterated["solver"], iterated["lr"], iterated["gamma"]) == ("rmsprop", 0.02, 10.0)
    assert (spectral["solver"], spectral["lr"], spectral["momentum"]) == ("spectral", 0.5, 0.9)
    assert "preset" not in spectral
    for step in range(3):
        model(batch(8, 6, seed=step)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def test_a_group_that_is_added_has_the_constructors_settings() -> None:
    model = network()
    first, *rest = (list(m.parameters()) for m in model if isinstance(m, nn.Linear))
    opt = LocoProp(model, lr=0.02, param_groups=[{"params": first}])
    opt.add_param_group({"params": [p for own in rest for p in own]})
    one, other = ({k: g[k] for k in SETTINGS} for g in opt.param_groups)
    assert one == other


def test_unknown_presets() -> None:
    with pytest.raises(ValueError, match=r"Unknown preset 'spectrall'\. Did you mean 'spectral'\?"):
        LocoProp(network(), preset="spectrall")
    for given, meant in (("locoprop-m", "paper-m"), ("paper-locoprop-s", "paper-s")):
        with pytest.raises(
            ValueError, match=rf"Unknown preset '{given}'\. Did you mean '{meant}'\?"
        ):
            LocoProp(network(), preset=given)
    with pytest.raises(ValueError, match="Unknown preset 'paper'"):
        LocoProp(network(), param_groups=[{"params": network().parameters(), "preset": "paper"}])


def test_settings_without_effect_are_named() -> None:
    with pytest.warns(
        UserWarning, match="gamma, local_steps have no effect with solver='spectral'"
    ):
        LocoProp(network(), preset="spectral", gamma=3.0, local_steps=4)


def test_the_fallback_follows_the_learning_rate() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))

    with pytest.warns(UserWarning, match=r"get AdamW\(lr=0.0133333\)"):
        opt = LocoProp(model())
    assert opt.param_groups[1]["lr"] == pytest.approx(0.04 / 3)
    with pytest.warns(UserWarning, match=r"get AdamW\(lr=0.002\)"):
        LocoProp(model(), lr=0.006)
    with pytest.warns(UserWarning, match=r"get AdamW\(lr=0.001\)"):
        LocoProp(model(), preset="paper-m", output_transfer="linear")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains(name: str) -> None:
    model = network()
    opt = LocoProp(model, preset=name, output_transfer="sigmoid")
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        model(batch(8, 6, seed=step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["lr", "momentum", "decay"])
def test_weight_and_bias_share_the_settings_of_one_matrix(name: str) -> None:
    layer = nn.Linear(4, 3)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], name: 0.1}]
    with pytest.raises(ValueError, match=f"differ in {name}"):
        LocoProp(layer, param_groups=groups)


def test_weight_decay_may_differ_between_weight_and_bias() -> None:
    layer = nn.Linear(4, 3)
    groups = [{"params": [layer.weight], "weight_decay": 0.1}, {"params": [layer.bias]}]
    LocoProp(layer, param_groups=groups)


def test_the_gate_is_refused_with_the_spectral_step() -> None:
    with pytest.raises(ValueError, match="gate=True and cap_by='backprop' depend"):
        LocoProp(network(), preset="spectral", gate=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cap": 0.1, "cap_by": "backprop"}, "cap_by='backprop' depend"),
        ({"every": 2}, r"pass solver=Spectral\(every=k\)"),
        ({"variant": "proxprop"}, "plain gradient step in the output layer"),
    ],
)
def test_settings_that_do_not_fit_the_spectral_step(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocoProp(network(), preset="spectral", **given)


def test_the_spectral_solver_under_an_outer_optimizer_starts_from_its_preset() -> None:
    model = network()
    opt = LocoProp(
        model,
        solver="spectral",
        apply="gradient",
        outer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    assert opt.param_groups[0]["variant"] == "locoprop-s"
