"""SOAP of the package ``pytorch_optimizer``: Adam in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from torch_locoprop.baselines.base import check_settings
from torch_locoprop.study.methods.optional_packages import INSTALL_PEERS, pytorch_optimizer
from torch_locoprop.study.methods.parameter_groups import decay_weights_only
from torch_locoprop.study.methods.record import TUNED, EqualBudgets, Method, Settings, register
from torch_locoprop.study.methods.search_space import Span


def _build(model: nn.Module, settings: Settings) -> Optimizer:
    check_settings(settings)
    optimizer: Optimizer = pytorch_optimizer("SOAP")(
        decay_weights_only(model.parameters(), settings["weight_decay"]),
        lr=settings["lr"],
        betas=(settings["momentum"], settings["decay"]),
        eps=settings["eps"],
        precondition_frequency=settings["every"],
    )
    return optimizer


register(
    Method(
        "soap",
        _build,
        {"lr": 6e-3, "momentum": 0.95, "decay": 0.95, "eps": 1e-8, "every": 10},
        f"lr and every {TUNED}",
        label="SOAP",
        colour="#7a9a12",
        marker="1",
        space={"lr": Span(1e-5, 0.1)},
        packages=("pytorch_optimizer",),
        install=INSTALL_PEERS,
        matrix_update="Soap",
        compared=True,
        quick={"lr": 0.03},
        equal_budgets=EqualBudgets(2),
    )
)
