"""LocoProp's spectral step: with the defaults of ``LocoProp(model)``, and at its full length."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from torch_locoprop import LocoProp
from torch_locoprop.config.presets import PRESETS
from torch_locoprop.solvers import Spectral
from torch_locoprop.study.methods.record import TUNED, EqualBudgets, Method, Settings, register
from torch_locoprop.study.methods.search_space import AVERAGE, SHORT_AVERAGE, Span
from torch_locoprop.study.methods.task_settings import TaskSettings

_OF_SOLVER = ("every", "averaging", "damping", "fall", "agreement", "bias_rate")


def _build(model: nn.Module, settings: Settings) -> Optimizer:
    own = {name: value for name, value in settings.items() if name not in _OF_SOLVER}
    solver = Spectral(**{name: settings[name] for name in _OF_SOLVER})
    return LocoProp(model, preset="spectral", solver=solver, **own)


register(
    Method(
        "general",
        lambda model, settings: LocoProp(model, preset="general", **settings),
        {name: PRESETS["general"].settings[name] for name in ("lr", "momentum", "decay")},
        "the defaults of LocoProp(model)",
        label="LocoProp",
        colour="#1668c7",
        marker="$L$",
        space={"lr": Span(1e-3, 0.1), "momentum": SHORT_AVERAGE, "decay": AVERAGE},
    )
)

register(
    Method(
        "locoprop-spectral",
        _build,
        {
            "lr": 0.015,
            "momentum": 0.85,
            "decay": 0.95,
            "every": 10,
            "averaging": 0.8,
            "damping": 0.02,
            "fall": 50.0,
            "agreement": 0.0,
            "bias_rate": 0.0,  # as in the committed runs
        },
        f"{TUNED}, 25 trials of a prototype",
        label="LocoProp spectral",
        colour="#1a1a1a",
        marker=r"$\spadesuit$",
        compared=True,
        space={
            "lr": Span(1e-5, 0.1),
            "momentum": SHORT_AVERAGE,
            "damping": Span(1e-5, 1.0),  # relative to the mean diagonal of XᵀX
        },
        tasks={
            "relu": TaskSettings({"lr": 0.01}, "the better of two rates with ReLU"),
            "deep": TaskSettings(
                {"lr": 0.005, "momentum": 0.9}, "the best of four rates for this model"
            ),
            "wide": TaskSettings(
                {"lr": 0.006, "momentum": 0.9}, "the better of two rates for this model"
            ),
            "batch-100": TaskSettings(
                {"lr": 0.003, "momentum": 0.9}, "a few shorter runs with such batches"
            ),
        },
        matrix_update="Spectral",
        quick={"lr": 0.06},
        equal_budgets=EqualBudgets(13),
    )
)
