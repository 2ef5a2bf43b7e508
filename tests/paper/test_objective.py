"""The value of a local problem's objective, against sums over rows written out in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_locoprop.paper import objective as objectives
from torch_locoprop.paper.gram import Gram
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import Matching, Squared
from torch_locoprop.paper.objective import objective, objective_at_start
from torch_locoprop.paper.regularizers import L2
from torch_locoprop.paper.targets import GradientDescent, MirrorDescent
from torch_locoprop.paper.transfers import Linear, Tanh

ROWS, D, N, GAMMA, ETA, WEIGHT = 11, 3, 4, 0.7, 0.3, 0.25


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def problem(matching: bool, leading: tuple[int, ...] = (), **changes: Any) -> LocalProblem:
    x, g = draw(*leading, ROWS, N), draw(*leading, ROWS, D, seed=1)
    own = LocalProblem(
        linear_map=Dense(),
        x=x,
        start={"weight": draw(*leading, D, N, seed=2), "bias": draw(*leading, D, seed=3)},
        fixed={},
        backprop={"weight": WEIGHT * g.mT @ x, "bias": WEIGHT * g.sum(-2)},
        target=MirrorDescent() if matching else GradientDescent(),
        loss=Matching() if matching else Squared(),
        transfer=Tanh(),
        gamma=GAMMA,
        eta=ETA,
        regularizer=L2(),
        row_weight=WEIGHT,
        g=g,
    )
    return replace(own, **changes)


def written_out(own: LocalProblem, at: dict[str, Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of all rows, with their weights, and the regularizer."""

    def rows(tensors: dict[str, Tensor]) -> Tensor:
        return own.x @ tensors["weight"].mT + tensors["bias"].unsqueeze(-2)

    a0, a = rows(own.start), rows(at)
    if isinstance(own.loss, Matching):  # ∫ (tanh s − y) ds from the pre-activation of y up to a
        y = torch.tanh(a0) - GAMMA * own.g
        losses = (a.cosh().log() - y * a).sum(-1)
    else:
        losses = 0.5 * (a - (a0 - GAMMA * own.g)).square().sum(-1)
    penalty = sum((at[k] - own.start[k]).square().sum() for k in at) / (2 * ETA)
    return (weights * losses).sum(), torch.as_tensor(penalty)


def moved(own: LocalProblem, by: float) -> dict[str, Tensor]:
    return {k: t + by * draw(*t.shape, seed=7) for k, t in own.start.items()}


def expected_change(own: LocalProblem, at: dict[str, Tensor], weights: Tensor) -> Tensor:
    loss, penalty = written_out(own, at, weights)
    return loss + penalty - written_out(own, own.start, weights)[0]


@pytest.mark.parametrize("at_once", [1, 2 * D, 5 * D, 2**18])
@pytest.mark.parametrize("leading", [(), (2,)], ids=str)
@pytest.mark.parametrize("matching", [False, True])
def test_change_of_the_objective(
    matching: bool, leading: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a few rows at a time, or one, are converted to float64."""
    monkeypatch.setattr(objectives, "_AT_ONCE", at_once)
    own = problem(matching, leading)
    at = moved(own, 0.4)
    torch.testing.assert_close(objective(own, at), expected_change(own, at, torch.tensor(WEIGHT)))


def test_rows_that_are_converted_to_float64_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as have the given number of entries in all members together, and at least one."""
    seen: list[int] = []
    kept = objectives._beyond_linear

    def watched(own: LocalProblem, a0: Tensor, *others: Tensor) -> Tensor:
        seen.append(a0.shape[-2])
        return kept(own, a0, *others)

    monkeypatch.setattr(objectives, "_beyond_linear", watched)
    own = problem(True, (2,))
    for entries, rows in [(2 * D * 4, [4, 4, 3]), (2 * D * 2, [2] * 5 + [1]), (1, [1] * ROWS)]:
        seen.clear()
        monkeypatch.setattr(objectives, "_AT_ONCE", entries)
        objective(own, moved(own, 0.4))
        assert seen == rows


@pytest.mark.parametrize("matching", [False, True])
def test_no_rows(matching: bool) -> None:
    own = problem(matching)
    own = replace(own, x=own.x[:0], g=own.g[:0], backprop={k: 0 * t for k, t in own.start.items()})
    at = moved(own, 0.4)
    torch.testing.assert_close(objective(own, at), written_out(own, at, torch.tensor(0.0))[1])


@pytest.mark.parametrize("leading", [(), (2,)], ids=str)
@pytest.mark.parametrize("matching", [False, True])
def test_rows_of_different_weights(matching: bool, leading: tuple[int, ...]) -> None:
    weights = draw(ROWS, 1, seed=5).abs() + 0.1
    own = problem(matching, leading, row_weight=weights)
    weighted = weights * own.g
    own = replace(own, backprop={"weight": weighted.mT @ own.x, "bias": weighted.sum(-2)})
    at, flat = moved(own, 0.4), weights.squeeze(-1)
    torch.testing.assert_close(objective(own, at), expected_change(own, at, flat))
    loss = written_out(own, own.start, flat)[0]
    if not matching:  # the matching loss leaves out a constant
        torch.testing.assert_close(objective_at_start(own), loss)
        recorded = replace(own, g=None, recorded=lambda: own.g)
        torch.testing.assert_close(objective_at_start(recorded), loss)


@pytest.mark.parametrize("leading", [(), (2,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_through_the_gram_matrix(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    """The regularizer is added, and products in float64 serve weights in float32."""
    own = problem(False, leading)
    at = moved(own, 0.4)
    expected = expected_change(own, at, torch.tensor(WEIGHT))
    rounded = {
        name: {k: t.to(dtype) for k, t in getattr(own, name).items()}
        for name in ("start", "backprop")
    }
    condensed = replace(own, x=Gram.of(own.x), **rounded)
    found = objective(condensed, {k: t.to(dtype) for k, t in at.items()})
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("leading", [(), (2,)], ids=str)
def test_objective_at_the_start(leading: tuple[int, ...]) -> None:
    own = problem(False, leading)
    expected = 0.5 * WEIGHT * (GAMMA * own.g).square().sum()
    torch.testing.assert_close(objective_at_start(own), expected)
    # The same from rows that are recorded for diagnostics only, with the rows or their products.
    unknown = replace(own, g=None, recorded=lambda: own.g)
    torch.testing.assert_close(objective_at_start(unknown), expected)
    condensed = replace(unknown, x=Gram.of(own.x))
    torch.testing.assert_close(objective_at_start(condensed), expected)


def test_a_squared_loss_of_matching_targets_at_the_start() -> None:
    """With a linear transfer, the matching loss is ``‖a − y‖²/2`` and its residual ``γ g``."""
    own = problem(True, transfer=Linear())
    unknown = replace(own, g=None, recorded=lambda: own.g)
    expected = 0.5 * WEIGHT * (GAMMA * own.g).square().sum()
    torch.testing.assert_close(objective_at_start(unknown), expected)


def test_matching_loss_at_the_start_from_recorded_rows() -> None:
    own = problem(True)
    unknown = replace(own, g=None, recorded=lambda: own.g)
    torch.testing.assert_close(objective_at_start(unknown), objective_at_start(own))
    assert objective_at_start(own).isfinite()


@pytest.mark.parametrize("recorded", [None, lambda: None])
@pytest.mark.parametrize("matching", [False, True])
def test_nan_where_the_rows_were_not_recorded(matching: bool, recorded: Any) -> None:
    assert objective_at_start(problem(matching, g=None, recorded=recorded)).isnan()


def test_nan_where_a_matching_loss_has_products_of_its_rows_only() -> None:
    own = problem(True)
    assert objective_at_start(replace(own, x=Gram.of(own.x))).isnan()
