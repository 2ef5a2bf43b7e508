"""The constructor's signature and documentation, derived from the table of settings; its checks."""

from __future__ import annotations

import inspect
import textwrap
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

from torch import nn

from torch_locoprop.config.presets import PRESETS, resolved
from torch_locoprop.config.settings import SETTINGS, Settings
from torch_locoprop.paper.names import unknown

# The constructor's arguments that are no settings.
ARGUMENTS = (
    *("model", "preset", "transfers", "output_transfer", "loss_fn", "layers", "guards", "diagnose"),
    *("cuda_graph", "apply", "outer", "fallback", "param_groups"),
)

C = TypeVar("C", bound=type[Any])


def with_settings(cls: C) -> C:
    """Complete a class whose constructor takes ``**settings``.

    ``inspect.signature`` and ``help`` then show every setting, with its type and its value in the
    general preset. The lines ``{presets}`` and ``{settings}`` in the class's docstring are replaced by
    the presets and by the meaning of each setting.
    """
    signature, types = inspect.signature(cls), get_type_hints(Settings)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    settings = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=types[name]
        )
        for name, value in resolved({}).items()
        if name not in signature.parameters
    ]
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    whole = signature.replace(parameters=[first, *own, *settings])
    setattr(cls.__init__, "__signature__", whole)  # noqa: B010  # not of the class: subclasses inherit it
    if cls.__doc__ is not None:  # python -OO removes docstrings
        cls.__doc__ = cls.__doc__.replace("{settings}", _settings()).replace(
            "{presets}", _presets()
        )
    return cls


def check_arguments(
    model: object, transfers: object, diagnose: object, cuda_graph: object, settings: Iterable[str]
) -> None:
    """Raise ``TypeError`` for arguments of a wrong type, and for keywords that are no setting.

    Warn of a model in which all parameters are frozen.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"LocoProp takes the model itself, not {type(model).__name__}: the local problems need "
            "the layers. Pass the nn.Module, and param_groups= to train a part of it."
        )
    parameters = list(model.parameters())
    if parameters and not any(p.requires_grad for p in parameters):
        warnings.warn(
            "All parameters of the model are frozen: there is nothing to train. Call "
            "requires_grad_(True) on those that should be.",
            stacklevel=3,
        )
    if transfers is not None and not isinstance(transfers, Mapping):
        raise TypeError(
            "transfers= takes a dictionary from the names of modules to transfers, not "
            f"{type(transfers).__name__}."
        )
    for name, switch in (("diagnose", diagnose), ("cuda_graph", cuda_graph)):
        if not isinstance(switch, bool):
            raise TypeError(f"{name}= is True or False, not {switch!r}.")
    known = [*ARGUMENTS, *SETTINGS]
    for name in settings:
        if name not in SETTINGS:
            raise TypeError(unknown("argument of LocoProp", name, known))


def _presets() -> str:
    """Return the purpose of all presets as sentences of an entry of an ``Args`` section."""
    text = " ".join(f"``{name}``: {preset.purpose}" for name, preset in PRESETS.items())
    return textwrap.indent(textwrap.fill(text, width=91, break_on_hyphens=False), " " * 12).lstrip()


def _settings() -> str:
    """Return the meaning of all settings as entries of an ``Args`` section."""
    entries = [
        textwrap.fill(f"{name}: {setting.meaning}", width=95, subsequent_indent="    ")
        for name, setting in SETTINGS.items()
    ]
    return textwrap.indent("\n".join(entries), " " * 8).lstrip()
