"""opt.diagnostics(): its numbers against the step itself, its forms, and no cost when off."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from rich.console import Console
from torch import Tensor, nn

from torch_locoprop import LocoProp, diagnostics
from torch_locoprop.diagnostics import HEADINGS
from torch_locoprop.problem import LocalProblem
from torch_locoprop.solvers.first_order import Sgd

X, Y = batch(8, 6), batch(8, 3, seed=2)
LR, GAMMA = 0.05, 4.0


def stepped(**options: Any) -> tuple[nn.Sequential, LocoProp, list[Tensor], list[Tensor]]:
    """The model and optimizer after a step, where the weights were, and their gradients."""
    model = network()
    given = {"solver": "sgd", "local_steps": 6, "variant": "locoprop-s", **options}
    opt = LocoProp(model, lr=LR, gamma=GAMMA, output_transfer="sigmoid", diagnose=True, **given)
    before = weights(model)
    cross_entropy(model(X), Y).backward()
    opt.step()
    return model, opt, before, [p.grad for p in model.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("apply", ["replace", "gradient"])
def test_displacement_cosine_and_length(apply: str) -> None:
    outer = {"outer": lambda ps: torch.optim.SGD(ps, lr=LR * GAMMA)} if apply == "gradient" else {}
    model, opt, before, gradients = stepped(apply=apply, **outer)
    rows = opt.diagnostics()
    assert [row.layer for row in rows] == ["0", "2", "4"]
    for i, row in enumerate(rows):
        own = slice(2 * i, 2 * i + 2)  # weight and bias
        moved = [b - a for a, b in zip(before[own], weights(model)[own], strict=True)]
        delta, start, plain = (
            torch.cat([t.flatten() for t in ts])
            for ts in (moved, before[own], [-LR * GAMMA * g for g in gradients[own]])
        )
        assert row.displacement == pytest.approx(float(delta.norm() / start.norm()))
        assert row.length == pytest.approx(float(delta.norm() / plain.norm()))
        cosine = torch.nn.functional.cosine_similarity(delta, plain, dim=0)
        assert row.cosine == pytest.approx(float(cosine))
        assert row.milliseconds > 0


def test_milliseconds_are_those_of_the_solution_without_the_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def slow(which: type, name: str, seconds: float) -> None:
        own = getattr(which, name)

        def later(*given: Any) -> Any:
            nonlocal now
            now += seconds
            return own(*given)

        monkeypatch.setattr(which, name, later)

    monkeypatch.setattr(diagnostics.time, "perf_counter", lambda: now)
    slow(Sgd, "solve", 0.25)
    slow(LocalProblem, "objective", 8.0)
    _, opt, *_ = stepped()
    assert [row.milliseconds for row in opt.diagnostics()] == [250.0] * 3


def test_a_layer_that_is_frozen_since_is_not_listed() -> None:
    model, opt, *_ = stepped()
    model[0].requires_grad_(False)
    opt.zero_grad()
    cross_entropy(model(X), Y).backward()
    opt.step()
    assert [row.layer for row in opt.diagnostics()] == ["2", "4"]


def test_local_losses_are_those_of_the_layer_by_hand() -> None:
    """½‖a − a*‖² after less before, with the layer's own forward and ∂L/∂a by autograd."""
    model, opt, before, _ = stepped()
    fresh = network()
    a0 = fresh[0](X)
    g = torch.autograd.grad(cross_entropy(fresh[1:](a0), Y), a0)[0]
    target = (a0 - GAMMA * g).detach()

    def loss(weight: Tensor, bias: Tensor) -> float:
        return float(0.5 * (X @ weight.T + bias - target).square().sum())

    start, after = loss(*before[:2]), loss(*weights(model)[:2])
    row = opt.diagnostics()[0]
    assert row.local_loss == pytest.approx(after - start)
    assert row.local_loss < row.backprop_loss < 0  # further iterations improve on BackProp
    gradient = torch.autograd.grad(cross_entropy(fresh(X), Y), list(fresh[0].parameters()))
    backprop = [p - LR * GAMMA * d for p, d in zip(before[:2], gradient, strict=True)]
    assert row.backprop_loss == pytest.approx(loss(*backprop) - start)


def test_one_iteration_is_the_backprop_step() -> None:
    for row in stepped(local_steps=1)[1].diagnostics():
        assert row.cosine == pytest.approx(1)
        assert row.length == pytest.approx(1)
        assert row.local_loss == pytest.approx(row.backprop_loss)


def test_guards_are_counted() -> None:
    rows = stepped(cap=1e-3, gate=True)[1].diagnostics()
    assert all(row.capped == 1 and row.gated == 0 and row.skipped == 0 for row in rows)


def test_measuring_changes_nothing() -> None:
    measured = stepped()[0]
    model = network()
    opt = LocoProp(
        model, lr=LR, gamma=GAMMA, output_transfer="sigmoid", solver="sgd", local_steps=6,
        variant="locoprop-s",
    )  # fmt: skip
    cross_entropy(model(X), Y).backward()
    opt.step()
    assert_close(weights(measured), weights(model))
    with pytest.raises(RuntimeError, match="diagnose=True"):
        opt.diagnostics()


def test_as_text_as_a_rich_table_and_for_tensorboard() -> None:
    rows = stepped()[1].diagnostics()
    lines = str(rows).splitlines()
    assert len(lines) == 4
    assert all(heading in lines[0] for heading in HEADINGS.values())
    assert len({len(line) for line in lines}) == 1
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(rows)
    assert "of BackProp" in console.export_text()

    written: dict[str, float] = {}

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert step == 7
            written[name] = value

    rows.write(Writer(), 7)
    assert written["cosine/2"] == rows[1].cosine
    assert len(written) == 3 * (len(HEADINGS) - 1)


def test_before_the_first_step_there_are_no_rows() -> None:
    assert len(LocoProp(network(), output_transfer="sigmoid", diagnose=True).diagnostics()) == 0
