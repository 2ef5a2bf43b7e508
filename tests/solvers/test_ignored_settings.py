"""A solver ignores the settings that it says it ignores, and no others; some warn of them."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from cases import batch, cross_entropy, network, weights
from torch import Tensor

from torch_locoprop import LocoProp
from torch_locoprop.solvers import SOLVERS

# Two values of each setting, none of them a default.
ONE: dict[str, Any] = {
    "gamma": 2.0,
    "momentum": 0.5,
    "decay": 0.6,
    "eps": 1e-3,
    "local_steps": 3,
    "local_decay": "constant",
    "local_reduction": "mean",
    "regularizer": "l2",
}
OTHER: dict[str, Any] = {
    "gamma": 3.0,
    "momentum": 0.7,
    "decay": 0.8,
    "eps": 1e-2,
    "local_steps": 4,
    "local_decay": "linear",
    "local_reduction": "sum",
    "regularizer": None,
}
# The closed form has the l2 term in any case and no iterations; the preconditioned solvers refuse
# regularizers, and the averaged one all numbers of iterations but one.
FIXED = {
    *(("exact", "regularizer"), ("exact", "local_steps"), ("preconditioned", "regularizer")),
    *(("preconditioned-averaged", name) for name in ("regularizer", "local_steps")),
}
PAIRS = [pair for pair in product(SOLVERS, ONE) if pair not in FIXED]


def trained(solver: str, settings: dict[str, Any]) -> list[Tensor]:
    """Return the weights after three steps: some settings scale the first step of an average."""
    model = network()
    opt = LocoProp(
        model, lr=0.01, variant="locoprop-s", solver=solver, output_transfer="sigmoid", **settings
    )
    for step in range(3):
        x = batch(8, 6, seed=step)
        cross_entropy(model(x), x[:, :3]).backward()
        opt.step()
        opt.zero_grad()
    return weights(model)


@pytest.mark.filterwarnings("ignore:The first step")
@pytest.mark.parametrize(("solver", "name"), PAIRS)
def test_settings_change_the_weights_unless_they_are_ignored(solver: str, name: str) -> None:
    used = {key: value for key, value in ONE.items() if (solver, key) in PAIRS}
    used = {key: value for key, value in used.items() if key not in SOLVERS[solver].ignores}
    one, other = used | {name: ONE[name]}, used | {name: OTHER[name]}
    if name not in SOLVERS[solver].ignores:
        assert any(map(differs, trained(solver, one), trained(solver, other)))
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"{name} has no effect")
        assert not any(map(differs, trained(solver, one), trained(solver, other)))


def differs(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(one, other)


@pytest.mark.parametrize(("solver", "name"), PAIRS)
def test_an_ignored_setting_that_is_given_has_one_warning(solver: str, name: str) -> None:
    ignored = name in SOLVERS[solver].ignores
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        LocoProp(network(), variant="locoprop-s", solver=solver, **{name: ONE[name]})
    is_told = ignored and SOLVERS[solver].warns_of_ignored
    expected = [f"{name} has no effect with solver={solver!r}."] if is_told else []
    assert [str(each.message) for each in told] == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"solver": "sgd", "momentum": 0.9}, "\nmomentum has no effect with solver='sgd'."),
        ({"solver": "exact", "eps": 0.1, "decay": 0.5}, "\neps, decay have no effect with"),
        ({"solver": "momentum", "momentum": 0.5}, ""),
        ({"solver": "sgd"}, ""),
    ],
)
def test_the_summary_names_ignored_settings_that_were_given(
    settings: dict[str, Any], expected: str
) -> None:
    told = LocoProp(network(), variant="locoprop-s", **settings).summary()
    assert expected in told if expected else "no effect" not in told


def test_which_solvers_warn() -> None:
    warning = {name for name, solver in SOLVERS.items() if solver.warns_of_ignored}
    assert warning == {"spectral", "general", "preconditioned", "preconditioned-averaged"}
