"""Settings of a method where its defaults do not fit: on a task, for a number of iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TaskSettings:
    """Settings of a method on one task, for one number of local iterations, or with one solver.

    Args:
        settings: The settings that differ from the method's defaults.
        source: Where they come from, such as ``"the best of three rates for this model"``.
    """

    settings: Mapping[str, Any]
    source: str = ""


def iterations(local_steps: int) -> str:
    """Return the key of a record's settings for a number of local iterations, such as ``"T = 5"``."""
    return f"T = {local_steps}"
