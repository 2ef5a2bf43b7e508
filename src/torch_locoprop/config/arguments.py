"""The constructor's signature and documentation, derived from the table of settings."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any, TypeVar

from torch_locoprop.config.settings import SETTINGS

C = TypeVar("C", bound=type[Any])


def with_settings(cls: C) -> C:
    """Complete a class whose constructor takes ``**settings``.

    ``inspect.signature`` and ``help`` then show every setting with its default, and the line
    ``{settings}`` in the class's docstring is replaced by the meaning of each.
    """
    signature = inspect.signature(cls)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=setting.default)
        for name, setting in SETTINGS.items()
        if name not in signature.parameters
    ]
    setattr(cls, "__signature__", signature.replace(parameters=[*own, *settings]))  # noqa: B010
    if cls.__doc__ is not None:  # which python -OO removes
        cls.__doc__ = cls.__doc__.replace("{settings}", _documentation())
    return cls


def _documentation() -> str:
    """Return the meaning of all settings as entries of an ``Args`` section."""
    entries = [
        textwrap.fill(f"{name}: {setting.meaning}", width=95, subsequent_indent="    ")
        for name, setting in SETTINGS.items()
    ]
    return textwrap.indent("\n".join(entries), " " * 8).lstrip()
