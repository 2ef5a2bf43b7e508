"""The table of settings: what follows from it, for the constructor and for parameter groups."""

import inspect

import pytest
import torch
from torch import nn

from torch_locoprop import Guards, LocoProp
from torch_locoprop.config import settings
from torch_locoprop.config.arguments import ARGUMENTS
from torch_locoprop.config.presets import PRESETS, resolved
from torch_locoprop.config.setting_kinds import Setting
from torch_locoprop.config.settings import (
    DEFAULTS,
    GRAPH_KEY_SETTINGS,
    LAYER_SETTINGS,
    PLAN_SETTINGS,
    SETTINGS,
    Settings,
)


def test_the_signature_and_the_documentation_have_every_setting() -> None:
    parameters, general = inspect.signature(LocoProp).parameters, resolved({})
    for name, setting in SETTINGS.items():
        assert parameters[name].default == (None if name == "lr" else general[name])
        assert f"{name}: {setting.meaning[:20]}" in " ".join(str(LocoProp.__doc__).split())
    for name, preset in PRESETS.items():
        assert f"``{name}``: {preset.purpose}" in " ".join(str(LocoProp.__doc__).split())
    assert "{" not in str(LocoProp.__doc__)


def test_what_is_derived_from_the_table() -> None:
    """A setting that says nothing about itself is part of the plan and of the key of a CUDA graph."""
    plain = Setting(default=1, meaning="anything")
    assert plain.in_plan
    assert plain.in_graph_key
    assert not plain.per_tensor
    assert set(GRAPH_KEY_SETTINGS) == set(SETTINGS) - {"lr"}
    assert set(PLAN_SETTINGS) == {n for n, s in SETTINGS.items() if s.in_plan}
    assert set(SETTINGS) - set(LAYER_SETTINGS) == {"lr", "momentum", "decay", "eps", "weight_decay"}
    assert set(DEFAULTS) == set(SETTINGS) == {"lr", *Settings.__annotations__}


def test_every_group_holds_every_setting() -> None:
    opt = LocoProp(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    assert set(SETTINGS) <= set(opt.param_groups[0])


def test_an_unknown_argument_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match=r"'gama'.*Did you mean 'gamma'"):
        LocoProp(nn.Linear(3, 2), gama=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "meant"), [("fallbak", "fallback"), ("layer", "layers"), ("guard", "guards")]
)
def test_every_argument_is_suggested(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"Did you mean '{meant}'"):
        LocoProp(nn.Linear(3, 2), **{given: None})


def test_the_constructor_has_the_listed_arguments_and_the_settings() -> None:
    assert set(inspect.signature(LocoProp).parameters) == {*ARGUMENTS, *SETTINGS}


def test_a_subclass_has_a_signature_of_its_own() -> None:
    class Own(LocoProp):
        def __init__(self, model: nn.Module, alpha: float = 3.0) -> None:
            super().__init__(model, lr=alpha)

    assert list(inspect.signature(Own).parameters) == ["model", "alpha"]


def test_guards_are_the_settings_of_their_names() -> None:
    together = LocoProp(nn.Linear(3, 2), guards=Guards(cap=0.1, cap_by="backprop", gate=True))
    apart = LocoProp(nn.Linear(3, 2), cap=0.1, cap_by="backprop", gate=True)
    for name in settings.SETTINGS:
        assert together.param_groups[0][name] == apart.param_groups[0][name]


def test_guards_may_stand_in_a_group() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    groups = [
        {"params": list(model[0].parameters()), "guards": Guards(gate=True)},
        {"params": list(model[2].parameters())},
    ]
    opt = LocoProp(model, param_groups=groups)
    assert [group["gate"] for group in opt.param_groups] == [True, False]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"guards": Guards(), "cap": 0.1}, ValueError, "Given both in guards= and by itself: cap"),
        ({"guards": 0.1}, TypeError, "Must be a torch_locoprop.Guards"),
        ({"guards": Guards(cap=-1.0)}, ValueError, "Invalid cap=-1.0"),
    ],
)
def test_wrong_guards_are_refused(
    given: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LocoProp(nn.Linear(3, 2), **given)  # type: ignore[arg-type]


def test_capped_by_guards_is_capped() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    opt = LocoProp(model, lr=1.0, solver="sgd", local_steps=1, guards=Guards(cap=1e-3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(5, 3)).square().sum().backward()
    opt.step()
    moved = torch.cat([(p - before[name]).flatten() for name, p in model.named_parameters()])
    torch.testing.assert_close(moved.norm(), 1e-3 * before["weight"].norm())
