"""First-order solvers and baselines take the steps of TensorFlow 2.21, kept as numbers in a file.

``tests/data/make_tensorflow_steps.py`` has written the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_locoprop import LocoProp, baselines
from torch_locoprop.solvers import SOLVERS, FirstOrder, Numbers

FILE = Path(__file__).parents[1] / "data" / "tensorflow_steps.json"
STEPS: dict[str, Any] = json.loads(FILE.read_text())
CASES: list[dict[str, Any]] = STEPS["cases"]
BASELINES: dict[str, Any] = {
    "sgd": baselines.SGD,
    "momentum": baselines.Momentum,
    "nesterov": baselines.Nesterov,
    "adagrad": baselines.Adagrad,
    "rmsprop": baselines.RMSProp,
    "adam": baselines.Adam,
}
START = torch.tensor(STEPS["start"], dtype=torch.float64)
GRADIENTS = torch.tensor(STEPS["gradients"], dtype=torch.float64)
each = pytest.mark.parametrize(
    "case", CASES, ids=[f"{case['method']}-{case['settings']}" for case in CASES]
)


def rates(case: dict[str, Any], lr: float) -> list[float]:
    """Return the learning rate of each step."""
    factors = STEPS["rates"] if case["scheduled"] else [1.0]
    return [lr * factors[t % len(factors)] for t in range(len(GRADIENTS))]


def check(case: dict[str, Any], path: list[Tensor]) -> None:
    expected = torch.tensor(case["weights"], dtype=torch.float64)
    tolerance = case["tolerance"]
    torch.testing.assert_close(torch.stack(path), expected, rtol=tolerance, atol=tolerance)


def test_all_methods_are_in_the_file() -> None:
    assert STEPS["tensorflow"] == "2.21.0"
    assert {case["method"] for case in CASES} == {*BASELINES}
    assert {*BASELINES} == {
        name for name, solver in SOLVERS.items() if isinstance(solver, FirstOrder)
    }


@each
def test_baselines(case: dict[str, Any]) -> None:
    w = nn.Parameter(START.clone())
    opt = BASELINES[case["method"]]([w], **case["settings"])
    path = []
    for g, lr in zip(GRADIENTS, rates(case, opt.param_groups[0]["lr"]), strict=True):
        opt.param_groups[0]["lr"] = lr
        w.grad = g.clone()
        opt.step()
        path.append(w.detach().clone())
    check(case, path)


@each
def test_solvers(case: dict[str, Any]) -> None:
    opt = BASELINES[case["method"]]([nn.Parameter(START.clone())], **case["settings"])
    given = {
        name: opt.defaults[name] for name in ("momentum", "decay", "eps") if name in opt.defaults
    }
    solver = SOLVERS[case["method"]]
    assert isinstance(solver, FirstOrder)
    w, state, path = START.clone(), None, []
    for g, lr in zip(GRADIENTS, rates(case, opt.defaults["lr"]), strict=True):
        numbers = Numbers(lr=lr, **given)
        state = solver.init(w, numbers) if state is None else state
        change, state = solver.step(g, state, numbers)
        w = w - change
        path.append(w)
    check(case, path)


@each
def test_local_iterations(case: dict[str, Any]) -> None:
    """One local iteration at γ = 1 on the bias of a layer whose input is one row."""
    opt = BASELINES[case["method"]]([nn.Parameter(START.clone())], **case["settings"])
    given = {
        name: opt.defaults[name] for name in ("momentum", "decay", "eps") if name in opt.defaults
    }
    layer = nn.Linear(1, len(START), dtype=torch.float64)
    with torch.no_grad():
        layer.bias.copy_(START)
    local = LocoProp(
        layer, variant="locoprop-s", solver=case["method"], local_steps=1, gamma=1.0, **given
    )
    path = []
    for g, lr in zip(GRADIENTS, rates(case, opt.defaults["lr"]), strict=True):
        local.param_groups[0]["lr"] = lr
        local.zero_grad()
        (layer(torch.zeros(1, 1, dtype=torch.float64)) * g).sum().backward()
        local.step()
        path.append(layer.bias.detach().clone())
    check(case, path)
