"""The methods that the study compares, by name. A new one is one `register(Method(...))`.

    from torch_locoprop.study import methods

    methods.register(methods.Method("mine", build, {"lr": 0.1}, source="untuned"))

`build(model, settings)` returns the optimizer; its settings are the method's own, completed by the
defaults, and `weight_decay`, which is decoupled and the same for all. A method with the setting
`every` also answers to `name@k`: the same with `every=k`. A script that registers a method and ends in
`torch_locoprop.study.cli.main.main()` is the command line with it: `python mine.py compare mine adam`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torch_locoprop import LocoProp, baselines
from torch_locoprop.config.settings import unknown
from torch_locoprop.solvers import Exact
from torch_locoprop.study.methods import peers
from torch_locoprop.study.models import architectures

Settings = Mapping[str, Any]
Build = Callable[[nn.Module, Settings], Optimizer]


@dataclass(frozen=True)
class Method:
    """A way to train: how its optimizer is built, its settings with their defaults, their origin."""

    name: str
    build: Build
    settings: dict[str, Any]
    source: str

    def resolve(self, given: Settings) -> dict[str, Any]:
        """Return all settings: those given, in the types of the defaults, and the defaults."""
        for name in given:
            if name not in self.settings:
                raise ValueError(unknown(f"setting of {self.name}", name, self.settings))
        base, at, every = self.name.partition("@")
        if at and given.get("every", int(every)) != int(every):
            raise ValueError(
                f"{self.name} renews every {every} steps, and every={given['every']} contradicts "
                f"it. Use {base}@{given['every']}."
            )
        typed = {name: _like(self.settings[name], value) for name, value in given.items()}
        return {**self.settings, **typed}

    def check(self, settings: Settings) -> None:
        """Make an optimizer of a small model: what it refuses or lacks, it says before any work."""
        self.build(architectures.build("3-2"), settings)


_REGISTRY: dict[str, Method] = {}


def register(method: Method) -> None:
    """Make the method known under its name."""
    if method.name in _REGISTRY:
        raise ValueError(f"There is a method {method.name!r} already.")
    if "@" in method.name:
        raise ValueError(f"Invalid name={method.name!r}. What follows an @ is the setting every.")
    _REGISTRY[method.name] = method


def names() -> tuple[str, ...]:
    """Return the names of all methods; those with the setting `every` answer to `name@k` too."""
    return tuple(_REGISTRY)


def get(name: str) -> Method:
    """Return the method of that name."""
    base, at, every = name.partition("@")
    if base not in _REGISTRY:
        raise ValueError(unknown("method", name, _REGISTRY))
    method = _REGISTRY[base]
    if not at:
        return method
    if "every" not in method.settings:
        raise ValueError(f"Unknown method {name!r}: {base} has nothing to renew every k steps.")
    if not every.isdecimal() or int(every) < 1:
        raise ValueError(f"Unknown method {name!r}. After the @ stands an integer >= 1.")
    return replace(
        method, name=f"{base}@{int(every)}", settings={**method.settings, "every": int(every)}
    )


def _like(default: Any, value: Any) -> Any:
    """The same number in the default's type: 10 for 10.0, so that equal settings look equal."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, float) and plain:
        return float(value)
    if isinstance(default, int) and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _plain(optimizer: Callable[..., Optimizer]) -> Build:
    return lambda model, settings: optimizer(model.parameters(), **settings)


def _kfac(model: nn.Module, settings: Settings) -> Optimizer:
    return baselines.KFAC(model, output_transfer="sigmoid", **settings)


def _locoprop(variant: str) -> Build:
    return lambda model, settings: LocoProp(
        model, variant=variant, output_transfer="sigmoid", **settings
    )


def _exact(variant: str) -> Build:
    """The closed form of each batch's own problem, and momentum over the steps."""

    def build(model: nn.Module, settings: Settings) -> Optimizer:
        lr, gamma = settings["lr"], settings["gamma"]

        def outer(params: list[nn.Parameter]) -> Optimizer:
            decay = settings["weight_decay"] / gamma  # weights shrink by lr times it, as elsewhere
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


def _exact_under_muon(model: nn.Module, settings: Settings) -> Optimizer:
    """LocoProp-S in closed form on a running average of XᵀX, Muon on what it gives for weights."""
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
        outer=lambda params: peers.muon_and_adam(params, own),
    )


# Where the defaults come from: the published reference's values for the task below, searches on it
# (MNIST, tanh, standard, batches of 1000, 100 epochs), or nowhere.
REFERENCE = "reference"
TUNED = "tuned on mnist"
UNTUNED = "untuned"

_LOCAL = {
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
_EXACT = {"lr": 1e-2, "gamma": 100.0, "momentum": 0.9}

for _method in (
    Method("locoprop-m", _locoprop("locoprop-m"), _LOCAL, REFERENCE),
    Method(
        "locoprop-s",
        _locoprop("locoprop-s"),
        {**_LOCAL, "lr": 1.523e-05, "gamma": 161.7, "decay": 0.99},
        f"{TUNED}, 32 trials",
    ),
    Method(
        "pocoprop-s",
        _locoprop("pocoprop-s"),
        {**_LOCAL, "lr": 1.262e-05, "gamma": 100.0, "momentum": 0.9965, "decay": 0.9816},
        f"{TUNED}, 9 trials of 26 epochs",
    ),
    Method(
        "pocoprop-m",
        _locoprop("pocoprop-m"),
        {**_LOCAL, "lr": 1.304e-05, "gamma": 100.0, "momentum": 0.9979, "decay": 0.9181},
        f"{TUNED}, 9 trials of 26 epochs",
    ),
    Method(
        "proxprop",
        _locoprop("proxprop"),
        {**_LOCAL, "lr": 6.023e-05, "gamma": 100.0, "momentum": 0.9975, "decay": 0.9731},
        f"{TUNED}, 12 trials of 30 epochs",
    ),
    Method(
        "natural-s",
        _locoprop("natural-s"),
        {**_LOCAL, "lr": 3e-5, "gamma": 10.0, "decay": 0.99},
        "3 trials with a smaller model",
    ),
    Method("exact-s", _exact("locoprop-s"), _EXACT, f"{TUNED}, 9 trials of 25 epochs"),
    Method(
        "exact-m",
        _exact("locoprop-m"),
        {**_EXACT, "gamma": 30.0},
        "5 trials with a smaller model",
    ),
    Method(
        "exact-s-muon",
        _exact_under_muon,
        {"lr": 1e-2, "momentum": 0.9, "decay": 0.95, "every": 10, "damping": 1e-2},
        f"{TUNED}, 16 trials",
    ),
    Method("sgd", _plain(baselines.SGD), {"lr": 0.007755}, f"{TUNED}, 16 trials"),
    Method(
        "momentum",
        _plain(baselines.Momentum),
        {"lr": 0.001931, "momentum": 0.9146},
        f"{TUNED}, 32 trials",
    ),
    Method(
        "nesterov",
        _plain(baselines.Nesterov),
        {"lr": 0.001931, "momentum": 0.9146},
        f"{UNTUNED}, as momentum",
    ),
    Method(
        "adagrad",
        _plain(baselines.Adagrad),
        {"lr": 0.007131, "eps": 0.0002288},
        f"{TUNED}, 32 trials",
    ),
    Method(
        "rmsprop",
        _plain(baselines.RMSProp),
        {"lr": 0.0006138, "momentum": 0.9028, "decay": 0.9937, "eps": 2.623e-09},
        f"{TUNED}, 12 trials around the best of 64",
    ),
    Method(
        "adam",
        _plain(baselines.Adam),
        {"lr": 0.001557, "momentum": 0.9276, "decay": 0.9775, "eps": 5.338e-08},
        f"{TUNED}, 32 trials",
    ),
    Method(
        "kfac",
        _kfac,
        {"lr": 0.3, "momentum": 0.9, "decay": 0.95, "damping": 0.3, "every": 1, "clip": 0.03},
        f"lr, damping and clip {TUNED}, 13 trials with every=10",
    ),
    Method(
        "shampoo",
        _plain(baselines.Shampoo),
        {
            "lr": 0.0002905,
            "momentum": 0.9275,
            "decay": 0.9667,
            "eps": 2.637e-07,
            "every": 1,
            "grafting": "rmsprop",
            "max_size": 8192,
        },
        f"{TUNED}, 18 trials with every=100, 13 of them unfinished",
    ),
    Method("muon", peers.muon, {"lr": 3e-3, "momentum": 0.95}, f"lr {TUNED}"),
    Method(
        "soap",
        peers.soap,
        {"lr": 6e-3, "momentum": 0.95, "decay": 0.95, "eps": 1e-8, "every": 10},
        f"lr and every {TUNED}",
    ),
    Method("psgd", peers.psgd, {"lr": 1e-3, "momentum": 0.9}, f"lr {TUNED}"),
):
    register(_method)
