"""Functions and second-order baselines inside autocast compute in the precision of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functional_cases import given, random
from torch import Tensor, nn

from torch_locoprop.baselines import KFAC, Shampoo
from torch_locoprop.functional import closed_form, locoprop_m, locoprop_s, polar, spectral

ITERATIONS: dict[str, Any] = {"lr": 1e-3, "gamma": 1.0, "local_steps": 3}
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "closed form": lambda grad, gram: closed_form(grad, gram, damping=0.1),
    "spectral": lambda grad, gram: spectral(grad, gram, None, lr=0.1),
    "polar": lambda grad, gram: polar(grad),
    "locoprop-s": lambda grad, gram: locoprop_s(grad, gram, None, **ITERATIONS),
    "locoprop-m": lambda grad, gram: locoprop_m(grad, None, gram, grad, "tanh", None, **ITERATIONS),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_inside_autocast_is_one_outside(name: str) -> None:
    grad, gram = (tensor.float() for tensor in given(4, 6))
    expected = FUNCTIONS[name](grad, gram)
    with torch.autocast("cpu", torch.bfloat16):
        found = FUNCTIONS[name](grad, gram)
        assert torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_function_inside_autocast_is_one_outside(name: str) -> None:
    grad, gram = (tensor.float() for tensor in given(4, 6))
    expected = FUNCTIONS[name](grad, gram)
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(grad, gram), expected)


BASELINES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "kfac": lambda model: KFAC(model, output_transfer="linear"),
    "shampoo": lambda model: Shampoo(model.parameters()),
}


@pytest.mark.parametrize("name", BASELINES)
def test_a_step_of_a_baseline_inside_autocast_is_one_outside(name: str) -> None:
    results = []
    for autocast in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        opt = BASELINES[name](model)
        for seed in range(2):
            model(random(9, 6, seed=seed).float()).square().mean().backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                opt.step()
            opt.zero_grad()
        results.append([*model.parameters(), *opt.state[model[0].weight].values()])
    torch.testing.assert_close(*results, rtol=0, atol=0)
