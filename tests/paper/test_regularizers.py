"""Regularizers: directions against autograd of the penalty, and the proximal map of L1."""

from __future__ import annotations

import pytest
import torch
from cases import batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad

from torch_locoprop.paper.regularizers import (
    L1,
    L2,
    REGULARIZERS,
    FisherMahalanobis,
    Metric,
    Regularizer,
    pulled_back_to_start,
)

GRADIENT = {"weight": batch(3, 4) - 0.5, "bias": batch(3, seed=2) - 0.5}
MOVED = {"weight": batch(3, 4, seed=3) - 0.5, "bias": batch(3, seed=4) - 0.5}


def penalty_gradient(regularizer: Regularizer, eta: float, metric: Metric | None) -> list[Tensor]:
    moved = {key: value.clone().requires_grad_() for key, value in MOVED.items()}
    return list(grad(regularizer.value(moved, eta, metric), list(moved.values())))


def test_l2_adds_the_gradient_of_its_value() -> None:
    found = L2().direction(GRADIENT, MOVED, 0.3, None)
    for key, slope in zip(MOVED, penalty_gradient(L2(), 0.3, None), strict=True):
        torch.testing.assert_close(found[key], GRADIENT[key] + slope, rtol=1e-13, atol=1e-14)
        assert slope.abs().max() > 0.1


def test_l2_with_one_rate_for_each_problem() -> None:
    """At η = 0 the weights have not moved, and the penalty is left out."""
    eta = torch.tensor([0.5, 0.0]).double()
    gradient = {"weight": batch(2, 3, 4)}
    moved = {"weight": torch.stack([MOVED["weight"], torch.zeros(3, 4).double()])}
    found = L2().direction(gradient, moved, eta, None)["weight"]
    expected = torch.stack([gradient["weight"][0] + 2 * MOVED["weight"], gradient["weight"][1]])
    torch.testing.assert_close(found, expected)
    single = {"weight": gradient["weight"][1]}
    assert torch.equal(
        L2().direction(single, {"weight": moved["weight"][1]}, 0.0, None)["weight"], found[1]
    )


def test_fisher_follows_its_objective_in_its_metric() -> None:
    """F times the direction is the gradient of the local loss plus that of the penalty."""
    regularizer = FisherMahalanobis(damping=0.1)
    roots = batch(3, 3, seed=5), batch(5, 5, seed=6)
    factors = [root @ root.mT for root in roots]
    metric = Metric(*factors)
    found = regularizer.direction(GRADIENT, MOVED, 0.3, metric)
    weight, bias = penalty_gradient(regularizer, 0.3, metric)
    left, right = (f + 0.1 * f.diagonal().mean() * torch.eye(len(f)).double() for f in factors)
    joint = torch.cat([found["weight"], found["bias"][:, None]], 1)
    expected = torch.cat([GRADIENT["weight"] + weight, (GRADIENT["bias"] + bias)[:, None]], 1)
    torch.testing.assert_close(left @ joint @ right, expected, rtol=1e-9, atol=1e-10)
    dense = torch.kron(left, right)
    moved = torch.cat([MOVED["weight"], MOVED["bias"][:, None]], 1).reshape(-1)
    torch.testing.assert_close(
        regularizer.value(MOVED, 0.3, metric), moved @ dense @ moved / (2 * 0.3)
    )


@settings(deadline=None, max_examples=50)
@given(at=st.floats(-3, 3), strength=st.floats(0, 2), rate=st.floats(0.01, 2))
def test_l1_prox_is_the_minimizer(at: float, strength: float, rate: float) -> None:
    """Lower than every point of a fine grid: ``½(z − u)² + rate · strength · |z|``."""
    u = torch.tensor(at, dtype=torch.float64)

    def objective(z: Tensor) -> Tensor:
        return 0.5 * (z - u).square() + rate * strength * z.abs()

    found = L1(strength).prox(u, rate)
    grid = torch.linspace(-4, 4, 801, dtype=torch.float64)
    assert (objective(found) <= objective(grid) + 1e-12).all()
    assert (objective(found) <= objective(found + torch.tensor([-1e-3, 1e-3])) + 1e-12).all()


def test_l1_value() -> None:
    expected = 0.4 * sum(float(value.abs().sum()) for value in MOVED.values())
    assert float(L1(0.4).value(MOVED, 0.3, None)) == pytest.approx(expected, rel=1e-14)


def test_which_regularizers_change_what() -> None:
    changes = {name: (r.has_direction, r.has_prox) for name, r in REGULARIZERS.items()}
    assert changes == {
        "none": (False, False),
        "l2": (True, False),
        "l1": (False, True),
        "fisher": (True, False),
    }
    none = Regularizer()
    assert none.direction(GRADIENT, MOVED, 0.3, None) is GRADIENT
    assert none.prox(MOVED["weight"], 0.3) is MOVED["weight"]
    assert float(none.value(MOVED, 0.3, None)) == 0


def test_classes_of_ones_own_take_no_unknown_options() -> None:
    with pytest.raises(TypeError):
        type("Own", (Regularizer,), {}, strength=1.0)


def test_a_rate_of_zero_pulls_nothing_back() -> None:
    gradient, moved = ({"weight": batch(2, 3, 4, seed=seed)} for seed in (1, 2))
    rates = torch.tensor([0.0, 0.5]).double()
    found = pulled_back_to_start(gradient, moved, rates)["weight"]
    assert torch.equal(found[0], gradient["weight"][0])
    torch.testing.assert_close(found[1], gradient["weight"][1] + 2 * moved["weight"][1])
    assert torch.equal(pulled_back_to_start(gradient, moved, 0.0)["weight"], gradient["weight"])


def test_a_metric_of_the_last_batch_alone() -> None:
    assert FisherMahalanobis(decay=0.0).decay == 0
    with pytest.raises(ValueError, match=r"Invalid decay=1\.0"):
        FisherMahalanobis(decay=1.0)


def test_the_l1_norm_counts_once_unless_told_otherwise() -> None:
    expected = sum(float(value.abs().sum()) for value in MOVED.values())
    assert float(REGULARIZERS["l1"].value(MOVED, 0.3, None)) == pytest.approx(expected, rel=1e-14)
