"""Cap, gate, every, layers and the control run: each does what it says, and nothing when off."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.guards import shorten

X, Y = batch(8, 6), batch(8, 3, seed=2)


def loco(model: nn.Module, **options: Any) -> LocoProp:
    given = {"lr": 0.05, "gamma": 4.0, "solver": "sgd", "local_steps": 6, **options}
    return LocoProp(model, output_transfer="sigmoid", **given)


def stepped(steps: int = 1, **options: Any) -> tuple[nn.Sequential, LocoProp, list[Tensor]]:
    """The model after some steps, its optimizer, and what each tensor moved in the last."""
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


@pytest.mark.parametrize("apply", ["replace", "gradient"])
@pytest.mark.parametrize("cap", [1e-3, 0.02])
def test_the_cap_is_relative_to_the_weight(cap: float, apply: str) -> None:
    outer = {"outer": lambda ps: torch.optim.SGD(ps, lr=0.05 * 4.0)} if apply == "gradient" else {}
    free = stepped(apply=apply, **outer)[2]
    _, opt, moved = stepped(cap=cap, apply=apply, **outer)
    start = weights(network())
    shortened = 0
    for change, unbounded, weight in zip(moved, free, start, strict=True):
        allowed = cap * weight.norm()
        if unbounded.norm() > allowed:
            shortened += 1
            torch.testing.assert_close(change.norm(), allowed)
            torch.testing.assert_close(change / change.norm(), unbounded / unbounded.norm())
        else:
            assert_close(change, unbounded)
    assert shortened > 0
    assert sum(int(layer.counts["capped"]) for layer in opt._layers) > 0


def test_the_cap_is_relative_to_the_backprop_step() -> None:
    lengths = [0.05 * 4.0 * g.norm() for g in gradients(network())]
    moved = stepped(cap=1.5, cap_by="backprop")[2]
    free = stepped()[2]
    for change, unbounded, step in zip(moved, free, lengths, strict=True):
        torch.testing.assert_close(change.norm(), torch.minimum(unbounded.norm(), 1.5 * step))
    assert any(u.norm() > 1.5 * step for u, step in zip(free, lengths, strict=True))


def test_a_wide_cap_changes_nothing() -> None:
    assert_close(stepped(cap=1e9)[2], stepped()[2])


def test_a_displacement_of_zero_stays_zero() -> None:
    zero = torch.zeros(3)
    assert shorten(zero, zero, 1.0) == 1
    assert shorten(torch.ones(3), zero, 1.0) == 0


# Gate -------------------------------------------------------------------------------------------


def test_a_layer_whose_local_loss_rises_takes_the_backprop_step() -> None:
    """A rate far beyond 2/λ of the quadratic: iterations grow, and the local loss with them."""
    lr, gamma = 5.0, 0.01
    _, opt, moved = stepped(gate=True, lr=lr, gamma=gamma, variant="locoprop-s", local_steps=8)
    expected = [-lr * gamma * g for g in gradients(network())]
    assert [int(layer.counts["gated"]) for layer in opt._layers] == [1, 1, 1]
    assert_close(moved, expected)
    free = stepped(lr=lr, gamma=gamma, variant="locoprop-s", local_steps=8)[2]
    assert all(f.norm() > 100 * m.norm() for f, m in zip(free, moved, strict=True))


def test_an_open_gate_changes_nothing() -> None:
    _, opt, moved = stepped(gate=True)
    assert_close(moved, stepped()[2])
    assert [int(layer.counts["gated"]) for layer in opt._layers] == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:The local solution")
def test_a_solution_that_is_not_finite_is_replaced_by_the_backprop_step() -> None:
    lr, gamma = 1e30, 1e-31
    options = {"lr": lr, "gamma": gamma, "variant": "locoprop-s", "local_steps": 60}
    _, opt, moved = stepped(gate=True, **options)
    assert_close(moved, [-lr * gamma * g for g in gradients(network())])
    assert sum(opt.skipped_updates.values()) == 0
    still = stepped(**options)[2]
    assert not any(change.any() for change in still)


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
