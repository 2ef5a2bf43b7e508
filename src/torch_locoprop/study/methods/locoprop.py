"""LocoProp and its variants: first-order solvers iterate on the local problems of every layer."""

from __future__ import annotations

from typing import Any

from torch_locoprop import LocoProp
from torch_locoprop.config.settings import VariantName
from torch_locoprop.study.methods.record import TUNED, Build, Method, register
from torch_locoprop.study.methods.search_space import Span
from torch_locoprop.study.methods.step_cost import StepCost

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
    "locoprop-m", "reference", {}, label="LocoProp-M", colour="#0b5fa5", marker="o", cost=_COST
)
_register(
    "locoprop-s",
    f"{TUNED}, 32 trials",
    {"lr": 1.523e-05, "gamma": 161.7, "decay": 0.99},
    label="LocoProp-S",
    colour="#2d9bc7",
    marker="^",
    cost=_COST,
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
