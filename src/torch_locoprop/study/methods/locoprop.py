"""LocoProp and its variants: first-order solvers iterate on the local problems of every layer."""

from __future__ import annotations

from typing import Any

from torch_locoprop import LocoProp
from torch_locoprop.config.settings import VariantName
from torch_locoprop.study.methods.record import TUNED, Build, EqualBudgets, Method, register
from torch_locoprop.study.methods.search_space import Span
from torch_locoprop.study.methods.step_cost import StepCost
from torch_locoprop.study.methods.task_settings import TaskSettings, iterations

_SETTINGS: dict[str, Any] = {
    "lr": 1e-5,
    "gamma": 10.0,
    "local_steps": 10,
    "solver": "rmsprop",
    "momentum": 0.999,
    "decay": 0.9,
    "eps": 1e-5,
    "local_decay": "linear",
    "local_reduction": "sum",
    "regularizer": None,
}
"""The values of the published reference for LocoProp-M."""

_COST = StepCost(
    memory="Σ d₁·d₂ + b·(d₁ + d₂)",
    computation="Σ b·T·d₁·d₂",
    numbers=lambda d1, d2, b: d1 * d2 + b * (d1 + d2),
    operations=lambda d1, d2, b, T, k: b * T * d1 * d2,
)

# With one iteration, LocoProp-S and -M are the same method: RMSProp on BackProp's gradient.
_ONE_ITERATION = TaskSettings(
    {"lr": 3.198e-04, "gamma": 2.352, "momentum": 0.95, "decay": 0.995},
    f"one method, {TUNED}, 32 trials of 60 epochs",
)

# For T = 5 a search found nothing better than the settings of T = 10.
_FIFTY_ITERATIONS = f"{TUNED}, 12 trials of 25 epochs each"
_SMALL_BATCHES = "the best of 24 trials of 8 epochs with such batches"


def _build(variant: VariantName) -> Build:
    return lambda model, settings: LocoProp(
        model, variant=variant, output_transfer="sigmoid", **settings
    )


def _register(name: VariantName, source: str, own: dict[str, Any], **fields: Any) -> None:
    register(
        Method(
            name,
            _build(name),
            {**_SETTINGS, **own},
            source,
            population={"variant": name},
            **fields,
        )
    )


_register(
    "locoprop-m",
    "reference",
    {},
    label="LocoProp-M",
    colour="#0b5fa5",
    marker="o",
    cost=_COST,
    tasks={
        "batch-100": TaskSettings(
            {"lr": 2.915e-05, "momentum": 0.9, "decay": 0.99}, _SMALL_BATCHES
        ),
        iterations(1): _ONE_ITERATION,
        iterations(50): TaskSettings(
            {"lr": 1.961e-06, "gamma": 15.73, "decay": 0.99}, _FIFTY_ITERATIONS
        ),
    },
    quick={"lr": 2.5e-4, "gamma": 10.0, "momentum": 0.95, "decay": 0.964, "eps": 1.7e-6},
    ends_in_frame=True,
    equal_budgets=EqualBudgets(3),
)
_register(
    "locoprop-s",
    f"{TUNED}, 32 trials",
    {"lr": 1.523e-05, "gamma": 161.7, "decay": 0.99},
    label="LocoProp-S",
    colour="#2d9bc7",
    marker="^",
    cost=_COST,
    tasks={
        "relu": TaskSettings(
            {"lr": 3.045e-06, "gamma": 154.0, "decay": 0.9},
            "the best of 32 trials of 50 epochs with ReLU",
        ),
        "deep": TaskSettings(
            {"lr": 4.019e-06, "gamma": 100.0}, "the best of 24 trials of 10 epochs with this model"
        ),
        "wide": TaskSettings({"lr": 4e-6, "gamma": 100.0}, "the best of four rates for this model"),
        "batch-100": TaskSettings({"lr": 1.669e-06, "gamma": 10.0}, _SMALL_BATCHES),
        iterations(1): _ONE_ITERATION,
        iterations(50): TaskSettings(
            {"lr": 2.035e-06, "gamma": 195.6, "decay": 0.9}, _FIFTY_ITERATIONS
        ),
    },
    quick={"lr": 3.07e-5, "gamma": 1000.0, "momentum": 0.987, "decay": 0.857, "eps": 1e-9},
    ends_in_frame=True,
    equal_budgets=EqualBudgets(4),
)
_register(
    "pocoprop-s",
    f"{TUNED}, 9 trials of 26 epochs",
    {"lr": 1.262e-05, "gamma": 100.0, "momentum": 0.9965, "decay": 0.9816},
    label="PocoProp-S",
    colour="#7685d2",
    marker="H",
)
_register(
    "pocoprop-m",
    f"{TUNED}, 9 trials of 26 epochs",
    {"lr": 1.304e-05, "gamma": 100.0, "momentum": 0.9979, "decay": 0.9181},
    label="PocoProp-M",
    colour="#2f3e9e",
    marker="8",
)
_register(
    "proxprop",
    f"{TUNED}, 12 trials of 30 epochs",
    {"lr": 6.023e-05, "gamma": 100.0, "momentum": 0.9975, "decay": 0.9731},
    label="ProxProp",
    colour="#13807a",
    marker="2",
)
_register(
    "natural-s",
    "3 trials with a smaller model",
    {"lr": 3e-5, "gamma": 10.0, "decay": 0.99},
    colour="#2f9d8b",
    marker="3",
    # The target is a natural-gradient step of length γ, which is of the order of 1.
    space={"gamma": Span(0.1, 100.0)},
)
