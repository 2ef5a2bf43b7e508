"""PSGD with a Kronecker-factored preconditioner, of the package ``pytorch_optimizer``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_locoprop.baselines.base import check_settings
from torch_locoprop.study.methods.optional_packages import (
    INSTALL_PEERS,
    missing_package,
    pytorch_optimizer,
)
from torch_locoprop.study.methods.record import TUNED, Method, Settings, register
from torch_locoprop.study.methods.search_space import Span


def _build(model: nn.Module, settings: Settings) -> Optimizer:
    check_settings(settings)
    # Without opt_einsum, torch evaluates Kron's products in an order that takes gigabytes.
    if not torch.backends.opt_einsum.is_available():
        raise missing_package("Kron", "opt_einsum")
    optimizer: Optimizer = pytorch_optimizer("Kron")(
        model.parameters(), weight_decouple=True, **settings
    )
    _load_without_expressions(optimizer)
    return optimizer


def _load_without_expressions(optimizer: Optimizer) -> None:
    """Take strings out of Kron's state while torch loads it: torch would copy a string forever."""
    expressions: dict[int, Any] = {}

    def take_out(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        expressions.clear()
        states = {}
        for index, state in state_dict["state"].items():
            states[index] = {name: value for name, value in state.items() if name != "expressions"}
            expressions[index] = state["expressions"]
        return {**state_dict, "state": states}

    def put_back(_: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, own in expressions.items():
            optimizer.state[parameters[index]]["expressions"] = own

    optimizer.register_load_state_dict_pre_hook(take_out)
    optimizer.register_load_state_dict_post_hook(put_back)


register(
    Method(
        "psgd",
        _build,
        {"lr": 1e-3, "momentum": 0.9},
        f"lr {TUNED}",
        colour="#6b7a2a",
        marker="x",
        space={"lr": Span(1e-5, 0.1)},
        packages=("pytorch_optimizer", "opt_einsum"),
        install=INSTALL_PEERS,
    )
)
