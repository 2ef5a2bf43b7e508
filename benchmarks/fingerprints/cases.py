"""The list of runs: each axis of settings in turn, over a few values of the others.

Every setting that changes a result is given in `BASE`, so that fingerprints do not depend on the
defaults of `LocoProp`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import nn

from benchmarks.fingerprints.models import ACTIVATIONS, MODELS
from torch_locoprop.solvers import Exact

VARIANTS = ("locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m", "natural-s", "proxprop")
CLOSED_FORM = ("locoprop-s", "locoprop-m", "natural-s", "proxprop")
FIRST_ORDER = ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam")
EXACT = {
    "exact": Exact(),
    "exact-decay": Exact(decay=0.9),
    "exact-every": Exact(decay=0.9, every=2),
    "exact-damping": Exact(decay=0.9, every=2, damping=0.1),
}

BASE: dict[str, Any] = {
    "variant": "locoprop-m",
    "lr": 1e-3,
    "gamma": 2.0,
    "local_steps": 5,
    "solver": "rmsprop",
    "momentum": 0.9,
    "decay": 0.9,
    "eps": 1e-5,
    "weight_decay": 0.0,
    "local_decay": "linear",
    "local_reduction": "sum",
    "regularizer": None,
    "every": 1,
    "max_rows": None,
    "cap": None,
    "gate": False,
    "apply": "replace",
}


@dataclass(frozen=True)
class Case:
    """One training run.

    Args:
        settings: arguments of the optimizer, beside those of `BASE` for `LocoProp`. The values of
            `param_groups` and `transfers` may be functions of the model.
        optimizer: `locoprop`, `population`, or the name of a class in `torch_locoprop.baselines`.
        model: a name in `MODELS`.
        transfer: the activation between the layers, a name in `ACTIVATIONS`.
        output: the transfer inside the loss: `sigmoid`, `softmax` or `linear`.
        loop: how the model is trained; `training.py` has the names.
        dtype: `float32` or `float64`.
        steps: training steps.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "locoprop"
    model: str = "mlp"
    transfer: str = "tanh"
    output: str = "sigmoid"
    loop: str = "plain"
    dtype: str = "float32"
    steps: int = 4


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def muon(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices and AdamW for the other parameters."""
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), adamw(others)]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the first layer with settings of its own, and all other layers."""
    first, second, *others = model.parameters()
    own = {"lr": 5e-4, "gamma": 1.0, "variant": "locoprop-s", "solver": "adam", "local_steps": 3}
    return [{"params": [first, second], **own}, {"params": others}]


def bias_group(model: nn.Module) -> list[dict[str, Any]]:
    """Return the weights and the biases, at different learning rates."""
    weights = [p for p in model.parameters() if p.dim() >= 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights}, {"params": biases, "lr": 2e-3}]


OPTIONS: dict[str, dict[str, Any]] = {
    "one local step": {"local_steps": 1},
    "ten local steps": {"local_steps": 10, "lr": 3e-4},
    "constant": {"local_decay": "constant"},
    "weight decay": {"weight_decay": 0.1},
    "mean": {"local_reduction": "mean"},
    "bf16 products": {"local_products": "bf16"},
    "l2": {"regularizer": "l2"},
    "l1": {"regularizer": "l1"},
    "fisher": {"regularizer": "fisher"},
    "maximize": {"maximize": True},
    "every": {"every": 2},
    "max_rows": {"max_rows": 7},
    "cap": {"cap": 1e-3},
    "cap by backprop": {"cap": 0.5, "cap_by": "backprop"},
    "gate": {"gate": True},
    "closed gate": {"gate": True, "lr": 0.5},
    "gate and max_rows": {"gate": True, "max_rows": 40, "every": 2},
    "some layers": {"layers": ["0", "2"], "fallback": adamw},
    "diagnose": {"diagnose": True},
    "outer adamw": {"apply": "gradient", "outer": adamw},
    "outer muon": {"apply": "gradient", "outer": muon},
    "outer, capped": {"apply": "gradient", "outer": adamw, "cap": 1e-3},
    "outer, gate and mean": {
        **{"apply": "gradient", "outer": adamw, "gate": True, "local_reduction": "mean"},
        "every": 2,
    },
    "nothing": {"apply": "nothing", "outer": adamw},
    "nothing at all": {"apply": "nothing"},
    "overflow": {"lr": 1e38, "gamma": 1e38},
}

LOOPS = (
    *("closure", "accumulation", "autocast", "schedule", "resume", "copy", "clip", "scaler"),
    *("checkpoint", "zero before backward", "evaluation", "changed settings", "frozen later"),
    *("two losses", "last batch smaller"),
)

BASELINES: dict[str, dict[str, dict[str, Any]]] = {
    "KFAC": {
        "": {},
        "every": {"every": 2, "decay": 0.5},
        "clip": {"clip": 1e-3},
        "weight decay": {"weight_decay": 0.1, "momentum": 0.5},
    },
    "Shampoo": {
        "": {},
        "every": {"every": 2},
        "sum": {"decay": None, "grafting": "adagrad"},
        "sgd": {"grafting": "sgd"},
        "no grafting": {"grafting": None, "weight_decay": 0.1},
        "max_size": {"max_size": 10},
    },
    **{name: {"": {}, "weight decay": {"weight_decay": 0.1, "lr": 0.01}} for name in (
        *("SGD", "Momentum", "Nesterov", "Adagrad", "RMSProp", "Adam"),
    )},
}  # fmt: skip

DISTRIBUTED: dict[str, Case] = {
    **{variant: Case({"variant": variant}) for variant in VARIANTS},
    "exact": Case({"variant": "locoprop-s", "solver": "exact"}),
    "exact-damping": Case({"variant": "locoprop-s", "solver": EXACT["exact-damping"]}),
    "mean": Case({"local_reduction": "mean"}),
    "gate": Case({"gate": True}),
    "max_rows": Case({"max_rows": 5}),
    "outer": Case({"apply": "gradient", "outer": adamw}),
    "accumulation": Case(loop="accumulation"),
    "conv": Case({"variant": "locoprop-s"}, model="conv"),
    "large": Case({"lr": 1e-4}, model="large"),
    "KFAC": Case(optimizer="KFAC"),
}
"""Runs of two processes under `DistributedDataParallel`, each with half of every batch."""


def solvers(variant: str) -> dict[str, Any]:
    """Return the solvers that a variant may have, by name."""
    return {**{name: name for name in FIRST_ORDER}, **(EXACT if variant in CLOSED_FORM else {})}


def cases() -> dict[str, Case]:
    """Return all runs of one process, by name."""
    return dict((*_methods(), *_models(), *_loops(), *_options(), *_transfers(), *_others()))


def _methods() -> Iterator[tuple[str, Case]]:
    """Every variant with every solver, on small and large problems, in both precisions."""
    for variant in VARIANTS:
        for name, solver in solvers(variant).items():
            own = {"variant": variant, "solver": solver}
            for model, dtype in product(("mlp", "large"), ("float32", "float64")):
                numbers = {"lr": 1e-4} if model == "large" else {}
                title = f"methods/{variant}/{name}/{model}/{dtype}"
                yield title, Case({**own, **numbers}, model=model, dtype=dtype, steps=3)


def _models() -> Iterator[tuple[str, Case]]:
    for model in MODELS:
        if model == "gpt2" and importlib.util.find_spec("transformers") is None:
            continue
        rest = {"fallback": adamw} if model == "sequences" else {}
        for variant in VARIANTS:
            for solver in ("rmsprop", "sgd", *(["exact"] if variant in CLOSED_FORM else [])):
                own = {"variant": variant, "solver": solver, "lr": 3e-4, **rest}
                yield f"models/{model}/{variant}/{solver}", Case(own, model=model)
        own = {"variant": "locoprop-s", "solver": EXACT["exact-damping"], **rest}
        yield f"models/{model}/locoprop-s/exact-damping", Case(own, model=model)
        yield f"models/{model}/relu", Case({"lr": 3e-4, **rest}, model=model, transfer="relu")


def _loops() -> Iterator[tuple[str, Case]]:
    for loop, model in product(LOOPS, ("mlp", "conv", "large")):
        for variant in ("locoprop-s", "locoprop-m", "pocoprop-m"):
            own = {"variant": variant, "lr": 1e-4 if model == "large" else 1e-3}
            yield f"loops/{loop}/{model}/{variant}", Case(own, model=model, loop=loop)
        own = {"variant": "locoprop-s", "solver": EXACT["exact-damping"]}
        yield f"loops/{loop}/{model}/exact-damping", Case(own, model=model, loop=loop)
    for loop in ("accumulation", "resume", "schedule", "copy", "closure"):
        own = {"apply": "gradient", "outer": adamw}
        yield f"loops/{loop}/outer", Case(own, loop=loop)
        own = {"regularizer": "fisher", "max_rows": 7}
        yield f"loops/{loop}/fisher and max_rows", Case(own, loop=loop)
    for loop, variant in product(("compile eager", "compile aot_eager"), VARIANTS[:2]):
        yield f"loops/{loop}/{variant}", Case({"variant": variant}, loop=loop)


def _options() -> Iterator[tuple[str, Case]]:
    for name, own in OPTIONS.items():
        models = ("mlp", "many-rows", "large") if own.get("outer") is muon or "layers" in own else (
            *("mlp", "many-rows", "large", "conv"),
        )  # fmt: skip
        for model, variant in product(models, ("locoprop-s", "locoprop-m")):
            numbers = {"lr": 1e-4} if model == "large" else {}
            settings = {**numbers, "variant": variant, **own}
            yield f"options/{name}/{model}/{variant}", Case(settings, model=model)
    for groups in (two_groups, bias_group):
        for solver in ("rmsprop", "momentum"):
            own = {"param_groups": groups, "solver": solver}
            yield f"options/{groups.__name__}/{solver}", Case(own)
            yield f"options/{groups.__name__}/{solver}/schedule", Case(own, loop="schedule")


def _transfers() -> Iterator[tuple[str, Case]]:
    for transfer, variant in product(ACTIVATIONS, VARIANTS):
        case = Case({"variant": variant, "lr": 3e-4}, transfer=transfer)
        yield f"transfers/{transfer}/{variant}", case
    for transfer, model in product(("relu", "sigmoid", "linear", "softplus"), ("large", "conv")):
        case = Case({"lr": 1e-4}, model=model, transfer=transfer)
        yield f"transfers/{transfer}/{model}", case
    for output, variant in product(("softmax", "linear"), VARIANTS):
        for model in ("mlp", "large"):
            own = {"variant": variant, "lr": 1e-4}
            yield f"outputs/{output}/{variant}/{model}", Case(own, model=model, output=output)
    for output in ("softmax", "linear"):
        own = {"solver": "exact", "lr": 1e-2}
        yield f"outputs/{output}/exact", Case(own, output=output)


def _others() -> Iterator[tuple[str, Case]]:
    """The baselines, and populations of models that are trained together."""
    for name, options in BASELINES.items():
        for title, own in options.items():
            for model, output in (("mlp", "sigmoid"), ("mlp", "softmax"), ("conv", "sigmoid")):
                rest = {"fallback": adamw} if name == "KFAC" and model == "conv" else {}
                case = Case({**own, **rest}, name, model=model, output=output, steps=5)
                yield f"baselines/{name}/{title or 'defaults'}/{model}/{output}", case
    for variant in VARIANTS:
        for solver in solvers(variant):
            own = {"variant": variant, "solver": solver}
            yield f"populations/{variant}/{solver}", Case(own, "population")
    for regularizer, dtype in product(("l2", "l1", "fisher"), ("float32", "float64")):
        own = {"regularizer": regularizer}
        yield f"populations/{regularizer}/{dtype}", Case(own, "population", dtype=dtype)
    yield "populations/mean", Case({"local_reduction": "mean"}, "population")
