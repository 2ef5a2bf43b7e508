"""Where each method's settings are searched: the paper's spaces as data, and how to narrow them.

    from torch_locoprop.study import spaces

    space = spaces.of(methods.get("adam"), ranges={"lr": "1e-4:1e-2"}, fixed={"eps": 1e-8})

A space maps names of settings to a `Span` or to `Choices`. A method that the tables do not have, such
as one of your own, is searched over those of its settings whose names are known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_locoprop.config.settings import unknown
from torch_locoprop.study.methods.registry import Method


@dataclass(frozen=True)
class Span:
    """Log-uniform from `low` to `high`: of the setting or, with `of_rest`, of one minus it."""

    low: float
    high: float
    of_rest: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise ValueError("the lower end must be above 0 and below the upper end")
        if self.of_rest and self.high > 1:
            raise ValueError("the setting must be between 0 and 1, without the latter")

    @property
    def ends(self) -> tuple[Any, ...]:
        """The settings at both ends."""
        return self.setting(self.low), self.setting(self.high)

    def setting(self, number: float) -> float:
        """Return the setting that a number of the span stands for."""
        if self.whole:
            return int(number)
        return 1 - number if self.of_rest else number

    def to_dict(self) -> dict[str, Any]:
        """Return the span as JSON knows it."""
        kind = "one_minus" if self.of_rest else "whole" if self.whole else "log"
        return {kind: [self.low, self.high]}


@dataclass(frozen=True)
class Choices:
    """One of a few values."""

    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, ...]:
        """All of them."""
        return self.values

    def to_dict(self) -> dict[str, Any]:
        """Return the choices as JSON knows them."""
        return {"choices": list(self.values)}


Domain = Span | Choices
Space = dict[str, Domain]


def from_dict(values: Mapping[str, Any]) -> Domain:
    """Return the domain that `to_dict` was called on."""
    try:
        ((kind, content),) = values.items()
        if kind == "choices":
            return Choices(tuple(content))
        low, high = content
        return Span(low, high, of_rest=kind == "one_minus", whole=kind == "whole")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{values!r} is not the range of a setting ({error}).") from error


_RATE = Span(1e-7, 0.1)
_AVERAGE = Span(1e-3, 0.1, of_rest=True)
_SHORT_AVERAGE = Span(1e-2, 0.2, of_rest=True)
_EXACT: Space = {
    "lr": Span(1e-4, 1.0),
    "gamma": Span(1.0, 5000.0),
    "momentum": Span(0.1, 1.0, of_rest=True),
}

KNOWN: Space = {
    "lr": _RATE,
    "gamma": Choices((10.0, 100.0, 500.0, 1000.0, 2000.0, 3000.0, 5000.0)),
    "momentum": _AVERAGE,
    "decay": _AVERAGE,
    "eps": Span(1e-10, 1e-5),
    "damping": Span(1e-10, 0.1),
}
"""The paper's ranges of the first-order methods, of LocoProp and, for damping, of K-FAC."""

OWN: dict[str, Space] = {
    # The paper's, but for damping, whose best value here, 0.3, lies above the paper's upper end of
    # 0.1, and for the bound on the KL divergence, which the paper's K-FAC does not have.
    "kfac": {"lr": Span(1e-7, 10.0), "damping": Span(1e-10, 10.0), "clip": Span(1e-3, 1.0)},
    "shampoo": {"lr": Span(1e-7, 10.0), "eps": Span(1e-10, 0.1)},
    # Not the ε of a quotient but the start of the accumulator, which is 0.1 in TensorFlow.
    "adagrad": {"eps": Span(1e-4, 1.0)},
    # The target is a natural-gradient step of length γ: one of the order of 1.
    "natural-s": {"gamma": Span(0.1, 100.0)},
    # lr sets the proximal term: a large one leaves the length of the step to γ.
    "exact-s": _EXACT,
    "exact-m": _EXACT,
    # Not in the paper. Steps have the scale of Adam's.
    "muon": {"lr": Span(1e-5, 0.1), "momentum": _SHORT_AVERAGE},
    "exact-s-muon": {  # damping is relative to the mean diagonal of XᵀX
        "lr": Span(1e-5, 0.1),
        "momentum": _SHORT_AVERAGE,
        "damping": Span(1e-5, 1.0),
    },
    "soap": {"lr": Span(1e-5, 0.1)},
    "psgd": {"lr": Span(1e-5, 0.1)},
}
"""What the methods have otherwise."""

UNUSED_BY_SOLVER: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum", "decay", "eps"),
    "momentum": ("decay", "eps"),
    "nesterov": ("decay", "eps"),
    "adagrad": ("momentum", "decay"),
    "exact": ("momentum", "decay", "eps"),
}
"""Settings of a local method that its solver does not look at."""


def of(
    method: Method,
    *,
    ranges: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> Space:
    """Return the method's space, by default that of the paper's Tables 3 to 5 where they have one.

    `ranges`, as `parsed` reads them, replace its ranges; settings in `fixed` are left out.
    """
    ranges, fixed = ranges or {}, fixed or {}
    for name in (*ranges, *fixed):
        if name not in method.settings:
            raise ValueError(unknown(f"setting of {method.name}", name, method.settings))
    for name in ranges:
        if name in fixed:
            raise ValueError(f"{name} has a range and a value. Give either --range or --set.")
    known = {**KNOWN, **OWN.get(method.name.partition("@")[0], {})}
    solver = {**method.settings, **fixed}.get("solver")
    unused = UNUSED_BY_SOLVER.get(str(solver), ())
    space: Space = {}
    for name in method.settings:
        domain = known.get(name)
        if domain is not None and name not in fixed and name not in unused:
            space[name] = domain
    space |= {name: parsed(name, text, method.settings[name]) for name, text in ranges.items()}
    if not space:
        raise ValueError(
            f"Nothing of {method.name} is left to tune. Its settings are "
            f"{', '.join(method.settings) or 'none'}: name some with --range, such as "
            "--range lr=1e-4:1e-1."
        )
    return space


def parsed(name: str, text: str, default: Any) -> Domain:
    """Return `LOW:HIGH` as a span, and `A,B,C` as choices, of a setting with this default."""
    try:
        if ":" not in text:
            return Choices(tuple(_choices(text, default)))
        ends = text.split(":")
        if len(ends) != 2:
            raise ValueError(f"{len(ends)} ends")
        low, high = map(float, ends)
        known = KNOWN.get(name)
        if isinstance(known, Span) and known.of_rest:
            if not high < 1:
                raise ValueError("the upper end must be below 1")
            return Span(float(f"{1 - high:.12g}"), float(f"{1 - low:.12g}"), of_rest=True)
        whole = isinstance(default, int) and not isinstance(default, bool)
        if whole and not (low.is_integer() and high.is_integer()):
            raise ValueError("both ends must be whole numbers")
        return Span(low, high, whole=whole)
    except ValueError as error:
        raise ValueError(
            f"Invalid --range {name}={text} ({error}). Must be LOW:HIGH with 0 < LOW < HIGH, such as "
            "lr=1e-4:1e-1, or values such as gamma=10,100,1000."
        ) from error


def _choices(text: str, default: Any) -> list[Any]:
    """The values between commas: numbers, true, false, null, or else words."""
    values: list[Any] = []
    for word in text.split(","):
        try:
            value = json.loads(word)
        except ValueError:
            value = word
        values.append(float(value) if isinstance(default, float) else value)
    if len(values) < 2 or len(set(values)) < len(values) or "" in values:
        raise ValueError("fewer than two values, or one of them twice")
    return values
