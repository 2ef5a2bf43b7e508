"""First-order methods with TensorFlow semantics, as in the paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from torch_locoprop import baselines
from torch_locoprop.study.methods.record import TUNED, UNTUNED, EqualBudgets, Method, register
from torch_locoprop.study.methods.search_space import Span
from torch_locoprop.study.methods.step_cost import ADAPTIVE, StepCost
from torch_locoprop.study.methods.task_settings import TaskSettings

_ONE_ITERATION = {
    "variant": "locoprop-s",
    "local_steps": 1,
    "local_decay": "constant",
    "local_reduction": "sum",
    "regularizer": None,
}
"""Every first-order method is one local iteration of a BackProp variant, with γ = 1."""

_NOTHING = StepCost(
    memory="–",
    computation="–",
    numbers=lambda d1, d2, b: 0,
    operations=lambda d1, d2, b, T, k: 0,
)

# From an earlier search on MNIST; a later search found a smaller rate that is stable at all seeds.
_EARLIER_RMSPROP = TaskSettings(
    {"lr": 1.1e-3, "momentum": 0.909, "decay": 0.995, "eps": 1e-10},
    f"{TUNED}, the best of 64 earlier trials",
)


def _register(
    name: str,
    optimizer: Callable[..., Optimizer],
    settings: dict[str, Any],
    source: str,
    **fields: Any,
) -> None:
    register(
        Method(
            name,
            lambda model, settings: optimizer(model.parameters(), **settings),
            settings,
            source,
            population={**_ONE_ITERATION, "solver": name},
            **fields,
        )
    )


_register(
    "sgd",
    baselines.SGD,
    {"lr": 0.007755},
    f"{TUNED}, 16 trials",
    label="SGD",
    colour="#a08b6c",
    marker="|",
    cost=_NOTHING,
    quick={"lr": 0.1},
    equal_budgets=EqualBudgets(12),
)
_register(
    "momentum",
    baselines.Momentum,
    {"lr": 0.001931, "momentum": 0.9146},
    f"{TUNED}, 32 trials",
    label="Momentum",
    colour="#b5651d",
    marker=">",
    quick={"lr": 0.01},
    equal_budgets=EqualBudgets(10),
)
_register(
    "nesterov",
    baselines.Nesterov,
    {"lr": 0.001931, "momentum": 0.9146},
    f"{UNTUNED}, as momentum",
    label="Nesterov",
    colour="#8a4b2a",
    marker="<",
    quick={"lr": 0.01},
)
_register(
    "adagrad",
    baselines.Adagrad,
    {"lr": 0.007131, "eps": 0.0002288},
    f"{TUNED}, 32 trials",
    label="Adagrad",
    colour="#d0736a",
    marker="p",
    # Here eps is the start of the accumulator, which is 0.1 in TensorFlow.
    space={"eps": Span(1e-4, 1.0)},
    quick={"lr": 0.1},
    equal_budgets=EqualBudgets(11),
)
_register(
    "rmsprop",
    baselines.RMSProp,
    {"lr": 0.0006138, "momentum": 0.9028, "decay": 0.9937, "eps": 2.623e-09},
    f"{TUNED}, 12 trials around the best of 64",
    label="RMSProp",
    colour="#c8401a",
    marker="s",
    cost=ADAPTIVE,
    tasks={
        **dict.fromkeys(("relu", "fashion-mnist", "curves"), _EARLIER_RMSPROP),
        "deep": TaskSettings({"lr": 3e-5}, "the best of three rates for this model"),
        "wide": TaskSettings({"lr": 1e-4}, "the best of three rates for this model"),
        "batch-100": TaskSettings(
            {"lr": 1.311e-4, "momentum": 0.9126, "decay": 0.9856, "eps": 8.664e-10},
            "the best of 32 trials of 15 epochs with such batches",
        ),
    },
    quick={"lr": 6e-3, "momentum": 0.83, "decay": 0.9, "eps": 1e-6},
    quick_tasks={"deep": {"lr": 3e-3}},
    equal_budgets=EqualBudgets(7),
)
_register(
    "adam",
    baselines.Adam,
    {"lr": 0.001557, "momentum": 0.9276, "decay": 0.9775, "eps": 5.338e-08},
    f"{TUNED}, 32 trials",
    label="Adam",
    colour="#c98500",
    marker="D",
    cost=ADAPTIVE,
    tasks={
        "deep": TaskSettings(
            {"lr": 0.0003593, "momentum": 0.9156, "decay": 0.9853, "eps": 1.82e-07},
            "the best of 32 trials of 15 epochs with this model",
        ),
        "batch-100": TaskSettings(
            {"lr": 1.433e-3, "momentum": 0.973, "decay": 0.9464, "eps": 1.895e-07},
            "the best of 16 trials of 15 epochs with such batches",
        ),
    },
    quick={"lr": 0.012, "momentum": 0.8, "decay": 0.95, "eps": 1e-6},
    equal_budgets=EqualBudgets(8),
)
