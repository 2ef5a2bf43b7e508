"""cap=, gate=, every=, layers= and apply="nothing": what they do, and that they are off by default."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.objective import objective
from torch_locoprop.paper.tensors import norm
from torch_locoprop.stepping import guards
from torch_locoprop.stepping.guards import cap_factor, decreases_objective

X, Y = batch(8, 6), batch(8, 3, seed=2)


def loco(model: nn.Module, **options: Any) -> LocoProp:
    given = {"lr": 0.05, "gamma": 4.0, "solver": "sgd", "local_steps": 6, **options}
    return LocoProp(model, output_transfer="sigmoid", **given)


def stepped(steps: int = 1, **options: Any) -> tuple[nn.Sequential, LocoProp, list[Tensor]]:
    """Return the model after some steps, its optimizer, and each tensor's change in the last step."""
    model = network()
    opt = loco(model, **options)
    before = weights(model)
    for _ in range(steps):
        before = weights(model)
        model.zero_grad()
        cross_entropy(model(X), Y).backward()
        opt.step()
    return model, opt, [b - a for a, b in zip(before, weights(model), strict=True)]


def gradients(model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(cross_entropy(model(X), Y), list(model.parameters())))


# Cap --------------------------------------------------------------------------------------------


Make = Callable[[list[nn.Parameter]], Any]


def muon_and_adam(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.5, weight_decay=0.1),
        torch.optim.Adam([p for p in params if p.ndim != 2], lr=0.3),
    ]


# At one local step of the setting above, SGD's is the step of "replace".
OUTER: dict[str, Make] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05 * 4.0),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.3, weight_decay=0.1),
    "muon": muon_and_adam,
}


def given(outer: str | None) -> dict[str, Any]:
    return {} if outer is None else {"apply": "gradient", "outer": OUTER[outer]}


def layers(tensors: list[Tensor]) -> list[Tensor]:
    """Return weight and bias of each layer as one vector."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [torch.cat([weight.flatten(), bias]) for weight, bias in pairs]


def capped(opt: LocoProp) -> list[int]:
    return [int(layer.counts["capped"]) for layer in opt._layers]


@pytest.mark.parametrize("outer", [None, *OUTER])
@pytest.mark.parametrize("cap", [1e-3, 0.02])
def test_the_cap_is_relative_to_the_weight(cap: float, outer: str | None) -> None:
    """With an outer optimizer the cap limits what that optimizer writes."""
    free = stepped(**given(outer))[2]
    _, opt, moved = stepped(cap=cap, **given(outer))
    shortened = []
    norms = [weight.norm() for weight in weights(network())[::2]]
    for change, unbounded, length in zip(layers(moved), layers(free), norms, strict=True):
        shortened.append(int(unbounded.norm() > cap * length))
        if shortened[-1]:
            torch.testing.assert_close(change.norm(), cap * length)
            torch.testing.assert_close(change / change.norm(), unbounded / unbounded.norm())
        else:
            assert torch.equal(change, unbounded)
    assert any(shortened)
    assert capped(opt) == shortened


@pytest.mark.parametrize("outer", [None, "sgd"])
def test_the_cap_is_relative_to_the_backprop_step(outer: str | None) -> None:
    """The BackProp step is that of plain SGD, also for an outer optimizer."""
    lengths = [0.05 * 4.0 * g.norm() for g in layers(gradients(network()))]
    moved = layers(stepped(cap=1.5, cap_by="backprop", **given(outer))[2])
    free = layers(stepped(**given(outer))[2])
    for change, unbounded, step in zip(moved, free, lengths, strict=True):
        torch.testing.assert_close(change.norm(), torch.minimum(unbounded.norm(), 1.5 * step))
    assert any(u.norm() > 1.5 * step for u, step in zip(free, lengths, strict=True))


@pytest.mark.parametrize("cap_by", ["weight", "backprop"])
@pytest.mark.parametrize("outer", [None, *OUTER])
@pytest.mark.parametrize("local_steps", [1, 6])
def test_a_wide_cap_changes_nothing(local_steps: int, outer: str | None, cap_by: str) -> None:
    options = {"steps": 3, "local_steps": local_steps, **given(outer)}
    _, opt, moved = stepped(cap=1e9, cap_by=cap_by, **options)
    for ours, theirs in zip(moved, stepped(**options)[2], strict=True):
        assert torch.equal(ours, theirs)
    assert capped(opt) == [0, 0, 0]


@pytest.mark.parametrize("cap_by", ["weight", "backprop"])
@pytest.mark.parametrize("outer", [None, *OUTER])
@pytest.mark.parametrize("bias", [0.0, 1e-9])
def test_biases_that_start_at_zero_move(bias: float, outer: str | None, cap_by: str) -> None:
    """A bias at zero, or near it, moves as far as the layer's cap allows."""
    moved = []
    for start in (bias, 0.1):
        model = network()
        for layer in (model[0], model[2], model[4]):
            nn.init.constant_(layer.bias, start)  # type: ignore[arg-type]
        opt = loco(model, cap=0.01, cap_by=cap_by, **given(outer))
        before = weights(model)
        cross_entropy(model(X), Y).backward()
        opt.step()
        moved.append([b - a for a, b in zip(before, weights(model), strict=True)])
    near_zero, away = moved
    for change, other in zip(near_zero[1::2], away[1::2], strict=True):
        assert change.norm() > 0.3 * other.norm() > 0


@pytest.mark.parametrize("outer", [None, "sgd", "adamw"])
def test_a_weight_of_zero_is_not_capped(outer: str | None) -> None:
    """As the second matrix of a LoRA pair: free in the first step, capped by its norm after it."""

    def after(steps: int, cap: float | None) -> Tensor:
        torch.manual_seed(0)
        down, up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(up.weight)
        model = nn.Sequential(down, up).double()
        opt = loco(model, cap=cap, **given(outer))
        for _ in range(steps):
            opt.zero_grad()
            cross_entropy(model(X), Y).backward()
            opt.step()
        return up.weight.detach()

    first, second = after(1, cap=0.01), after(2, cap=0.01)
    assert first.any()
    assert torch.equal(first, after(1, cap=None))
    torch.testing.assert_close((second - first).norm(), 0.01 * first.norm())


def test_a_bias_is_capped_by_a_frozen_weight() -> None:
    for options in ({}, given("adamw")):
        model = network()
        for layer in (model[0], model[2], model[4]):
            layer.weight.requires_grad_(False)  # type: ignore[union-attr]
        opt = loco(model, cap=1e-3, **options)
        before = weights(model)
        cross_entropy(model(X), Y).backward()
        opt.step()
        moved = [(b - a).norm() for a, b in zip(before, weights(model), strict=True)]
        expected = [1e-3 * weight.norm() for weight in before[::2]]
        assert_close(moved[1::2], expected)
        assert not any(moved[::2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_factor(dtype: torch.dtype) -> None:
    zero, one = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
    assert cap_factor(norm([zero]), norm([zero]), 1.0) == 1
    assert cap_factor(norm([one]), norm([zero]), 1.0) == 1
    assert cap_factor(norm([zero]), norm([one]), 1.0) == 1
    assert cap_factor(norm([2 * one, one]), norm([one]), 1.0) == pytest.approx(5**-0.5)
    assert cap_factor(norm([one]), norm([4 * one]), 0.5) == 1
    tiny = torch.tensor(torch.finfo(dtype).smallest_normal, dtype=dtype)
    assert cap_factor(norm([zero]), tiny, float(tiny)) == 1  # tiny² is rounded to zero
    large = torch.full((100,), 6e4, dtype=dtype)  # whose norm float16 cannot hold
    assert cap_factor(norm([large]), norm([large]), 0.5) == 0.5


# Gate -------------------------------------------------------------------------------------------


def test_a_solution_that_does_not_move_is_no_reason_to_close_the_gate() -> None:
    model = network()
    opt = loco(model, gate=True, solver="momentum")
    for factor in (1, 0):
        model.zero_grad()
        (factor * cross_entropy(model(X), Y)).backward()
        for p in model.parameters():
            opt.state[p] = {}
        opt.step()
    assert [int(layer.counts["gated"]) for layer in opt._layers] == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:The first step changes")
def test_a_layer_whose_local_loss_rises_takes_the_backprop_step() -> None:
    """At a learning rate far beyond 2/λ the iterations diverge, and the local loss increases."""
    lr, gamma = 5.0, 0.01
    _, opt, moved = stepped(gate=True, lr=lr, gamma=gamma, variant="locoprop-s", local_steps=8)
    expected = [-lr * gamma * g for g in gradients(network())]
    assert [int(layer.counts["gated"]) for layer in opt._layers] == [1, 1, 1]
    assert_close(moved, expected)
    free = stepped(lr=lr, gamma=gamma, variant="locoprop-s", local_steps=8)[2]
    assert all(f.norm() > 100 * m.norm() for f, m in zip(free, moved, strict=True))


def test_the_outer_optimizer_is_given_the_gradient_of_a_layer_whose_local_loss_rises() -> None:
    options = {"lr": 5.0, "gamma": 0.01, "variant": "locoprop-s", "local_steps": 8}
    outer = {"apply": "gradient", "outer": lambda ps: torch.optim.SGD(ps, lr=0.1)}
    moved = stepped(gate=True, **options, **outer)[2]
    assert_close(moved, [-0.1 * g for g in gradients(network())])
    free = stepped(**options, **outer)[2]
    assert all(f.norm() > 100 * m.norm() for f, m in zip(free, moved, strict=True))


def test_momentum_is_gone_after_a_closed_gate_and_stays_behind_an_open_one() -> None:
    options = {"variant": "locoprop-s", "solver": "momentum", "momentum": 0.9, "local_steps": 8}
    for lr, closed in ((5.0, True), (1e-3, False)):
        model, opt, _ = stepped(gate=True, lr=lr, gamma=0.01, **options)
        assert all(bool(layer.counts["gated"]) is closed for layer in opt._layers)
        assert all(opt.state[p]["momentum"].any() != closed for p in model.parameters())


def test_an_open_gate_changes_nothing() -> None:
    _, opt, moved = stepped(gate=True)
    assert_close(moved, stepped()[2])
    assert [int(layer.counts["gated"]) for layer in opt._layers] == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:In the first step")
@pytest.mark.filterwarnings("ignore:The local solution")
def test_a_solution_that_is_not_finite_is_replaced_by_the_backprop_step() -> None:
    lr, gamma = 1e30, 1e-31
    options = {"lr": lr, "gamma": gamma, "variant": "locoprop-s", "local_steps": 60}
    _, opt, moved = stepped(gate=True, **options)
    assert_close(moved, [-lr * gamma * g for g in gradients(network())])
    assert sum(opt.skipped_updates.values()) == 0
    still = stepped(**options)[2]
    assert not any(change.any() for change in still)


Solved = list[tuple[LocalProblem, dict[str, Tensor]]]


@pytest.fixture(scope="module", params=["locoprop-m", "pocoprop-m", "pocoprop-s"])
def tiny_steps(request: pytest.FixtureRequest) -> tuple[LocoProp, Solved]:
    """Five steps in float32 with a gate, so short that rounding hides the change of the loss."""
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for n, d in pairwise((784, 400, 200, 30, 200, 400, 784)):
        modules += [nn.Linear(n, d), nn.Tanh()]
    model, x = nn.Sequential(*modules[:-1]), torch.rand(500, 784)
    own = {"lr": 1e-8, "gamma": 1.0, "momentum": 0.0, "solver": "rmsprop", "local_steps": 10}
    opt = loco(model, variant=request.param, gate=True, **own)
    seen: Solved = []

    def noted(problem: LocalProblem, new: dict[str, Tensor]) -> Tensor:
        start = {name: t.clone() for name, t in problem.start.items()}  # the step writes over it
        seen.append((replace(problem, start=start), {k: t.clone() for k, t in new.items()}))
        return decreases_objective(problem, new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "decreases_objective", noted)
        for _ in range(5):
            opt.zero_grad()
            cross_entropy(model(x), x).backward()
            opt.step()
    return opt, seen


def test_rounding_closes_no_gate(tiny_steps: tuple[LocoProp, Solved]) -> None:
    assert [int(layer.counts["gated"]) for layer in tiny_steps[0]._layers] == [0] * 6


def test_a_rise_as_small_closes_it(tiny_steps: tuple[LocoProp, Solved]) -> None:
    """The same steps in the opposite direction are rejected."""
    for problem, new in tiny_steps[1][-6:]:
        uphill = {name: 2 * problem.start[name] - t for name, t in new.items()}
        assert not decreases_objective(problem, uphill)


def test_the_objective_has_the_digits_of_a_small_step(tiny_steps: tuple[LocoProp, Solved]) -> None:
    """The change of the objective in float32 equals that in float64."""
    for problem, new in tiny_steps[1][-6:]:
        parts = ("x", "g", "v")
        wide = {name: t.double() for name in parts if (t := getattr(problem, name)) is not None}
        groups = ("start", "backprop")
        tensors = {g: {k: t.double() for k, t in getattr(problem, g).items()} for g in groups}
        exact = replace(problem, before=None, **wide, **tensors)
        expected = objective(exact, {name: t.double() for name, t in new.items()})
        assert expected < 0
        torch.testing.assert_close(objective(problem, new).double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("variant", ["locoprop-m", "pocoprop-m"])
def test_a_rise_closes_the_gate_in_single_precision(variant: str) -> None:
    model = network("softplus").float()
    opt = loco(model, variant=variant, gate=True, lr=20.0, gamma=0.01, local_steps=8)
    before = weights(model)
    cross_entropy(model(X.float()), Y.float()).backward()
    expected = [w - 20.0 * 0.01 * p.grad for w, p in zip(before, model.parameters(), strict=True)]  # type: ignore[operator]
    opt.step()
    assert [int(layer.counts["gated"]) for layer in opt._layers] == [1, 1, 1]
    assert_close(weights(model), expected, 1e-5)


# The loss of each step, as a multiple: uphill along the momentum in the third and fifth.
FACTORS = (1.0, 1.0, -0.1, 1.0, -0.1, 1.0)


@pytest.mark.parametrize("recorded", [0, 3, 7])
def test_the_gate_looks_at_no_rows_where_some_are_not_known(recorded: int) -> None:
    """Without all rows the gate knows the slope alone, however many rows happen to be recorded.

    The steps are long: with the curvature of the recorded rows alone some of them would be refused.
    """
    lr, gamma, mu = 5.0, 0.1, 0.9
    model, twin = network()[:1], network()[:1]  # one layer
    x = 3 * batch(8, 6, seed=3)
    options = {"solver": "momentum", "momentum": mu, "variant": "locoprop-s", "lr": lr}
    opt = LocoProp(model, gamma=gamma, gate=True, **options)
    momenta = [torch.zeros_like(p) for p in twin.parameters()]
    closed = []
    for factor in FACTORS:
        losses = [torch.func.vmap(model)(x[recorded:]).square().sum()]
        losses += [model(x[:recorded]).square().sum()] if recorded else []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The forward of")
            (factor * 0.01 * sum(losses)).backward()
            opt.step()
        opt.zero_grad()
        loss = factor * 0.01 * twin(x).square().sum()
        given = [gamma * g for g in torch.autograd.grad(loss, list(twin.parameters()))]
        new = [mu * m + g for m, g in zip(momenta, given, strict=True)]
        closed.append(sum(float((g * m).sum()) for g, m in zip(given, new, strict=True)) < 0)
        momenta = [torch.zeros_like(m) for m in new] if closed[-1] else new
        with torch.no_grad():
            for p, m in zip(twin.parameters(), given if closed[-1] else new, strict=True):
                p.sub_(lr * m)
        assert_close(weights(model), weights(twin))
        assert_close([opt.state[p]["momentum"] for p in model.parameters()], momenta)
    assert True in closed[2:]
    assert False in closed[1:]


@pytest.mark.parametrize("groups", [1, 2])
def test_the_gate_of_a_convolution_whose_inputs_are_lost(groups: int) -> None:
    """Its inputs are overwritten before the step, so the layer takes a BackProp step."""
    model = nn.Sequential(nn.Conv1d(4, 6, 3, groups=groups)).double()
    opt = loco(model, variant="locoprop-m", gate=True)
    x, before = batch(5, 4, 7), weights(model)
    model(x).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    x.zero_()
    with pytest.warns(UserWarning, match="written to"):
        opt.step()
    moved = [b - a for a, b in zip(before, weights(model), strict=True)]
    assert_close(moved, [-0.2 * g for g in gradients])


# Every, layers, control -------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["sgd", "exact"])
def test_every_other_step_is_a_backprop_step(solver: str) -> None:
    model = network()
    opt = loco(model, every=2, solver=solver, variant="locoprop-s")
    full = loco(plain := copy.deepcopy(model), solver=solver, variant="locoprop-s")
    for step in range(4):
        expected = [
            p.detach() - 0.2 * g for p, g in zip(model.parameters(), gradients(model), strict=True)
        ]
        plain.load_state_dict(model.state_dict())
        for each, optimizer in ((model, opt), (plain, full)):
            each.zero_grad()
            cross_entropy(each(X), Y).backward()
            optimizer.step()
        assert_close(weights(model), weights(plain) if step % 2 == 0 else expected)


def test_every_other_step_hands_the_outer_optimizer_its_gradient() -> None:
    options = {"apply": "gradient", "outer": lambda ps: torch.optim.SGD(ps, lr=0.1)}
    model = stepped(every=2, **options)[0]  # one step with local problems
    expected = [-0.1 * g for g in gradients(model)]
    assert_close(stepped(2, every=2, **options)[2], expected)
    solved = stepped(2, **options)[2]
    assert all((s - e).norm() > 0.1 * e.norm() for s, e in zip(solved, expected, strict=True))


RHO, MU, EPS = 0.8, 0.6, 1e-3


def by_hand(solver: str, g: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what TensorFlow's rule subtracts at rate 0.05, and the new state."""
    m = state["momentum"]
    if solver == "momentum":
        m = MU * m + g
        return 0.05 * m, {"momentum": m}
    v = RHO * state["square"] + (1 - RHO) * g**2
    if solver == "rmsprop":
        m = MU * m + 0.05 * g / (v + EPS).sqrt()
        return m, {"square": v, "momentum": m}
    m, t = MU * m + (1 - MU) * g, state["step"] + 1
    rate = 0.05 * (1 - RHO**t).sqrt() / (1 - MU**t)
    return rate * m / (v.sqrt() + EPS), {"step": t, "square": v, "momentum": m}


@pytest.mark.parametrize("solver", ["momentum", "rmsprop", "adam"])
def test_the_steps_between_are_one_iteration_of_the_solver(solver: str) -> None:
    """They use and update the solver's state that the local problems use."""
    model = network()
    options = {"solver": solver, "momentum": MU, "decay": RHO, "eps": EPS, "gamma": 4.0}
    opt = loco(model, every=3, **options)
    for step in range(6):
        model.zero_grad()
        cross_entropy(model(X), Y).backward()
        expected, states = [], []
        if step % 3 == 0:
            full = loco(other := copy.deepcopy(model), **options)
            for p, twin in zip(model.parameters(), other.parameters(), strict=True):
                full.state[twin].update({k: t.clone() for k, t in opt.state[p].items()})
            cross_entropy(other(X), Y).backward()
            full.step()
            expected, states = weights(other), [full.state[p] for p in other.parameters()]
        else:
            for p, g in zip(model.parameters(), gradients(model), strict=True):
                change, state = by_hand(solver, 4.0 * g, opt.state[p])
                expected.append(p.detach() - change)
                states.append(state)
        opt.step()
        assert_close(weights(model), expected)
        for p, state in zip(model.parameters(), states, strict=True):
            assert_close([opt.state[p][key] for key in state], list(state.values()))


def test_only_the_named_layers_have_local_problems() -> None:
    model = network()
    opt = loco(model, layers=["0", "4*"], fallback=lambda ps: torch.optim.SGD(ps, lr=0.2))
    summary = opt.summary()
    assert "not among layers=" in summary
    assert [layer.name for layer in opt._layers] == ["0", "4"]
    expected = model[2].weight.detach() - 0.2 * gradients(model)[2]
    cross_entropy(model(X), Y).backward()
    opt.step()
    assert_close(model[2].weight.detach(), expected)
    assert_close(model[0].weight.detach(), stepped()[0][0].weight.detach())


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(ValueError, match=r"Unknown layer in layers= 'encoder\.\*'.*Known: 0, 2, 4"):
        loco(network(), layers="encoder.*")


def test_a_control_run_solves_everything_and_applies_nothing() -> None:
    _, opt, moved = stepped(steps=3, apply="nothing", solver="rmsprop")
    assert not any(change.any() for change in moved)
    assert all("square" in opt.state[p] for p in opt.param_groups[0]["params"])


def test_a_control_run_of_an_outer_optimizer_is_that_optimizer() -> None:
    model = stepped(
        steps=3, apply="nothing", outer=lambda ps: torch.optim.Adam(ps, lr=0.01), lr=0.3
    )[0]
    plain = network()
    adam = torch.optim.Adam(plain.parameters(), lr=0.01)
    for _ in range(3):
        adam.zero_grad()
        cross_entropy(plain(X), Y).backward()
        adam.step()
    assert_close(weights(model), weights(plain))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cap": 0.0}, "Invalid cap=0.0"),
        ({"cap": float("nan")}, "Invalid cap=nan"),
        ({"cap_by": "norm"}, "Unknown cap_by 'norm'"),
        ({"gate": 1}, "Invalid gate=1"),
        ({"every": 0}, "Invalid every=0"),
        ({"every": 1.5}, "Invalid every=1.5"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loco(network(), **options)
