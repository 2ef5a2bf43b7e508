"""Shampoo: a Kronecker-factored preconditioner from inverse roots of gradient statistics.

Its search space is that of the paper's Table 4.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from torch_locoprop.baselines import Shampoo
from torch_locoprop.study.methods.record import TUNED, EqualBudgets, Method, Settings, register
from torch_locoprop.study.methods.search_space import Span
from torch_locoprop.study.methods.step_cost import StepCost


def _build(model: nn.Module, settings: Settings) -> Optimizer:
    return Shampoo(model.parameters(), **settings)


register(
    Method(
        "shampoo",
        _build,
        {
            "lr": 0.0002905,
            "momentum": 0.9275,
            "decay": 0.9667,
            "eps": 2.637e-07,
            "every": 1,
            "early": 0,  # in the paper's schedule early roots change nothing, and the runs have none
            "grafting": "rmsprop",
            "max_size": 8192,
        },
        f"{TUNED}, 18 trials with every=100, 13 of them unfinished",
        label="Shampoo",
        colour="#b64fa8",
        marker="+",
        space={"lr": Span(1e-7, 10.0), "eps": Span(1e-10, 0.1)},  # as in the paper's Table 4
        matrix_update="Shampoo",
        cost=StepCost(
            memory="Σ d₁² + d₂²",
            computation="Σ (d₁³ + d₂³)/k",
            numbers=lambda d1, d2, b: d1**2 + d2**2,
            operations=lambda d1, d2, b, T, k: (d1**3 + d2**3) / k,
        ),
        quick={"lr": 2e-3, "momentum": 0.8, "decay": 0.95},
        equal_budgets=EqualBudgets(9, every=100, strict=True),
    )
)
