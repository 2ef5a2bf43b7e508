"""The kinds of settings (numbers, counts, switches, choices), and the checks of their values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from torch_locoprop.paper.names import unknown


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Default and meaning of one setting, and which parts of a step depend on it."""

    default: Any
    meaning: str
    per_tensor: bool = False  # weight and bias of one layer may have different values
    in_plan: bool = True  # the setting decides what hooks record for the next step
    in_graph_key: bool = True  # a CUDA graph recorded with another value must not be replayed
    names_method: bool = False  # giving it without preset= starts from the paper's values

    def check(self, name: str, value: object) -> None:
        """Raise ``ValueError`` unless the value is allowed."""


@dataclass(frozen=True, kw_only=True)
class Number(Setting):
    """A real number in a range; it enters the solution only, so no plan depends on it."""

    above: float = 0.0
    may_equal: bool = True  # the lower bound itself is allowed
    below: float = math.inf
    optional: bool = False  # None is allowed
    in_plan: bool = False

    def check(self, name: str, value: object) -> None:
        if value is not None or not self.optional:
            check_number(name, value, self.above, self.may_equal, self.below)


@dataclass(frozen=True, kw_only=True)
class Count(Setting):
    """An integer of at least one."""

    optional: bool = False  # None is allowed

    def check(self, name: str, value: object) -> None:
        if value is None and self.optional:
            return
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"Invalid {name}={value!r}. Must be an integer >= 1.")


@dataclass(frozen=True, kw_only=True)
class Switch(Setting):
    """True or False."""

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, bool):
            raise ValueError(f"Invalid {name}={value!r}. Must be True or False.")


@dataclass(frozen=True, kw_only=True)
class Choice(Setting):
    """One of several names."""

    choices: tuple[str, ...]

    def check(self, name: str, value: object) -> None:
        if value not in self.choices:
            raise ValueError(unknown(name, value, self.choices))


@dataclass(frozen=True, kw_only=True)
class Component(Setting):
    """A variant, solver or regularizer, by name or as an object; ``components.py`` checks it."""


def check_number(name: str, value: object, above: float, may_equal: bool, below: float) -> None:
    """Raise ``ValueError`` unless ``above <= value < below``, or ``above < value`` if not may_equal."""
    bound = f"{'>=' if may_equal else '>'} {above:g}" + (
        f" and < {below:g}" if below < math.inf else ""
    )
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ValueError(f"Invalid {name}={value!r}. Must be a number {bound}.")
    number = float(number)
    inside = above <= number < below if may_equal else above < number < below
    if not inside or not math.isfinite(number):
        raise ValueError(f"Invalid {name}={value}. Must be finite and {bound}.")
