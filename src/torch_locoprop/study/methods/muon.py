"""Muon of torch for weights, and Adam at the same learning rate for biases."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from torch_locoprop.baselines import Adam
from torch_locoprop.baselines.base import check_settings
from torch_locoprop.study.methods.combined_optimizer import CombinedOptimizer
from torch_locoprop.study.methods.parameter_groups import weights_and_biases
from torch_locoprop.study.methods.record import TUNED, EqualBudgets, Method, Settings, register
from torch_locoprop.study.methods.search_space import SHORT_AVERAGE, Span


def muon_and_adam(
    parameters: Iterable[nn.Parameter], settings: Settings
) -> tuple[Optimizer, Optimizer]:
    """Return Muon for matrices, with steps of the size of AdamW's, and Adam for vectors."""
    weights, biases = weights_and_biases(parameters)
    matrices = torch.optim.Muon(weights, adjust_lr_fn="match_rms_adamw", **settings)
    return matrices, Adam(biases, lr=settings["lr"])


def _build(model: nn.Module, settings: Settings) -> Optimizer:
    check_settings(settings)
    return CombinedOptimizer(*muon_and_adam(model.parameters(), settings))


register(
    Method(
        "muon",
        _build,
        {"lr": 3e-3, "momentum": 0.95},
        f"lr {TUNED}",
        label="Muon",
        colour="#3d8b37",
        marker="v",
        space={"lr": Span(1e-5, 0.1), "momentum": SHORT_AVERAGE},
        matrix_update="Muon",
        compared=True,
        quick={"lr": 0.03},
        equal_budgets=EqualBudgets(1),
    )
)
