"""Our optimizers with settings, for tests that hold for all of them.

An optimizer of ``torch.optim`` takes parameters, ``LocoProp`` and ``KFAC`` take the model. A
:class:`Case` hides the difference. All settings are named: the state dicts of earlier versions in
``tests/data`` were made with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_locoprop import LocoProp, baselines
from torch_locoprop.solvers import Exact


@dataclass(frozen=True)
class Case:
    """One optimizer with its settings."""

    name: str
    kind: Callable[..., Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    takes_model: bool = False

    def make(self, model: nn.Module, **options: Any) -> Any:
        """Return the optimizer of a model."""
        own = {"lr": 0.01, **self.options, **options}
        return self.kind(model if self.takes_model else model.parameters(), **own)

    def __str__(self) -> str:
        return self.name


def local(name: str, **options: Any) -> Case:
    own = {"variant": "locoprop-s", "solver": "rmsprop", "lr": 1e-3, "gamma": 1.0, "momentum": 0.9}
    return Case(name, LocoProp, {**own, "output_transfer": "sigmoid", **options}, takes_model=True)


def outer(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


LOCAL = [
    Case("general", LocoProp, {"output_transfer": "sigmoid"}, takes_model=True),
    local("locoprop-s"),
    local("locoprop-m-adam", variant="locoprop-m", solver="adam"),
    local("locoprop-m-sgd", variant="locoprop-m", solver="sgd"),
    local("pocoprop-m-nesterov", variant="pocoprop-m", solver="nesterov"),
    local("natural-s", variant="natural-s", lr=1e-4),
    local("exact", solver="exact"),
    local("exact-average", solver=Exact(decay=0.9, every=2, damping=0.1)),
    local("outer", apply="gradient", outer=outer),
]
PLAIN = [
    Case("sgd", baselines.SGD),
    Case("momentum", baselines.Momentum),
    Case("nesterov", baselines.Nesterov),
    Case("adagrad", baselines.Adagrad),
    Case("rmsprop", baselines.RMSProp, {"momentum": 0.9}),
    Case("adam", baselines.Adam),
    Case("shampoo", baselines.Shampoo),
    Case("shampoo-every-3", baselines.Shampoo, {"every": 3, "grafting": None}),
]
KFAC = Case("kfac", baselines.KFAC, {"output_transfer": "sigmoid"}, takes_model=True)
ALL = [*LOCAL, *PLAIN, KFAC]
