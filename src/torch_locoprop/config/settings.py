"""What may stand in a parameter group: its checks, and the components its names stand for.

Groups hold numbers and strings only, so that a state dict loads with ``weights_only=True``. A user's
own variant, solver or regularizer is remembered under its name; the group holds the name.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from torch_locoprop.paper.losses import LocalLoss
from torch_locoprop.paper.regularizers import L2, REGULARIZERS, Regularizer
from torch_locoprop.paper.targets import Target
from torch_locoprop.paper.variants import VARIANTS, Variant
from torch_locoprop.solvers import LOCAL_DECAYS, SOLVERS, Solver
from torch_locoprop.solvers.exact import Exact
from torch_locoprop.stepping.guards import CAPS

LOCAL_REDUCTIONS = ("sum", "mean")
LOCAL_PRODUCTS = ("full", "bf16")

# name: (lowest, whether it may be reached, the bound above, which may not)
_NUMBERS = {
    "lr": (0.0, True, math.inf),
    "gamma": (0.0, False, math.inf),
    "momentum": (0.0, True, 1.0),
    "decay": (0.0, True, 1.0),
    "eps": (0.0, True, math.inf),
    "weight_decay": (0.0, True, math.inf),
}

_COUNTS = ("local_steps", "every")
_SWITCHES = ("maximize", "gate")
_CHOICES = {
    "local_decay": LOCAL_DECAYS,
    "local_reduction": LOCAL_REDUCTIONS,
    "local_products": LOCAL_PRODUCTS,
    "cap_by": CAPS,
}


class Components:
    """The variants, solvers and regularizers that names stand for: built-in ones and the user's."""

    def __init__(self) -> None:
        self._roles: dict[str, tuple[type, dict[str, Any]]] = {
            "variant": (Variant, dict(VARIANTS)),
            "solver": (Solver, dict(SOLVERS)),
            "regularizer": (Regularizer, dict(REGULARIZERS)),
        }

    @property
    def settings(self) -> tuple[str, ...]:
        """Everything a group may override."""
        return (*_NUMBERS, "cap", "max_rows", *_COUNTS, *_SWITCHES, *_CHOICES, *self._roles)

    def variant(self, group: Mapping[str, Any]) -> Variant:
        variant: Variant = self._find("variant", group["variant"])
        return variant

    def solver(self, group: Mapping[str, Any]) -> Solver:
        solver: Solver = self._find("solver", group["solver"])
        return solver

    def regularizer(self, group: Mapping[str, Any]) -> Regularizer:
        regularizer: Regularizer = self._find("regularizer", group["regularizer"])
        return regularizer

    def check(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Check a whole group and return it with every component replaced by its name."""
        named = {**group, **{role: self._name(role, group[role]) for role in self._roles}}
        for name, (low, may_equal, high) in _NUMBERS.items():
            check_number(name, group[name], low, may_equal, high)
        if group["cap"] is not None:
            check_number("cap", group["cap"], 0.0, False, math.inf)
        for name in (*_COUNTS, *(["max_rows"] if group["max_rows"] is not None else [])):
            count = group[name]
            if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
                raise ValueError(f"Invalid {name}={count!r}. Must be an integer >= 1.")
        for name, choices in _CHOICES.items():
            if group[name] not in choices:
                raise ValueError(unknown(name, group[name], choices))
        for name in _SWITCHES:
            if not isinstance(group[name], bool):
                raise ValueError(f"Invalid {name}={group[name]!r}. Must be True or False.")
        self._check_together(named)
        return named

    def _check_together(self, group: Mapping[str, Any]) -> None:
        variant, solver = self.variant(group), self.solver(group)
        if group["solver"] == "adagrad" and not group["eps"] > 0:
            raise ValueError(
                f"Invalid eps={group['eps']}. Must be > 0: with solver='adagrad' it is the start "
                "of the accumulator that gradients are divided by."
            )
        if isinstance(solver, Exact):
            if not variant.loss.closed_form:
                raise ValueError(
                    f"Variant {variant.name!r} has no closed form: solver='exact' does not apply. "
                    "Use a first-order solver, or variant='locoprop-s', 'locoprop-m', 'natural-s' "
                    "or 'proxprop'."
                )
            if type(self.regularizer(group)) not in (Regularizer, L2):
                raise ValueError(
                    f"solver='exact' solves the problem with the L2 regularizer; "
                    f"regularizer={group['regularizer']!r} needs a first-order solver."
                )

    def _name(self, role: str, value: object) -> str:
        cls, known = self._roles[role]
        if value is None and role == "regularizer":
            return "none"
        if isinstance(value, str):
            if value not in known:
                raise ValueError(unknown(role, value, known))
            return value
        if not isinstance(value, cls):
            raise TypeError(
                f"Invalid {role}={value!r}. Expected one of {', '.join(known)}, or an instance of "
                f"torch_locoprop's {cls.__name__}."
            )
        if isinstance(value, Variant):
            _check_instance("target", value.target, Target)
            _check_instance("loss", value.loss, LocalLoss)
        return _remember(value, known)

    def _find(self, role: str, name: object) -> Any:
        """What a group's entry stands for, which may have been changed since it was checked."""
        cls, known = self._roles[role]
        if isinstance(name, str) and name in known:
            return known[name]
        if name is None or isinstance(name, str):
            return known[self._name(role, name)]
        raise TypeError(
            f"Invalid {role}={name!r} in a parameter group, which holds names: {', '.join(known)}. "
            f"A {cls.__name__} of your own is given when the optimizer, or the group, is made."
        )


def check_number(name: str, value: object, low: float, may_equal: bool, high: float) -> None:
    """Raise unless ``low <= value < high`` (``low < value`` if the bound may not be reached)."""
    bound = f"{'>=' if may_equal else '>'} {low:g}" + (
        f" and < {high:g}" if high < math.inf else ""
    )
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ValueError(f"Invalid {name}={value!r}. Must be a number {bound}.")
    number = float(number)
    inside = low <= number < high if may_equal else low < number < high
    if not inside or not math.isfinite(number):
        raise ValueError(f"Invalid {name}={value}. Must be finite and {bound}.")


def unknown(role: str, value: object, known: Iterable[str]) -> str:
    """The message for a name that nobody knows."""
    names = list(known)
    close = difflib.get_close_matches(str(value).lower(), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown {role} {value!r}.{hint} Known: {', '.join(names)}."


def _check_instance(role: str, value: object, cls: type) -> None:
    if not isinstance(value, cls):
        raise TypeError(f"Invalid {role}={value!r} in a variant. Must be a {cls.__name__}.")


def _remember(value: Any, known: dict[str, Any]) -> str:
    """The name under which an object is known; the same in every run that builds the same groups.

    An object equal to a known one shares its name. A dataclass is known by its parameters, so that a
    state dict is not loaded into one with others.
    """
    for name, other in known.items():
        if _same(value, other):
            return name
    plain = str(getattr(value, "name", type(value).__name__))
    base = repr(value) if is_dataclass(value) and not isinstance(value, Variant) else plain
    name, number = base, 1
    while name in known:
        number += 1
        name = f"{base}-{number}"
    known[name] = value
    return name


def _same(one: Any, other: Any) -> bool:
    """Whether two components are of one class and have equal parameters."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if is_dataclass(one):
        return all(_same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if hasattr(one, "__dict__"):
        mine, theirs = vars(one), vars(other)
        return mine.keys() == theirs.keys() and all(_same(mine[k], theirs[k]) for k in mine)
    return bool(one == other)
