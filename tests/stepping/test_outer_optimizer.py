"""apply="gradient": the local displacements are gradients for another optimizer."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import nn
from torch.optim import Optimizer

from torch_locoprop import LocoProp
from torch_locoprop.solvers import Exact

Make = Callable[[list[nn.Parameter]], Any]


def muon_and_adam(params: list[nn.Parameter]) -> list[Optimizer]:
    return [
        torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02, weight_decay=0.1),
        torch.optim.Adam([p for p in params if p.ndim != 2], lr=0.01),
    ]


OUTER: dict[str, Make] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
    "muon and adam": muon_and_adam,
}


def loco(model: nn.Module, outer: Make, **options: Any) -> LocoProp:
    given = {"lr": 1e-4, "gamma": 7.0, "solver": "sgd", "local_steps": 1, **options}
    return LocoProp(model, apply="gradient", outer=outer, output_transfer="sigmoid", **given)


def train(model: nn.Module, step: Callable[[], object], steps: int = 5, seed: int = 0) -> None:
    for i in range(steps):
        x, y = batch(8, 6, seed=seed + i), batch(8, 3, seed=seed + 50 + i)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        step()


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_one_iteration_is_the_outer_optimizer_itself(
    outer: str, variant: str, reduction: str
) -> None:
    model = network()
    plain = copy.deepcopy(model)
    made = OUTER[outer](list(plain.parameters()))
    optimizers = [made] if isinstance(made, Optimizer) else made
    train(plain, lambda: [each.step() for each in optimizers])
    train(model, loco(model, OUTER[outer], variant=variant, local_reduction=reduction).step)
    assert all(map(torch.equal, weights(model), weights(plain)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"variant": "proxprop"},
        {"gate": True, "lr": 1e6, "local_steps": 9, "variant": "locoprop-s"},  # always closed
        {"cap": 2.0, "cap_by": "backprop"},  # of which one step has no need
        {"every": 100, "solver": Exact(), "variant": "locoprop-s"},
    ],
    ids=["one", "proxprop", "gate", "cap", "every"],
)
def test_a_backprop_step_is_the_gradient_to_the_last_bit(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    handed: list[torch.Tensor] = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            handed[:] = [p.grad for group in self.param_groups for p in group["params"]]

    model = network().to(dtype)
    opt = loco(model, partial(Spy, lr=0.1), **{"lr": 1e-5, **options})
    if "every" in options:
        opt.param_groups[0]["steps"] = 1  # the first step is one of those between
    for i in range(5):
        x, y = batch(8, 6, seed=i).to(dtype), batch(8, 3, seed=50 + i).to(dtype)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()
        assert handed
        assert all(map(torch.equal, handed, [p.grad for p in model.parameters()]))


def test_a_small_learning_rate_loses_no_digits() -> None:
    """The displacement is no difference of weights: in float32 1e-10 of it would vanish."""
    model = network().float()
    plain = copy.deepcopy(model)
    x, y = batch(8, 6).float(), batch(8, 3, seed=2).float()
    opt = loco(model, OUTER["sgd"], lr=1e-12, variant="locoprop-m")
    cross_entropy(model(x), y).backward()
    opt.step()
    sgd = OUTER["sgd"](list(plain.parameters()))
    cross_entropy(plain(x), y).backward()
    sgd.step()
    for ours, theirs in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_closed_form_is_the_preconditioned_gradient() -> None:
    """G (C + λI)⁻¹ with C the mean of x xᵀ over rows, λ relative to its mean diagonal."""
    model, x, y = network(), batch(20, 6), batch(20, 3, seed=2)
    seen: dict[int, torch.Tensor] = {}

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    seen[id(p)] = p.grad.clone()

    opt = loco(
        model,
        lambda ps: Spy(ps, lr=1.0),
        solver=Exact(damping=0.1),
        gamma=3.0,
        lr=0.5,
        variant="locoprop-s",
        local_reduction="mean",
    )
    cross_entropy(model(x), y).backward()
    first: Any = model[0]
    G = torch.cat([first.weight.grad, first.bias.grad[:, None]], 1)
    opt.step()
    X = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    C = X.T @ X / len(X)
    damped = C + 0.1 * C.diagonal().mean() * torch.eye(7, dtype=C.dtype)
    expected = torch.linalg.solve(damped, G.T).T
    found = torch.cat([seen[id(first.weight)], seen[id(first.bias)][:, None]], 1)
    assert_close(found, expected)


def test_muon_is_given_the_closed_form_on_running_averages() -> None:
    """G (C̄ + λI)⁻¹ with C̄ the running mean of XᵀX / rows, its inverse renewed every other step."""
    decay, every, damping = 0.8, 2, 0.1
    handed: dict[int, torch.Tensor] = {}

    class Spy(torch.optim.Muon):
        def step(self, closure: Any = None) -> None:
            handed.update({id(p): p.grad.clone() for g in self.param_groups for p in g["params"]})
            super().step(closure)

    def outer(params: list[nn.Parameter]) -> list[Optimizer]:
        matrices = [p for p in params if p.ndim == 2]
        rest = [p for p in params if p.ndim != 2]
        return [Spy(matrices, lr=0.02), torch.optim.Adam(rest, lr=0.01)]

    model = network()
    opt = loco(
        model,
        outer,
        solver=Exact(decay=decay, every=every, damping=damping),
        gamma=3.0,
        lr=0.5,
        variant="locoprop-s",
        local_reduction="mean",
    )
    layers: list[Any] = [model[0], model[2], model[4]]
    average: dict[nn.Module, torch.Tensor] = {}
    inverse: dict[nn.Module, torch.Tensor] = {}
    for step in range(5):
        x, y = batch(20, 6, seed=step), batch(20, 3, seed=50 + step)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        rows = [x, model[:2](x).detach(), model[:4](x).detach()]
        expected = []
        for layer, X in zip(layers, rows, strict=True):
            X = torch.cat([X, torch.ones_like(X[:, :1])], 1)
            C = X.T @ X / len(X)
            C = average[layer] = decay * average.get(layer, C) + (1 - decay) * C
            if step % every == 0:
                eye = torch.eye(len(C), dtype=C.dtype)
                inverse[layer] = torch.linalg.inv(C + damping * C.trace() / len(C) * eye)
            G = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
            expected.append((G @ inverse[layer])[:, :-1])
        before = [layer.weight.detach().clone() for layer in layers]
        opt.step()
        assert_close([handed[id(layer.weight)] for layer in layers], expected)
        assert all((b != layer.weight).any() for b, layer in zip(before, layers, strict=True))


def test_an_optimizer_that_is_there_already() -> None:
    """outer= may be an optimizer of all parameters, if all have a local problem."""
    model = network()
    plain = copy.deepcopy(model)
    opt = loco(model, torch.optim.Adam(model.parameters(), lr=0.01))  # type: ignore[arg-type]
    train(model, opt.step)
    adam = torch.optim.Adam(plain.parameters(), lr=0.01)
    train(plain, adam.step)
    assert_close(weights(model), weights(plain))


def with_a_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def adam_of(model: nn.Module) -> torch.optim.Adam:
    norms = list(model[1].parameters())  # type: ignore[index]
    rest = [p for p in model.parameters() if all(p is not own for own in norms)]
    groups = [{"params": [rest[0], *norms]}, {"params": rest[1:], "lr": 0.03}]
    return torch.optim.Adam(groups, lr=0.01)


def test_an_optimizer_of_all_parameters_trains_those_without_a_local_problem_too() -> None:
    model, plain = with_a_norm(), with_a_norm()
    opt = loco(model, adam_of(model))  # type: ignore[arg-type]
    schedules = []
    for each in (opt, adam := adam_of(plain)):
        factor = torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step))
        schedules.append(factor)
    for i in range(5):
        for each, step in ((model, opt.step), (plain, adam.step)):
            train(each, step, steps=1, seed=i)
        for schedule in schedules:
            schedule.step()
    assert_close(weights(model), weights(plain))
    (row,) = [line for line in opt.summary().splitlines() if " LayerNorm " in line]
    assert "Adam" in row
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_an_optimizer_of_all_parameters_is_one_with_a_fallback() -> None:
    """The steps equal those of an outer optimizer for the layers and a fallback for the rest."""
    results = []
    for together in (True, False):
        model = with_a_norm()
        make = partial(torch.optim.AdamW, lr=0.01)
        outer = (
            {"outer": make(model.parameters())} if together else {"outer": make, "fallback": make}
        )
        opt = loco(model, local_steps=5, solver="rmsprop", **outer)
        train(model, opt.step)
        state = io.BytesIO()
        torch.save(opt.state_dict(), state)
        state.seek(0)
        outer = {"outer": make(model.parameters())} if together else outer
        resumed = loco(model, local_steps=5, solver="rmsprop", **outer)
        resumed.load_state_dict(torch.load(state, weights_only=True))
        train(model, resumed.step, seed=9)
        results.append(weights(model))
    assert all(map(torch.equal, *results))


def test_what_an_optimizer_of_all_parameters_does_without_local_problems() -> None:
    """With all layers frozen it still trains the other parameters."""
    model, plain = with_a_norm(), with_a_norm()
    opt, adam = loco(model, adam_of(model)), adam_of(plain)  # type: ignore[arg-type]
    for each in (model, plain):
        each[0].requires_grad_(False)
        each[2].requires_grad_(False)
    train(model, opt.step)
    train(plain, adam.step)
    assert all(map(torch.equal, weights(model), weights(plain)))


def test_an_outer_optimizer_of_too_many_or_too_few() -> None:
    model = with_a_norm()
    for options in ({"fallback": OUTER["sgd"]}, {"maximize": True}):
        with pytest.raises(ValueError, match="Leave fallback= and maximize= out"):
            loco(model, adam_of(model), **options)  # type: ignore[arg-type]
    for params in ([model[0].weight], [*model[0].parameters(), *model[1].parameters()]):
        with pytest.raises(ValueError, match="or an optimizer of all parameters"):
            loco(model, torch.optim.SGD(params, lr=0.1))  # type: ignore[arg-type]


def test_an_optimizer_of_what_is_trained_may_lack_what_is_frozen() -> None:
    model, plain = with_a_norm(), with_a_norm()
    for each in (model, plain):
        each[0].requires_grad_(False)
        each[1].bias.requires_grad_(False)
    opt, adam = (
        torch.optim.Adam([p for p in each.parameters() if p.requires_grad], lr=0.01)
        for each in (model, plain)
    )
    loco_opt = loco(model, opt)  # type: ignore[arg-type]
    train(model, loco_opt.step)
    train(plain, adam.step)
    assert all(map(torch.equal, weights(model), weights(plain)))
    model[0].requires_grad_(True)
    before = weights(model)
    with pytest.raises(RuntimeError, match="were frozen when this optimizer was made"):
        train(model, loco_opt.step)
    assert all(map(torch.equal, weights(model), before))


def test_schedules_of_absolute_rates_move_all_parameters_alike() -> None:
    model = with_a_norm()
    groups = [{"params": model.parameters(), "lr": 0.1}]
    opt = loco(model, adam_of(model), param_groups=groups)  # type: ignore[arg-type]
    torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10, cycle_momentum=False)
    assert opt._outer is not None
    factors = opt._outer.factors(opt._groups_with_rates())
    assert set(factors) == set(model.parameters())
    assert list(factors.values()) == pytest.approx([0.04] * len(factors))


@pytest.mark.parametrize("saved_by_one", [True, False])
def test_a_state_dict_of_another_division_is_refused_before_anything_is_loaded(
    saved_by_one: bool,
) -> None:
    def made(by_one: bool) -> tuple[nn.Module, LocoProp]:
        model, make = with_a_norm(), partial(torch.optim.AdamW, lr=0.01)
        one = {"outer": make(model.parameters())}
        opt = loco(model, **(one if by_one else {"outer": make, "fallback": make}))
        train(model, opt.step)
        return model, opt

    _, saved = made(saved_by_one)
    model, opt = made(not saved_by_one)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match="other groups of parameters"):
        opt.load_state_dict(saved.state_dict())
    assert str(opt.state_dict()) == str(before)
    train(model, opt.step)


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "natural-s"},
        {"regularizer": "l1"},
        {"solver": "momentum", "momentum": 0.5},
        {"cap": 0.5, "cap_by": "backprop"},
    ],
    ids=str,
)
def test_other_steps_of_one_iteration_are_handed_over_as_they_are(options: dict[str, Any]) -> None:
    """The outer optimizer gets the displacement, not the plain gradient."""
    handed: list[torch.Tensor] = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            handed[:] = [p.grad.clone() for group in self.param_groups for p in group["params"]]

    numbers = {"lr": 0.1, "gamma": 7.0, "local_steps": 1, "output_transfer": "sigmoid"}
    given: dict[str, Any] = {"solver": "sgd", **numbers, **options}
    model, written = network(), network()
    train(model, LocoProp(model, apply="gradient", outer=partial(Spy, lr=1.0), **given).step, 1)
    before = weights(written)
    train(written, LocoProp(written, **given).step, 1)
    moved = [(old - new) / 0.7 for old, new in zip(before, weights(written), strict=True)]
    for found, expected, p in zip(handed, moved, model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert p.grad is not None
        if "solver" not in options:
            assert not torch.allclose(found, p.grad, rtol=1e-3)


def test_gradients_are_left_as_they_were() -> None:
    model = network()
    opt = loco(model, OUTER["adamw"], local_steps=4)
    cross_entropy(model(batch(8, 6)), batch(8, 3, seed=2)).backward()
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    opt.step()
    assert_close([p.grad for p in model.parameters()], before)


def test_schedules_move_the_outer_rate_and_not_the_local_problem() -> None:
    """Halving lr halves plain SGD's step exactly, whatever the number of local iterations."""
    moved = []
    for factor in (1.0, 0.5):
        model = network()
        opt = loco(model, lambda ps: torch.optim.SGD(ps, lr=0.1), local_steps=5, lr=0.05)
        torch.optim.lr_scheduler.LambdaLR(opt, lambda step, factor=factor: factor)
        before = weights(model)
        cross_entropy(model(batch(8, 6)), batch(8, 3, seed=2)).backward()
        opt.step()
        moved.append([b - a for a, b in zip(before, weights(model), strict=True)])
    assert_close(moved[1], [0.5 * change for change in moved[0]])


def test_the_outer_optimizer_may_have_a_schedule_of_its_own() -> None:
    model, plain = network(), network()
    outer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = loco(model, outer)  # type: ignore[arg-type]
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for scheduled, each, stepped in ((outer, model, opt), (expected, plain, expected)):
        schedule = torch.optim.lr_scheduler.StepLR(scheduled, step_size=2, gamma=0.1)
        for i in range(5):
            train(each, stepped.step, steps=1, seed=i)
            schedule.step()
    assert_close(weights(model), weights(plain))


@pytest.mark.parametrize("apart", [False, True])
def test_groups_with_schedules_of_their_own(apart: bool) -> None:
    model, plain = network(), network()

    def in_groups(of: nn.Module) -> list[dict[str, Any]]:
        params = list(of.parameters())
        return [{"params": params[:2]}, {"params": params[2:]}]

    def outer(params: list[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(in_groups(model) if apart else params, lr=0.1)

    # Both at a part of the rate, where only rounding makes a difference; then one of them alone.
    first, rest = in_groups(model)
    groups = [first | {"lr": 1e-4}, rest | {"lr": 3e-4}]
    opt = LocoProp(
        model, param_groups=groups, apply="gradient", outer=outer, output_transfer="sigmoid",
        gamma=7.0, solver="sgd", local_steps=1,
    )  # fmt: skip
    expected = torch.optim.SGD(in_groups(plain), lr=0.1)
    for factors in ((0.7, 0.7), (1.0, 0.5)):
        all_groups = zip(opt.param_groups, factors, expected.param_groups, strict=True)
        for group, factor, own in all_groups:
            group["lr"], own["lr"] = group["local_lr"] * factor, 0.1 * factor
        before = weights(model)
        if not apart and factors[0] != factors[1]:
            with pytest.raises(ValueError, match="Give outer= a group for each"):
                train(model, opt.step, steps=1)
            assert_close(weights(model), before, 0.0)
            return
        train(model, opt.step, steps=1)
        train(plain, expected.step, steps=1)
    assert_close(weights(model), weights(plain))


def test_one_outer_group_with_two_rates_is_refused() -> None:
    model = network()
    layers = [list(model[i].parameters()) for i in (0, 2, 4)]

    def outer(params: list[nn.Parameter]) -> Optimizer:
        groups = [{"params": layers[0] + layers[1]}, {"params": layers[2]}]
        return torch.optim.SGD(groups, lr=0.1)

    opt = loco(model, outer, param_groups=[{"params": params} for params in layers])
    opt.param_groups[0]["lr"] *= 0.5
    with pytest.raises(ValueError, match="Give outer= a group for each"):
        train(model, opt.step, steps=1)


def test_entries_of_a_gradient_that_are_not_finite_stay() -> None:
    """The local solution is not finite, and the outer optimizer gets the gradient as far as it is."""
    model = network()
    opt = loco(model, lambda ps: torch.optim.SGD(ps, lr=0.1))
    cross_entropy(model(batch(8, 6)), batch(8, 3, seed=1)).backward()
    first = model[0].weight
    for entry, bad in enumerate((torch.inf, -torch.inf, torch.nan)):
        first.grad[0, entry] = bad
    expected = first.detach().clone()
    expected[:, 3:] -= 0.1 * first.grad[:, 3:]
    expected[1:, :3] -= 0.1 * first.grad[1:, :3]
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    assert_close([first.detach()], [expected])


def test_an_outer_group_without_parameters() -> None:
    model, plain = network(), network()
    opt = loco(model, lambda ps: torch.optim.SGD([{"params": ps}, {"params": []}], lr=0.1))
    train(model, opt.step)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1).step)
    assert_close(weights(model), weights(plain))


def test_a_layer_that_is_not_called_is_left_to_the_outer_optimizer() -> None:
    """Its gradients are zero, but weight decay and momentum still change its weight."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList([network(seed=1), network(seed=2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.which = 1 - getattr(self, "which", 0)
            return self.branches[self.which](x)

    model, plain = Either(), Either()
    outer = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    opt, expected = loco(model, outer), outer(plain.parameters())
    for i in range(4):
        for each, optimizer in ((model, opt), (plain, expected)):
            optimizer.zero_grad(set_to_none=i == 0)
            cross_entropy(each(batch(8, 6, seed=i)), batch(8, 3, seed=50 + i)).backward()
            optimizer.step()
    assert_close(weights(model), weights(plain))


def test_a_rate_of_zero_moves_nothing() -> None:
    model = network()
    opt = loco(model, OUTER["sgd"], local_steps=3)
    before = weights(model)
    opt.param_groups[0]["lr"] = 0.0
    train(model, opt.step, steps=2)
    assert_close(weights(model), before)


@pytest.mark.parametrize("outer", OUTER)
def test_resume_continues_bit_for_bit(outer: str) -> None:
    def made() -> tuple[nn.Module, LocoProp]:
        model = network()
        return model, loco(
            model, OUTER[outer], variant="locoprop-s", solver=Exact(decay=0.9, every=2, damping=0.1)
        )

    straight, opt = made()
    train(straight, opt.step, steps=6)
    first, opt = made()
    train(first, opt.step, steps=3)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second, opt = made()
    second.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    train(second, opt.step, steps=3, seed=3)
    for ours, theirs in zip(weights(second), weights(straight), strict=True):
        assert torch.equal(ours, theirs)


def test_a_state_of_another_kind_is_refused() -> None:
    plain = LocoProp(network(), output_transfer="sigmoid")
    other = loco(network(), OUTER["sgd"])
    with pytest.raises(ValueError, match="differ in apply="):
        other.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="differ in apply="):
        plain.load_state_dict(other.state_dict())


def test_maximize_climbs() -> None:
    model, x, y = network(), batch(8, 6), batch(8, 3, seed=2)
    opt = loco(model, lambda ps: torch.optim.SGD(ps, lr=0.05), local_steps=3, maximize=True)
    before = cross_entropy(model(x), y)
    before.backward()
    opt.step()
    assert cross_entropy(model(x), y) > before


@pytest.mark.filterwarnings("ignore:The local solution")
@pytest.mark.parametrize("maximize", [False, True])
def test_a_solution_that_is_not_finite_leaves_the_gradient_to_the_outer_optimizer(
    maximize: bool,
) -> None:
    model = network()
    plain = copy.deepcopy(model)
    diverges = {"local_steps": 60, "lr": 1e30, "variant": "locoprop-s", "maximize": maximize}
    opt = loco(model, OUTER["sgd"], **diverges)
    x, y = batch(8, 6), batch(8, 3, seed=2)
    cross_entropy(model(x), y).backward()
    opt.step()
    assert all(opt.skipped_updates.values())
    sgd = OUTER["sgd"](list(plain.parameters()))
    ((-1 if maximize else 1) * cross_entropy(plain(x), y)).backward()
    sgd.step()
    assert_close(weights(model), weights(plain))


def test_frozen_parameters_of_others_are_no_reason_to_refuse_a_fallback() -> None:
    """The outer optimizer has the layers; the norm's gain is trained by the fallback."""
    model = with_a_norm()
    model[1].bias.requires_grad_(False)
    layers = [*model[0].parameters(), *model[2].parameters()]
    opt = loco(model, torch.optim.SGD(layers, lr=0.1), fallback=OUTER["adamw"])  # type: ignore[arg-type]
    before = weights(model)
    train(model, opt.step, steps=1)
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    assert moved == [p.requires_grad for p in model.parameters()]


def test_an_optimizer_that_has_a_state_keeps_it() -> None:
    model, plain = network(), network()
    ours, theirs = (OUTER["sgd"](list(each.parameters())) for each in (model, plain))
    train(model, ours.step)
    train(plain, theirs.step)
    opt = loco(model, ours)
    train(model, opt.step)
    train(plain, theirs.step)
    assert_close(weights(model), weights(plain))


def take_empty_step(model: nn.Module, opt: LocoProp) -> None:
    """Take the step of tools that need a state: with gradients and rates of zero."""
    rates = [group["lr"] for group in opt.param_groups]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in opt.param_groups:
        group["lr"] = 0.0
    opt.step()
    for group, lr in zip(opt.param_groups, rates, strict=True):
        group["lr"] = lr


@pytest.mark.parametrize("outer", OUTER)
def test_states_without_content_are_dropped_before_the_first_step(outer: str) -> None:
    model, plain = network(), network()
    opt, other = (loco(each, OUTER[outer], local_steps=3) for each in (model, plain))
    take_empty_step(model, opt)
    train(model, opt.step)
    train(plain, other.step)
    assert all(map(torch.equal, weights(model), weights(plain)))


def test_states_that_one_of_several_optimizers_has_are_no_empty_ones() -> None:
    """The other one, SGD, has none."""

    def outer(params: list[nn.Parameter]) -> list[Optimizer]:
        matrices = [p for p in params if p.ndim == 2]
        biases = [p for p in params if p.ndim != 2]
        return [torch.optim.Adam(matrices, lr=0.01), torch.optim.SGD(biases, lr=0.01)]

    model, plain = network(), network()
    opt, other = loco(model, outer), loco(plain, outer)
    for each, own in ((model, opt), (plain, other)):
        train(each, own.step)
    take_empty_step(model, opt)
    train(model, opt.step)
    train(plain, other.step)
    assert all(map(torch.equal, weights(model), weights(plain)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"apply": "gradient"}, "Pass both"),
        ({"outer": OUTER["sgd"]}, "Pass both"),
        ({"apply": "something"}, "Unknown apply 'something'"),
        ({"apply": "gradient", "outer": OUTER["sgd"], "weight_decay": 0.1}, "a setting of that"),
        ({"apply": "gradient", "outer": OUTER["sgd"], "lr": 0.0}, "must be > 0"),
        (
            {"apply": "gradient", "outer": lambda ps: torch.optim.SGD(ps[:1], lr=1.0)},
            "exactly the parameters of the layers",
        ),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocoProp(network(), output_transfer="sigmoid", **options)


def test_an_outer_that_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match=r"must be, or return, a torch\.optim\.Optimizer"):
        loco(network(), lambda ps: [3])


def test_groups_cannot_be_added_later() -> None:
    model = network()
    first: Any = model[0]
    rest = [p for p in model.parameters() if p not in set(first.parameters())]
    opt = loco(model, OUTER["sgd"], param_groups=[{"params": rest}])
    with pytest.raises(ValueError, match="make a new LocoProp"):
        opt.add_param_group({"params": list(first.parameters())})


def test_layers_without_a_local_problem_still_fall_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
    opt = loco(model, OUTER["adamw"], fallback=lambda ps: torch.optim.SGD(ps, lr=0.1))
    before = weights(model)
    train(model, opt.step, steps=1)
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
