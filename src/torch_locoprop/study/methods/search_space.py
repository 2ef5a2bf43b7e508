"""Ranges in which a search looks for settings, and those that all methods share.

A space maps names of settings to a :class:`Span` or :class:`Choices`. The ranges that all methods share
are those of the paper's Tables 3 and 5. Ranges of single methods are in their records;
``torch_locoprop.study.tuning.spaces`` puts both together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """A range that is searched log-uniformly.

    Args:
        low: The lower end, above 0.
        high: The upper end.
        of_rest: The range is of ``1 − setting``, for averages that are close to one.
        whole: Only integers are searched.
    """

    low: float
    high: float
    of_rest: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise ValueError("the lower end must be above 0 and below the upper end")
        if self.of_rest and self.high > 1:
            raise ValueError("the setting must be at least 0 and below 1")

    @property
    def ends(self) -> tuple[Any, ...]:
        """The setting at either end."""
        return self.setting(self.low), self.setting(self.high)

    def setting(self, number: float) -> float:
        """Return the setting for a number of the span."""
        if self.whole:
            return int(number)
        return 1 - number if self.of_rest else number

    def to_dict(self) -> dict[str, Any]:
        """Return the span as a dictionary that JSON can store."""
        kind = "one_minus" if self.of_rest else "whole" if self.whole else "log"
        return {kind: [self.low, self.high]}


@dataclass(frozen=True)
class Choices:
    """A few values to choose from."""

    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, ...]:
        """All values."""
        return self.values

    def to_dict(self) -> dict[str, Any]:
        """Return the choices as a dictionary that JSON can store."""
        return {"choices": list(self.values)}


Domain = Span | Choices
Space = dict[str, Domain]

AVERAGE = Span(1e-3, 0.1, of_rest=True)
SHORT_AVERAGE = Span(1e-2, 0.2, of_rest=True)

SHARED: Space = {
    "lr": Span(1e-7, 0.1),
    "gamma": Choices((10.0, 100.0, 500.0, 1000.0, 2000.0, 3000.0, 5000.0)),
    "momentum": AVERAGE,
    "decay": AVERAGE,
    "eps": Span(1e-10, 1e-5),
    "damping": Span(1e-10, 0.1),
}
"""The ranges of the paper's Table 3 (first-order methods) and Table 5 (LocoProp).

They are equal in both tables: η is ``lr``, 1 − β₁ and 1 − β₂ are searched for ``momentum`` and
``decay``, ε is ``eps``. Only Table 5 has γ. ``damping`` is the ε of Table 4 (Shampoo and K-FAC), whose
wider ranges of η and ε are in the records of these methods.
"""


def from_dict(values: Mapping[str, Any]) -> Domain:
    """Return the span or choices that ``to_dict`` stored.

    Raises:
        ValueError: If ``values`` is not such a dictionary.
    """
    try:
        ((kind, content),) = values.items()
        if kind == "choices":
            return Choices(tuple(content))
        low, high = content
        return Span(low, high, of_rest=kind == "one_minus", whole=kind == "whole")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{values!r} is not the range of a setting ({error}).") from error
