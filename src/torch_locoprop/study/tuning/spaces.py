"""The space in which a method's settings are searched, and how a user narrows it.

    from torch_locoprop.study import methods
    from torch_locoprop.study.tuning import spaces

    space = spaces.of(methods.get("adam"), ranges={"lr": "1e-4:1e-2"}, fixed={"eps": 1e-8})

A space maps names of settings to a ``Span`` or ``Choices``. The ranges are in
``torch_locoprop.study.methods``: those that all methods share in ``search_space.SHARED``, others in the
record of the method.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch_locoprop.paper.names import unknown
from torch_locoprop.solvers import SOLVERS
from torch_locoprop.study.methods import Method
from torch_locoprop.study.methods.search_space import SHARED, Choices, Domain, Space, Span


def of(
    method: Method,
    *,
    ranges: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> Space:
    """Return the space of a method, by default that of the paper's Tables 3 to 5 if they have one.

    Args:
        method: The record of the method.
        ranges: Ranges that replace those of the method, in the format of `parsed`.
        fixed: Settings that are not searched, with their values.

    Raises:
        ValueError: If a setting is unknown or a range is invalid, or if no setting is left to search.
    """
    ranges, fixed = ranges or {}, fixed or {}
    for name in (*ranges, *fixed):
        if name not in method.settings:
            raise ValueError(unknown(f"setting of {method.name}", name, method.settings))
    for name in ranges:
        if name in fixed:
            raise ValueError(f"{name} has a range and a value. Give either --range or --set.")
    space = known(method, {**method.settings, **fixed}.get("solver"))
    space = {name: domain for name, domain in space.items() if name not in fixed}
    space |= {name: parsed(name, text, method.settings[name]) for name, text in ranges.items()}
    if not space:
        raise ValueError(
            f"No setting of {method.name} is left to tune. Its settings are "
            f"{', '.join(method.settings) or 'none'}. Give ranges for some, such as "
            "--range lr=1e-4:1e-1."
        )
    return space


def known(method: Method, solver: Any = None) -> Space:
    """Return the ranges of those settings that have one and that the local solver uses."""
    ranges = {**SHARED, **method.space}
    unused = SOLVERS[solver].ignores if solver in SOLVERS else ()
    used = [name for name in method.settings if name not in unused]
    return {name: ranges[name] for name in used if name in ranges}


def parsed(name: str, text: str, default: Any) -> Domain:
    """Return the range that a text describes: `LOW:HIGH` is a span, `A,B,C` are choices.

    Args:
        name: The setting.
        text: The range.
        default: The default of the setting, whose type the values get.

    Raises:
        ValueError: If the text is not a range.
    """
    try:
        if ":" not in text:
            return Choices(tuple(_choices(text, default)))
        ends = text.split(":")
        if len(ends) != 2:
            raise ValueError(f"{len(ends)} ends")
        low, high = map(float, ends)
        shared = SHARED.get(name)
        if isinstance(shared, Span) and shared.of_rest:
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
    """Return the values between commas: numbers, true, false and null as in JSON, or words."""
    values: list[Any] = []
    for word in text.split(","):
        try:
            value = json.loads(word)
        except ValueError:
            value = word
        values.append(float(value) if isinstance(default, float) else value)
    if len(values) < 2 or len(set(values)) < len(values) or "" in values:
        raise ValueError("choices must be two or more different values")
    return values
