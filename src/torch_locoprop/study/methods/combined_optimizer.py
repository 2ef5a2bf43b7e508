"""Optimizers of other packages, as the study's methods: Muon of torch, SOAP and PSGD Kron.

SOAP and PSGD come from `pytorch_optimizer`, which is optional: the extra `peers`. Weight decay is the
study's everywhere: decoupled, and of weights only.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_locoprop.baselines import Adam
from torch_locoprop.baselines.base import check_settings

Settings = Mapping[str, Any]


class Together(Optimizer):
    """Several optimizers as one, each with its own parameters, over one list of groups."""

    def __init__(self, *parts: Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._link()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._link()

    def _link(self) -> None:
        """The parts work on our groups and states, so schedulers and state dicts see all."""
        first = 0
        for part in self._parts:
            last = first + len(part.param_groups)
            part.param_groups = self.param_groups[first:last]
            part.state = self.state
            first = last


def muon(model: nn.Module, settings: Settings) -> Optimizer:
    """Muon for the weights, in the scale of AdamW's steps, and Adam at the same rate for biases."""
    check_settings(settings)
    return Together(*muon_and_adam(list(model.parameters()), settings))


def muon_and_adam(params: list[nn.Parameter], settings: Settings) -> tuple[Optimizer, Optimizer]:
    """Muon for matrices, in the scale of AdamW's steps, and Adam at the same rate for vectors."""
    weights, biases = _divided(params)
    matrices = torch.optim.Muon(weights, adjust_lr_fn="match_rms_adamw", **settings)
    return matrices, Adam(biases, lr=settings["lr"])


def soap(model: nn.Module, settings: Settings) -> Optimizer:
    """SOAP, of pytorch_optimizer."""
    check_settings(settings)
    weights, biases = _divided(list(model.parameters()))
    groups = [
        {"params": weights, "weight_decay": settings["weight_decay"]},
        {"params": biases, "weight_decay": 0.0},
    ]
    optimizer: Optimizer = _pytorch_optimizer("SOAP").SOAP(
        groups,
        lr=settings["lr"],
        betas=(settings["momentum"], settings["decay"]),
        eps=settings["eps"],
        precondition_frequency=settings["every"],
    )
    return optimizer


def psgd(model: nn.Module, settings: Settings) -> Optimizer:
    """PSGD with a Kronecker-factored preconditioner, of pytorch_optimizer."""
    check_settings(settings)
    if not torch.backends.opt_einsum.is_available():  # without it, products of gigabytes
        raise _missing("Kron", "opt_einsum")
    optimizer: Optimizer = _pytorch_optimizer("Kron").Kron(
        model.parameters(), weight_decouple=True, **settings
    )
    _keep_expressions(optimizer)
    return optimizer


def _divided(
    parameters: list[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights and biases."""
    return [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]


def _pytorch_optimizer(wanted: str) -> Any:
    try:
        package = import_module("pytorch_optimizer")
    except ImportError:
        package = None
    if not hasattr(package, wanted):
        raise _missing(wanted, "pytorch_optimizer")
    return package


def _missing(wanted: str, package: str) -> ImportError:
    return ImportError(
        f"{wanted} takes the package {package}, which is not installed or too old. Install it "
        'with: pip install "torch-locoprop[peers]".'
    )


def _keep_expressions(optimizer: Optimizer) -> None:
    """Load state dicts around Kron's strings, on which torch's copy of a state never ends."""
    aside: dict[int, Any] = {}

    def take(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        aside.clear()
        states = {}
        for index, state in state_dict["state"].items():
            states[index] = {name: value for name, value in state.items() if name != "expressions"}
            aside[index] = state["expressions"]
        return {**state_dict, "state": states}

    def give_back(_: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, expressions in aside.items():
            optimizer.state[parameters[index]]["expressions"] = expressions

    optimizer.register_load_state_dict_pre_hook(take)
    optimizer.register_load_state_dict_post_hook(give_back)
