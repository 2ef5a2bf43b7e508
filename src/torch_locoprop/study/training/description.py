"""Descriptions of runs and searches: JSON files that state what a folder contains."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class RunError(RuntimeError):
    """A folder does not fit the run or search; the message says what to do."""


def read_description(path: Path, kind: str, needed: Mapping[str, type]) -> dict[str, Any]:
    """Return the content of a description.

    Args:
        path: The file.
        kind: ``run`` or ``search``, for error messages.
        needed: The required entries and their types.

    Raises:
        RunError: If the file is not such a description.
    """
    try:
        content = dict(json.loads(path.read_text()))
        for name, expected in needed.items():
            if name not in content:
                raise ValueError(f"{name} is missing")
            if not isinstance(content[name], expected):
                raise ValueError(f"{name} is {content[name]!r}, not an object")
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is not the description of a {kind} ({error}).") from error
    return content


def differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ between a stored description and the one expected."""
    return [name for name in {**there, **here} if there.get(name) != here.get(name)]


def differences(there: Mapping[str, Any], here: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the stored and the expected value of each name, for error messages."""
    return ", ".join(
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} here" for name in names
    )
