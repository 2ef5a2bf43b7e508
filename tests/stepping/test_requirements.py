"""What the passes have to record for a step, from the definitions of its settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import batch, cross_entropy, network
from torch import nn

from torch_locoprop import LocoProp
from torch_locoprop.paper.gram import FULL, RowUse, Structure
from torch_locoprop.paper.targets import GradientDescent, NaturalGradient
from torch_locoprop.paper.transfers import TRANSFERS
from torch_locoprop.paper.variants import VARIANTS, Variant
from torch_locoprop.solvers import SOLVERS, Exact, FirstOrder

GAMMA = {"variant": "locoprop-m", "lr": 1e-2, "local_steps": 4}


def made(model: nn.Module, **settings: Any) -> LocoProp:
    return LocoProp(model, **{"output_transfer": "sigmoid", **settings})


def step(model: nn.Module, opt: LocoProp, seed: int = 1) -> None:
    cross_entropy(model(batch(8, 6, seed=seed)), batch(8, 3, seed=9)).backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize(
    ("settings", "first", "later"),
    [
        ({"preset": "paper-m"}, {"g_norm"}, set()),
        ({"preset": "paper-s"}, {"g_norm"}, set()),
        ({"preset": "spectral"}, set(), set()),  # its step has no target
        ({**GAMMA, "variant": "pocoprop-m"}, {"v"}, {"v"}),
        ({"preset": "paper-m", "diagnose": True}, {"g", "g_norm"}, {"g"}),
        ({**GAMMA, "variant": "natural-s"}, {"fisher"}, {"fisher"}),
        ({**GAMMA, "variant": "locoprop-s", "regularizer": "fisher"}, {"fisher"}, {"fisher"}),
    ],
    ids=lambda given: str(given if isinstance(given, dict) else sorted(given)),
)
def test_gradients_of_rows_are_recorded_where_a_step_needs_them(
    settings: dict[str, Any], first: set[str], later: set[str]
) -> None:
    model = network()
    opt = made(model, **settings)
    known = {"g", "g_norm", "v", "fisher"}
    assert [layer.needs & known for layer in opt._layers] == [first] * 3
    beside = not first - {"g_norm"}  # the weight's gradients may be computed beside the pass
    assert [layer.overlap_allowed for layer in opt._layers] == [beside] * 3
    assert opt._hooks.search.is_on  # for transfers
    assert opt._hooks.search.records_gradients is ("v" in first)
    step(model, opt)
    assert [layer.needs & known for layer in opt._layers] == [later] * 3
    searches = bool(later - {"g"})  # gradients behind transfers, and losses with other labels
    assert opt._hooks.search.is_on is searches


def test_layers_are_searched_while_one_that_is_trained_is_not_decided() -> None:
    model = network()
    model[0].requires_grad_(False)
    opt = made(model, preset="paper-m")
    step(model, opt)
    assert [layer.decided for layer in opt._layers] == [False, True, True]
    assert not opt._hooks.search.is_on


def test_one_layer_is_enough_to_record_gradients_behind_transfers() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "variant": "pocoprop-m"}]
    groups.append({"params": model[2:].parameters()})
    opt = made(model, **GAMMA, param_groups=groups)
    assert [("v" in layer.needs) for layer in opt._layers] == [True, False, False]
    assert opt._hooks.search.records_gradients
    model[0].requires_grad_(False)
    opt._require()
    assert not opt._hooks.search.records_gradients


def test_each_step_has_a_thousand_seeds_of_its_own() -> None:
    """Each call of a layer in a step adds one."""
    model = network()
    opt = made(model, **GAMMA, max_rows=3)
    for number in range(3):
        assert [layer.row_seed for layer in opt._layers] == [1000 * number] * 3
        step(model, opt)


def test_a_regularizer_by_the_fisher_matrix_has_labels_drawn_in_each_step() -> None:
    model = network()
    opt = made(model, **{**GAMMA, "variant": "locoprop-s", "regularizer": "fisher"})
    for _ in range(3):
        assert opt._hooks.labels.seed is not None
        step(model, opt)


@pytest.mark.parametrize("every", [1, 3])
def test_labels_are_drawn_in_the_steps_that_renew_the_fisher_matrix(every: int) -> None:
    model = network()
    target = NaturalGradient(every=every)
    opt = made(model, **{**GAMMA, "variant": Variant("own", target, VARIANTS["natural-s"].loss)})
    for number in range(7):
        drawn = opt._hooks.labels.seed is not None
        assert drawn is (number % every == 0), number
        step(model, opt)


@pytest.mark.parametrize(
    ("settings", "role", "needed"),
    [
        ({}, {}, True),
        ({"local_steps": 2}, {}, True),
        ({"local_steps": 1}, {}, False),
        ({"variant": "locoprop-s"}, {}, False),
        ({}, {"decided": False, "transfer": None}, True),
        ({}, {"transfer": "linear"}, False),
        ({}, {"transfer": "linear", "decided": False, "explicit": True}, False),
        ({}, {"transfer": "linear", "decided": True, "explicit": False}, False),
        ({}, {"obstacle": "why"}, False),
        ({}, {"shards": object()}, False),
    ],
    ids=range(10),
)
def test_outputs_are_kept_for_iterations_with_a_transfer(
    settings: dict[str, Any], role: dict[str, Any], needed: bool
) -> None:
    opt = made(network(), **{**GAMMA, **settings})
    layer = opt._layers[0]
    layer.transfer, layer.decided, layer.explicit = TRANSFERS["tanh"], True, False
    for name, value in role.items():
        setattr(layer, name, TRANSFERS[value] if value == "linear" else value)
    assert opt._plan.of(layer).needs_output is needed


class Asked(FirstOrder):
    """A solver that remembers what it was asked, and answers as it is told."""

    name = "asked"
    step = SOLVERS["sgd"].step  # type: ignore[attr-defined]

    def __init__(self, answer: RowUse | None) -> None:
        self.answer, self.last = answer, ()

    def use_of_rows(
        self, local_steps: int, number: int, state: Any, columns: int, *, structure: Any = None
    ) -> RowUse | None:
        self.last = (local_steps, number, state, columns, structure)
        return self.answer


def rows_for(
    answer: RowUse | None, moved: tuple[str, ...] = ("weight", "bias"), diagnosed: bool = False,
    states: Any = None, transfer: str | None = "linear", steps: int = 0, **settings: Any,
) -> tuple[RowUse | None, tuple[Any, ...]]:  # fmt: skip
    """Return what a step needs of the rows of a layer of 6 inputs, and what its solver was asked."""
    model, solver = network(), Asked(answer)
    given = {**GAMMA, "variant": "locoprop-s", "solver": solver, **settings}
    opt = made(model, **given)
    opt.param_groups[0]["steps"] = steps
    layer = opt._layers[0]
    layer.transfer = None if transfer is None else TRANSFERS[transfer]
    layer.decided = transfer is not None
    own = {layer.tensors[name]: state for name, state in (states or {}).items()}
    return opt._plan.use_of_rows(own, diagnosed, layer, moved), solver.last


TWO = RowUse(gradients=2)


@pytest.mark.parametrize(
    ("moved", "columns", "owner"),
    [(("weight", "bias"), 7, "weight"), (("weight",), 6, "weight"), (("bias",), 1, "bias")],
)
def test_a_solver_knows_the_columns_and_the_state_of_what_it_moves(
    moved: tuple[str, ...], columns: int, owner: str
) -> None:
    states = {"weight": {"of": torch.zeros(1)}, "bias": {"of": torch.ones(1)}}
    _, asked = rows_for(TWO, moved, states=states, steps=4, every=2)
    assert asked == (4, 2, states[owner], columns, None)


def test_the_state_of_another_solver_is_not_that_of_this_one() -> None:
    states = {"weight": {"of": torch.zeros(1)}}
    for of, known in ((None, True), ("asked", True), ("sgd", False)):
        model, solver = network(), Asked(TWO)
        opt = made(model, **{**GAMMA, "solver": solver})
        opt.param_groups[0]["state_of"] = of
        layer = opt._layers[0]
        own = {layer.tensors["weight"]: states["weight"]}
        opt._plan.use_of_rows(own, False, layer, ("weight", "bias"))
        assert solver.last[2] == (states["weight"] if known else {})


@pytest.mark.parametrize(
    ("answer", "settings", "needed"),
    [
        (TWO, {}, 2),
        (TWO, {"gate": True}, 3),  # the value of the objective costs as much as a gradient
        (TWO, {"diagnosed": True}, 2),  # measuring takes what is there
        (RowUse(), {"diagnosed": True}, 1),
        (RowUse(), {"gate": True}, 1),
        (RowUse(), {"gate": True, "diagnosed": True}, 1),
        (RowUse(), {}, 0),
        (None, {"gate": True}, None),
        (None, {"diagnosed": True}, None),
        (TWO, {"variant": "locoprop-m"}, 2),  # the transfer is linear
        (TWO, {"variant": "locoprop-m", "transfer": "tanh"}, None),
        (TWO, {"variant": "locoprop-m", "transfer": None}, None),
        (RowUse(), {"variant": "locoprop-m", "transfer": None}, 0),
        (RowUse(), {"variant": "locoprop-m", "transfer": "tanh"}, 0),
        (TWO, {"variant": "locoprop-s", "transfer": None}, 2),
        (TWO, {"variant": "pocoprop-s"}, None),
        (TWO, {"regularizer": "fisher"}, None),
    ],
    ids=str,
)
def test_gate_and_measurements_need_the_value_of_the_objective_too(
    answer: RowUse | None, settings: dict[str, Any], needed: int | None
) -> None:
    found, _ = rows_for(answer, **settings)
    assert (None if found is None else found.gradients) == needed


def test_a_layer_that_is_served_by_another_variant_keeps_what_the_one_asked_for_needs() -> None:
    """It may lose what rules out the other one before the step."""

    class Own(GradientDescent):
        """A target of which the gradient at the start is not known."""

        def first_gradient(self, *given: Any) -> None:
            return None

    variant = Variant("own", Own(), VARIANTS["locoprop-s"].loss)
    opt = made(network(), **{**GAMMA, "variant": variant, "solver": Asked(TWO)})
    layer = opt._layers[0]
    layer.transfer, layer.decided, layer.obstacle = TRANSFERS["linear"], True, "why"
    assert opt._plan.of(layer).variant.name == "locoprop-s"
    assert opt._plan.use_of_rows({}, False, layer, ("weight", "bias")) is None


def test_a_closed_form_needs_the_rows_of_a_loss_with_a_transfer() -> None:
    for variant, transfer, needed in (
        ("locoprop-s", "tanh", True),
        ("locoprop-s", None, True),
        ("locoprop-m", "tanh", False),
        ("locoprop-m", None, False),
    ):
        opt = made(network(), **{**GAMMA, "variant": variant, "solver": Exact()})
        layer = opt._layers[0]
        layer.transfer = None if transfer is None else TRANSFERS[transfer]
        layer.decided = transfer is not None
        found = opt._plan.use_of_rows({}, False, layer, ("weight", "bias"))
        assert (found is not None) is needed


def test_a_solver_is_told_of_products_that_are_left_out() -> None:
    found, asked = rows_for(TWO, gram="block", block_size=2)
    assert asked[4] == Structure("block", 2, ones=True)
    assert found is not None
    assert found.structure == asked[4]
    found, asked = rows_for(TWO, gram="block", block_size=99)  # one block of all columns
    assert (found.structure, asked[4]) == (FULL, None)  # type: ignore[union-attr]


def backward(model: nn.Module) -> None:
    cross_entropy(model(batch(8, 6)), batch(8, 3, seed=9)).backward()


def test_gradients_that_were_not_kept_are_named() -> None:
    model = network()
    opt = made(model, **GAMMA)
    backward(model)
    opt.param_groups[0]["variant"] = "pocoprop-m"
    with pytest.raises(RuntimeError, match="gradients of its outputs, which were not kept"):
        opt.step()


def test_settings_may_change_after_the_backward_pass_to_others_that_need_no_more() -> None:
    for variant in ("locoprop-s", "pocoprop-m"):
        model, other = network(), network()
        opt = made(model, **{**GAMMA, "variant": variant})
        plain = made(other, **{**GAMMA, "variant": variant, "local_steps": 3})
        backward(model)
        backward(other)
        opt.param_groups[0]["local_steps"] = 3
        opt.step()
        plain.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def test_a_solver_is_asked_again_if_something_has_changed() -> None:
    """What is moved, the layer's role, or the number of the step: the answer may depend on it."""
    solver = Asked(TWO)
    opt = made(network(), **{**GAMMA, "variant": "locoprop-s", "solver": solver})
    layer, group = opt._layers[0], opt.param_groups[0]

    def asked(*moved: str) -> tuple[Any, ...]:
        solver.last = ()
        assert opt._plan.use_of_rows({}, False, layer, moved) == TWO
        return solver.last

    assert asked("weight", "bias")[3] == 7
    assert asked("weight", "bias") == ()
    assert asked("weight")[3] == 6
    assert asked("weight") == ()
    group["steps"] += 1
    assert asked("weight")[1] == 1
    assert asked("weight") == ()
    layer.is_output = not layer.is_output
    assert asked("weight")[3] == 6


def test_a_solver_of_a_group_of_channels_knows_the_columns_of_one() -> None:
    """Of 4 channels in 2 groups, a kernel of size 3 has 2 · 3 inputs."""
    solver = Asked(TWO)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(8, 3)).double()
    opt = made(model, **{**GAMMA, "variant": "locoprop-s", "solver": solver})
    opt._plan.use_of_rows({}, False, opt._layers[0], ("weight", "bias"))
    assert solver.last[3] == 2 * 3 + 1


def test_a_plan_that_stays_is_required_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting the requirements in each step would cost host time."""
    model = network()
    opt = made(model, preset="paper-m")
    for _ in range(2):
        step(model, opt)
    required: list[object] = []
    monkeypatch.setattr(opt, "_require_of_plan", lambda: required.append(None))
    for _ in range(3):
        step(model, opt)
    assert not required
