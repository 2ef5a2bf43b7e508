"""How a plan decides: which settings make it steady, and which method serves a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import network
from torch import nn

from torch_locoprop import LocoProp
from torch_locoprop.paper.gram import RowUse
from torch_locoprop.paper.transfers import TRANSFERS
from torch_locoprop.recording.transfer_assignment import COMPILED, IN_PIECES, NOT_CALLED
from torch_locoprop.solvers import SOLVERS, FirstOrder
from torch_locoprop.stepping.method import LayerPlan, Plan, problems_before

M: dict[str, Any] = {"preset": "paper-m"}


def made(model: nn.Module, **settings: Any) -> LocoProp:
    return LocoProp(model, **{**M, "output_transfer": "sigmoid", **settings})


def groups_of(model: nn.Sequential, *settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return groups of the layers with their settings; the last group has all other layers."""
    layers = [list(module.parameters()) for module in model if isinstance(module, nn.Linear)]
    first = len(settings) - 1
    params = [*layers[:first], [p for layer in layers[first:] for p in layer]]
    return [{"params": p, **own} for p, own in zip(params, settings, strict=True)]


def planned(*settings: dict[str, Any]) -> Plan:
    """Return the plan of groups with these settings."""
    model = network()
    opt = made(model, param_groups=groups_of(model, *settings))
    return Plan(opt._local_groups(), opt._components)


class NeedsNoRows(FirstOrder):
    """A solver of the user's that says itself which rows it needs."""

    name = "own"
    step = SOLVERS["sgd"].step  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return self.name

    def use_of_rows(self, *given: Any, **named: Any) -> RowUse | None:
        return None


NATURAL = {"variant": "natural-s"}
FISHER = {"variant": "locoprop-s", "regularizer": "fisher"}


@pytest.mark.parametrize(
    ("settings", "steady"),
    [
        ([{}], True),
        ([{"local_steps": 1, "solver": "sgd"}], True),
        ([{"every": 2}], False),
        ([{"max_rows": 3}], False),
        ([{"every": 2, "max_rows": 3}], False),
        ([{"solver": "exact", "variant": "locoprop-s"}], True),
        ([{"solver": NeedsNoRows()}], True),
        ([NATURAL], False),
        ([FISHER], False),
        ([{}, {"max_rows": 3}], False),
        ([{"max_rows": 3}, {}], False),
    ],
    ids=str,
)
def test_a_step_with_all_rows_and_no_fisher_matrix_is_like_the_one_before(
    settings: list[dict[str, Any]], steady: bool
) -> None:
    assert planned(*settings).is_steady is steady


@pytest.mark.parametrize(
    ("settings", "curved"),
    [
        ([{"local_steps": 1}], False),
        ([{"local_steps": 2}], True),
        ([{"local_steps": 1, "solver": "exact", "variant": "locoprop-s"}], True),
        ([{"local_steps": 1, **NATURAL}], True),
        ([{"local_steps": 1, **FISHER}], True),
        ([{"local_steps": 1}, {"local_steps": 2}], True),
        ([{"local_steps": 2}, {"local_steps": 1}], True),
    ],
    ids=str,
)
def test_one_plain_iteration_follows_the_gradient(
    settings: list[dict[str, Any]], curved: bool
) -> None:
    assert planned(*settings).has_curvature() is curved


def test_a_plan_is_that_of_the_groups_themselves() -> None:
    model = network()
    opt = made(model, param_groups=groups_of(model, {}, {}))
    groups = opt._local_groups()
    plan = Plan(groups, opt._components)
    assert plan.is_current(groups)
    assert plan.is_current(list(groups))
    assert not plan.is_current([groups[0], dict(groups[1])])
    assert not plan.is_current([dict(groups[0]), groups[1]])
    assert not plan.is_current(groups[:1])
    assert not plan.is_current([*groups, dict(groups[0])])
    groups[1]["params"] = groups[1]["params"][:2]
    assert not plan.is_current(groups)


def test_layers_record_for_a_plan_as_long_as_their_roles_stay() -> None:
    model = network()
    for settings, steady in (({}, True), ({"every": 2}, False)):
        opt = made(model, **settings)
        plan = Plan(opt._local_groups(), opt._components)
        assert not plan.is_required(opt._layers)
        plan.note_required(opt._layers)
        assert plan.is_required(opt._layers) is steady
        opt._layers[1].note = "changed"
        assert not plan.is_required(opt._layers)


def test_a_layer_has_the_group_of_its_weight() -> None:
    model = network()
    layers = [m for m in model if isinstance(m, nn.Linear)]
    groups = [{"params": [m.bias for m in layers], "lr": 0.1}]
    groups.append({"params": [m.weight for m in layers], "lr": 0.2})
    opt = made(model, param_groups=groups)
    assert [opt._plan.group(layer)["lr"] for layer in opt._layers] == [0.2] * 3
    for number in (0, 1):  # and its number of steps
        opt = made(model, param_groups=groups, every=2)
        opt.param_groups[1]["steps"], opt.param_groups[0]["steps"] = number, 1 - number
        plan = Plan(opt._local_groups(), opt._components)
        iterations = {plan.method(layer).local_steps for layer in opt._layers}
        assert iterations == {1 if number == 1 else opt.param_groups[0]["local_steps"]}
        assert opt.param_groups[0]["local_steps"] > 1


@pytest.mark.parametrize(
    ("steps", "every", "problems"),
    [(0, 1, 0), (0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2), (5, 1, 5)],
)
def test_every_third_step_has_a_problem_and_the_first_one_too(
    steps: int, every: int, problems: int
) -> None:
    assert problems_before({"steps": steps, "every": every}) == problems


@pytest.mark.parametrize("steps", range(5))
def test_steps_between_problems_are_backprop_steps(steps: int) -> None:
    opt = made(network(), every=3)
    opt.param_groups[0]["steps"] = steps
    plan = Plan(opt._local_groups(), opt._components)
    iterations = 10 if steps % 3 == 0 else 1
    assert [plan.method(layer).local_steps for layer in opt._layers] == [iterations] * 3
    opt._layers[0].obstacle = "because"
    assert plan.method(opt._layers[0]).local_steps == 1
    assert plan.method(opt._layers[1]).local_steps == iterations


def layer_plan(variant: str, transfer: str | None = "tanh", **role: Any) -> LayerPlan:
    """Return the plan of the first layer of a network, in a role."""
    opt = made(network(), variant=variant, local_steps=5)
    layer = opt._layers[0]
    layer.transfer, layer.decided = None if transfer is None else TRANSFERS[transfer], True
    for name, value in role.items():
        setattr(layer, name, value)
    return opt._plan.of(layer)


@pytest.mark.parametrize(
    ("given", "role", "serves", "note"),
    [
        (("locoprop-m",), {}, "locoprop-m", ""),
        (("locoprop-m", None), {"note": "why"}, "locoprop-s", "why"),
        (("locoprop-m", None), {"decided": False}, "locoprop-m", ""),
        (("locoprop-m",), {"obstacle": "why"}, "locoprop-s", "why"),
        (("locoprop-m",), {"note": "why"}, "locoprop-m", ""),
        (("locoprop-m",), {"note": NOT_CALLED}, "locoprop-m", NOT_CALLED),
        (("locoprop-m", "relu"), {"compiled": True}, "locoprop-m", ""),
        (("natural-s",), {}, "natural-s", ""),
        (("natural-s",), {"compiled": True}, "natural-s", IN_PIECES),
        (("pocoprop-m", "relu"), {"compiled": True}, "pocoprop-m", COMPILED),
        (("pocoprop-m", "tanh"), {"compiled": True}, "pocoprop-m", ""),
        (("pocoprop-m", "relu"), {}, "pocoprop-m", ""),
        (("pocoprop-m", None), {"compiled": True, "decided": False}, "pocoprop-m", ""),
        (("proxprop",), {}, "proxprop", ""),
        (("proxprop",), {"is_output": True}, "proxprop", "output layer: plain gradient descent"),
        (("locoprop-m",), {"is_output": True}, "locoprop-m", ""),
    ],
    ids=range(16),  # not the notes, which may change
)
def test_the_variant_that_serves_a_layer_and_its_note(
    given: tuple[Any, ...], role: dict[str, Any], serves: str, note: str
) -> None:
    plan = layer_plan(*given, **role)
    assert (plan.asked.name, plan.variant.name, plan.note) == (given[0], serves, note)
    plain = "obstacle" in role or (given[0] == "proxprop" and "is_output" in role)
    assert plan.method.local_steps == (1 if plain else 5)


def test_a_layer_is_decided_anew_only_if_its_role_changes() -> None:
    opt = made(network())
    layer = opt._layers[0]
    known = opt._plan.of(layer)
    assert opt._plan.of(layer) is known
    layer.is_output = True
    other = opt._plan.of(layer)
    assert other is not known
    assert opt._plan.of(layer) is other


def test_only_one_plain_iteration_is_a_backprop_step() -> None:
    opt = made(network(), solver="sgd", local_steps=1)
    method = opt._plan.method(opt._layers[0])
    assert method.is_backprop
    assert not replace(method, local_steps=2).is_backprop
    assert not replace(method, solver=SOLVERS["momentum"]).is_backprop
