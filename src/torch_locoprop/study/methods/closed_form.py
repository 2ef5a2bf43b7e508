"""LocoProp with local problems solved in closed form, below momentum or Muon."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from torch_locoprop import LocoProp, baselines
from torch_locoprop.config.settings import VariantName
from torch_locoprop.solvers import Exact
from torch_locoprop.study.methods.muon import muon_and_adam
from torch_locoprop.study.methods.record import (
    TUNED,
    Build,
    EqualBudgets,
    Method,
    Settings,
    register,
)
from torch_locoprop.study.methods.search_space import SHORT_AVERAGE, Space, Span

_SETTINGS = {"lr": 1e-2, "gamma": 100.0, "momentum": 0.9}
_SPACE: Space = {
    "lr": Span(1e-4, 1.0),  # η of the proximal term: if it is large, γ sets the length of a step
    "gamma": Span(1.0, 5000.0),
    "momentum": Span(0.1, 1.0, of_rest=True),
}


def _under_momentum(variant: VariantName) -> Build:
    """Return a function that builds LocoProp with exact solutions of each batch, below momentum."""

    def build(model: nn.Module, settings: Settings) -> Optimizer:
        lr, gamma = settings["lr"], settings["gamma"]

        def outer(params: list[nn.Parameter]) -> Optimizer:
            # The outer rate is lr · γ; weights have to shrink by lr · weight_decay.
            decay = settings["weight_decay"] / gamma
            momentum = settings["momentum"]
            return baselines.Momentum(params, lr * gamma, momentum=momentum, weight_decay=decay)

        return LocoProp(
            model,
            lr=lr,
            gamma=gamma,
            variant=variant,
            solver="exact",
            output_transfer="sigmoid",
            apply="gradient",
            outer=outer,
        )

    return build


def _under_muon(model: nn.Module, settings: Settings) -> Optimizer:
    """Build LocoProp-S on a running average of XᵀX, with Muon as the outer optimizer of weights."""
    solver = Exact(**{name: settings[name] for name in ("decay", "every", "damping")})
    own = {name: settings[name] for name in ("lr", "momentum", "weight_decay")}
    return LocoProp(
        model,
        lr=own["lr"],
        gamma=1.0,
        variant="locoprop-s",
        solver=solver,
        local_reduction="mean",
        output_transfer="sigmoid",
        apply="gradient",
        outer=lambda params: muon_and_adam(params, own),
    )


register(
    Method(
        "exact-s",
        _under_momentum("locoprop-s"),
        _SETTINGS,
        f"{TUNED}, 9 trials of 25 epochs",
        label="exact LocoProp-S",
        colour="#009c9c",
        marker="4",
        space=_SPACE,
    )
)
register(
    Method(
        "exact-m",
        _under_momentum("locoprop-m"),
        {**_SETTINGS, "gamma": 30.0},
        "5 trials with a smaller model",
        label="exact LocoProp-M",
        colour="#3f6fd1",
        marker="d",
        space=_SPACE,
    )
)
register(
    Method(
        "exact-s-muon",
        _under_muon,
        {"lr": 1e-2, "momentum": 0.9, "decay": 0.95, "every": 10, "damping": 1e-2},
        f"{TUNED}, 16 trials",
        label="exact S + Muon",
        colour="#001f5c",
        marker="P",
        space={
            "lr": Span(1e-5, 0.1),
            "momentum": SHORT_AVERAGE,
            "damping": Span(1e-5, 1.0),  # relative to the mean diagonal of XᵀX
        },
        matrix_update="ExactSMuon",
        compared=True,
        quick={"lr": 0.03, "damping": 1.0},
        equal_budgets=EqualBudgets(5),
    )
)
