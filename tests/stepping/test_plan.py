"""A plan is kept from step to step, and made anew when something that it depends on changes."""

from collections.abc import Callable
from typing import Any

import pytest
from cases import assert_close, batch, cross_entropy, network, weights
from changed_settings import CHANGED
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.config.settings import PLAN_SETTINGS, SETTINGS
from torch_locoprop.stepping import method

Change = Callable[[nn.Sequential, LocoProp], None]


def take_steps(model: nn.Module, opt: LocoProp, steps: int, *, anew: bool = False) -> None:
    """Take steps; ``anew`` plans each of them from scratch."""
    for i in range(steps):
        if anew:
            opt._require()
        cross_entropy(model(batch(40, 6, seed=i)), batch(40, 3, seed=9)).backward()
        opt.step()
        opt.zero_grad()


def after(change: Change, anew: bool, **settings: Any) -> list[Tensor]:
    """Return the weights after three steps, a change, and three further steps."""
    model = network()
    settings = {"lr": 1e-2, "output_transfer": "sigmoid", **settings}
    opt = LocoProp(model, **settings)
    take_steps(model, opt, 3, anew=anew)
    change(model, opt)
    take_steps(model, opt, 3, anew=anew)
    return weights(model)


def nothing(model: nn.Sequential, opt: LocoProp) -> None:
    pass


def freeze(model: nn.Sequential, opt: LocoProp) -> None:
    model[2].requires_grad_(False)


def add_a_transfer(model: nn.Sequential, opt: LocoProp) -> None:
    model.append(nn.ReLU())


def regroup(model: nn.Sequential, opt: LocoProp) -> None:
    """Move the parameters of the first layer to a group of their own."""
    first = opt.param_groups[0]
    moved, first["params"] = first["params"][:2], first["params"][2:]
    opt.param_groups.append({**first, "params": moved, "gamma": 3.0, "local_steps": 2})


def replace_the_group(model: nn.Sequential, opt: LocoProp) -> None:
    opt.param_groups[0] = {**opt.param_groups[0], "gamma": 3.0}


METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "locoprop-m": {"variant": "locoprop-m"},
    "locoprop-s": {"variant": "locoprop-s"},
    "closed form": {"variant": "locoprop-m", "solver": "exact"},
    "some rows": {"variant": "locoprop-m", "max_rows": 7},
    "natural gradient": {"variant": "locoprop-m", "regularizer": "fisher"},
}
EACH_METHOD = pytest.mark.parametrize("settings", METHODS.values(), ids=list(METHODS))


@EACH_METHOD
def test_a_plan_stays_while_nothing_changes(settings: dict[str, Any]) -> None:
    model = network()
    opt = LocoProp(model, output_transfer="sigmoid", **settings)
    take_steps(model, opt, 1)  # which detects the transfers
    plan = opt._plan
    for factor in (0.5, 2.0):  # as a schedule does
        opt.param_groups[0]["lr"] *= factor
        take_steps(model, opt, 1)
        assert opt._plan is plan


@EACH_METHOD
def test_a_layers_variant_is_decided_once_a_plan(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[object] = []
    decide = method._effective_variant
    monkeypatch.setattr(
        method, "_effective_variant", lambda *given: decided.append(given) or decide(*given)
    )
    model = network()
    opt = LocoProp(model, output_transfer="sigmoid", **settings)
    assert len(decided) == 3  # the layers of the model
    take_steps(model, opt, 2)
    decided.clear()
    take_steps(model, opt, 12)  # of which some renew C, for the default
    opt.summary()
    assert not decided
    opt.param_groups[0]["momentum"] = 0.5  # no setting of the plan
    take_steps(model, opt, 1)
    assert not decided
    opt.param_groups[0]["max_rows"] = 5
    take_steps(model, opt, 1)
    assert len(decided) == 3


@EACH_METHOD
@pytest.mark.parametrize("every", [1, 3])
def test_a_plan_that_stays_acts_as_new_ones(settings: dict[str, Any], every: int) -> None:
    settings = {**settings, "every": every}
    found = after(nothing, False, **settings), after(nothing, True, **settings)
    assert_close(*found, 0.0)


@pytest.mark.parametrize("name", PLAN_SETTINGS)
def test_a_setting_of_the_plan_makes_another_one(name: str) -> None:
    model = network()
    preset = "paper-s" if name == "gram" else "paper-m"  # which takes more of the inputs than XᵀX
    opt = LocoProp(model, preset=preset, output_transfer="sigmoid")
    take_steps(model, opt, 2)
    plan = opt._plan
    opt.param_groups[0][name] = CHANGED[name]
    model(batch(8, 6))
    assert opt._plan is not plan


@pytest.mark.parametrize("variant", ["locoprop-m", "locoprop-s", "pocoprop-m"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_changed_setting_acts_as_in_a_new_plan(name: str, variant: str) -> None:
    def change(model: nn.Sequential, opt: LocoProp) -> None:
        opt.param_groups[0][name] = CHANGED[name]

    if name == "gram" and variant != "locoprop-s":
        with pytest.raises(ValueError, match="gram='block' needs a step"):
            after(change, False, variant=variant)
        return
    assert_close(after(change, False, variant=variant), after(change, True, variant=variant), 0.0)


@pytest.mark.parametrize("variant", ["locoprop-m", "locoprop-s"])
@pytest.mark.parametrize("change", [freeze, add_a_transfer, regroup, replace_the_group])
def test_every_change_acts_as_in_a_new_plan(change: Change, variant: str) -> None:
    changed = after(change, False, variant=variant)
    assert_close(changed, after(change, True, variant=variant), 0.0)
    unchanged = after(nothing, False, variant=variant)
    assert any(not one.equal(other) for one, other in zip(changed, unchanged, strict=True))


def test_a_layer_that_is_thawed_is_planned_then() -> None:
    """Its transfer is not known before."""

    def thaw(model: nn.Sequential, opt: LocoProp) -> None:
        model[0].requires_grad_(True)

    def trained(anew: bool) -> list[Tensor]:
        model = network()
        model[0].requires_grad_(False)
        opt = LocoProp(model, lr=1e-2, local_steps=3, output_transfer="sigmoid")
        take_steps(model, opt, 3, anew=anew)
        thaw(model, opt)
        take_steps(model, opt, 3, anew=anew)
        assert opt._layers[0].transfer is not None
        assert not opt._hooks.search.is_on
        return weights(model)

    assert_close(trained(False), trained(True), 0.0)


def test_more_iterations_after_the_backward_pass_need_rows_that_were_not_kept() -> None:
    model = network()
    opt = LocoProp(model, variant="locoprop-s", local_steps=1, output_transfer="sigmoid")
    take_steps(model, opt, 2)
    before = weights(model)
    model(batch(40, 6)).sum().backward()
    opt.param_groups[0]["local_steps"] = 10
    with pytest.raises(RuntimeError, match="changed between backward"):
        opt.step()
    assert_close(weights(model), before, 0.0)
    opt.zero_grad()
    take_steps(model, opt, 1)
    assert any(not one.equal(other) for one, other in zip(weights(model), before, strict=True))
