"""AdamW of torch, with the weight decay of the study: of weights only."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from torch_locoprop.baselines.base import check_settings
from torch_locoprop.study.methods.parameter_groups import decay_weights_only
from torch_locoprop.study.methods.record import UNTUNED, Method, Settings, register
from torch_locoprop.study.methods.step_cost import ADAPTIVE


def _build(model: nn.Module, settings: Settings) -> Optimizer:
    check_settings(settings)
    return torch.optim.AdamW(
        decay_weights_only(model.parameters(), settings["weight_decay"]),
        lr=settings["lr"],
        betas=(settings["momentum"], settings["decay"]),
        eps=settings["eps"],
    )


register(
    Method(
        "adamw",
        _build,
        {"lr": 1e-3, "momentum": 0.9, "decay": 0.999, "eps": 1e-8},
        f"{UNTUNED}, torch's defaults",
        label="AdamW",
        colour="#c2185b",
        marker="h",
        cost=ADAPTIVE,
    )
)
