"""LocoProp-S keeps XᵀX instead of a layer's inputs where that is smaller: same steps, less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import nn

from torch_locoprop import LocoProp
from torch_locoprop.gram import Gram
from torch_locoprop.solvers import Exact

X, Y = batch(40, 6), batch(40, 3, seed=2)


def loco(model: nn.Module, **options: Any) -> LocoProp:
    given = {"lr": 1e-3, "gamma": 10.0, "variant": "locoprop-s", "local_steps": 5, **options}
    return LocoProp(model, output_transfer="sigmoid", **given)


def steps(opt: LocoProp, model: nn.Module, count: int = 3, parts: int = 1) -> list[torch.Tensor]:
    for _ in range(count):
        opt.zero_grad()
        for x, y in zip(X.chunk(parts), Y.chunk(parts), strict=True):
            (cross_entropy(model(x), y) / parts).backward()
        opt.step()
    return weights(model)


def condensed(opt: LocoProp) -> list[bool]:
    return [all(call.gram is not None for call in layer.calls) for layer in opt._layers]


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that trains with all inputs kept, as the plain version does."""

    def train(**how: Any) -> list[torch.Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr("torch_locoprop.optimizer.gradients_by_gram", lambda *_: 0)
            model = network()
            parts = how.pop("parts", 1)
            return steps(loco(model, **how), model, parts=parts)

    return train


@pytest.mark.parametrize("solver", ["sgd", "rmsprop", "adam"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_steps_are_the_same(by_rows: Any, solver: str, reduction: str, parts: int) -> None:
    own = {"solver": solver, "local_reduction": reduction}
    model = network()
    assert_close(steps(loco(model, **own), model, parts=parts), by_rows(parts=parts, **own))


@pytest.mark.parametrize("guard", [{"gate": True}, {"cap": 0.01}, {"diagnose": True}])
def test_guards_and_diagnostics_need_no_rows(by_rows: Any, guard: dict[str, Any]) -> None:
    model = network()
    opt = loco(model, solver="sgd", **guard)
    assert_close(steps(opt, model), by_rows(solver="sgd", **guard))


def test_the_local_loss_is_the_same_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for patched in (False, True):
        with monkeypatch.context() as patch:
            if patched:
                patch.setattr("torch_locoprop.optimizer.gradients_by_gram", lambda *_: 0)
            model = network()
            opt = loco(model, solver="sgd", diagnose=True)
            steps(opt, model, count=1)
            found.append([row.local_loss for row in opt.diagnostics()])
    assert found[0] == pytest.approx(found[1], rel=1e-10)


def test_only_the_summary_is_held_between_backward_and_step() -> None:
    model = network()
    opt = loco(model)
    cross_entropy(model(X), Y).backward()
    assert condensed(opt) == [True, True, True]
    for layer in opt._layers:
        (call,) = layer.calls
        n = layer.tensors["weight"].shape[1]
        assert call.x.numel() == 0
        assert call.gram is not None
        assert call.gram.square.shape == (n, n)
        assert isinstance(layer.inputs(), Gram)


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "locoprop-m"},
        {"variant": "pocoprop-s"},
        {"variant": "natural-s"},
        {"solver": Exact()},
        {"max_rows": 30},
        {"local_steps": 1},
    ],
)
def test_inputs_are_kept_where_they_are_needed(options: dict[str, Any]) -> None:
    model = network()
    opt = loco(model, **options)
    cross_entropy(model(X), Y).backward()
    assert not any(condensed(opt))
    opt.step()


def test_few_rows_are_smaller_than_their_products() -> None:
    model = network()
    opt = loco(model)
    cross_entropy(model(X[:5]), Y[:5]).backward()
    assert not any(condensed(opt))
    opt.step()


def test_a_mixture_is_one_problem() -> None:
    """One call with many rows and one with few."""
    results = []
    for patched in (False, True):
        model = network()
        opt = loco(model, solver="sgd")
        if patched:
            for layer in opt._layers:
                layer.condense_for = 0
        for rows in (slice(0, 35), slice(35, 40)):
            cross_entropy(model(X[rows]), Y[rows]).backward()
        assert condensed(opt) == [False, False, False]
        assert [call.gram is not None for call in opt._layers[0].calls] == [not patched, False]
        opt.step()
        results.append(weights(model))
    assert_close(results[0], results[1])


def test_what_is_found_out_in_a_step_does_not_change_how_the_next_rounds() -> None:
    """A linear layer of LocoProp-M is quadratic too, but a resumed run would not know that yet."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    opt = loco(model, variant="locoprop-m")
    for _ in range(2):
        opt.zero_grad()
        cross_entropy(model(X), Y).backward()
        assert not any(condensed(opt))
        opt.step()


def test_settings_that_change_after_the_backward_pass() -> None:
    model = network()
    opt = loco(model)
    cross_entropy(model(X), Y).backward()
    before = weights(model)
    opt.param_groups[0]["variant"] = "locoprop-m"
    with pytest.raises(RuntimeError, match="changed between backward"):
        opt.step()
    assert_close(weights(model), before)
