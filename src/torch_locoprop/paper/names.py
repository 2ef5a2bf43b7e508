"""The error message for an unknown name, with the closest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(role: str, value: object, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the closest known one."""
    names = list(known)
    return f"Unknown {role} {value!r}.{did_you_mean(value, names)} Known: {', '.join(names)}."


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """Return a sentence, after a space, with the closest known name; empty if none is close."""
    close = difflib.get_close_matches(str(value).lower(), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
