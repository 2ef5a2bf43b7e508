"""SOAP of the package ``pytorch_optimizer``: Adam in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from torch_locoprop.baselines.base import check_settings
from torch_locoprop.study.methods.combined_optimizer import weights_and_biases
from torch_locoprop.study.methods.optional_packages import INSTALL_PEERS, pytorch_optimizer
from torch_locoprop.study.methods.record import TUNED, Method, Settings, register
from torch_locoprop.study.methods.search_space import Span


def _build(model: nn.Module, settings: Settings) -> Optimizer:
    check_settings(settings)
    weights, biases = weights_and_biases(model.parameters())
    groups = [
        {"params": weights, "weight_decay": settings["weight_decay"]},
        {"params": biases, "weight_decay": 0.0},
    ]
    optimizer: Optimizer = pytorch_optimizer("SOAP")(
        groups,
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
        colour="#8fae1b",
        space={"lr": Span(1e-5, 0.1)},
        packages=("pytorch_optimizer",),
        install=INSTALL_PEERS,
        compared=True,
    )
)
