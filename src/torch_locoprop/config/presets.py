"""Presets: named rows of settings, and which of them a call of the constructor starts from.

A preset is data: a name, what it is for, and its settings. Settings that a preset does not name have
the values of the table in ``settings.py``, which are those of the published LocoProp-M.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch_locoprop.config.settings import DEFAULTS, SETTINGS, with_guards
from torch_locoprop.paper.names import did_you_mean
from torch_locoprop.paper.variants import VARIANTS
from torch_locoprop.solvers import SOLVERS, Solver, Spectral

PresetName = Literal[
    "general",
    "spectral",
    "paper-s",
    "paper-m",
    "paper-pocoprop-s",
    "paper-pocoprop-m",
    "paper-natural-s",
    "paper-proxprop",
]


@dataclass(frozen=True)
class Preset:
    """A named row of settings.

    Args:
        name: the value of ``preset=``.
        purpose: what the preset is for.
        settings: the settings that differ from the published LocoProp-M.
    """

    name: str
    purpose: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_SPECTRAL = {
    "variant": "locoprop-s",
    "momentum": 0.9,
    "decay": 0.95,
    "local_steps": 1,
    "local_products": "bf16",
}
_PAPER_NAMES = {"locoprop-m": "paper-m", "locoprop-s": "paper-s"}

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "general",
            "any model and loss, with nothing tuned: the spectral step, shorter where gradients are "
            "noise and longer while they stay the same. Works at a constant learning rate and with a "
            "schedule.",
            {**_SPECTRAL, "solver": "general", "lr": 0.04},
        ),
        Preset(
            "spectral",
            "the lowest loss at the end of a schedule that decays to zero: the spectral step at its "
            "full length.",
            {**_SPECTRAL, "solver": "spectral", "lr": 0.015},
        ),
        *(
            Preset(
                _PAPER_NAMES.get(variant, f"paper-{variant}"),
                f"the paper's {variant} at the values published for locoprop-m.",
                {"variant": variant},
            )
            for variant in VARIANTS
        ),
    )
}
"""All presets by name."""

GENERAL = "general"
_ALWAYS_NAME_IT = ("variant", "solver", "gamma", "local_steps")


def resolved(given: Mapping[str, Any], preset: str | None = None) -> dict[str, Any]:
    """Return all settings: those given, then those of the solver, of the preset and of the table.

    Without ``preset``, a call starts from the paper's values if it gives ``variant``, ``solver``,
    ``gamma`` or ``local_steps``, or a value other than the default for a setting that only local
    iterations have. All other calls start from the general preset.

    Args:
        given: the settings that the user has given, with ``guards`` replaced.
        preset: the name of a preset; None chooses by the settings.

    Raises:
        ValueError: if there is no preset of this name.
    """
    if preset is not None and preset not in PRESETS:
        meant = str(preset).lower().removeprefix("paper-").replace("locoprop-", "paper-")
        close = did_you_mean(meant, PRESETS)  # for `locoprop-m` the message suggests `paper-m`
        raise ValueError(f"Unknown preset {preset!r}.{close} Known: {', '.join(PRESETS)}.")
    chosen = PRESETS[_implied(given) if preset is None else preset]
    return {**DEFAULTS, **chosen.settings, **_of_solver(given.get("solver")), **given}


@dataclass(frozen=True)
class Given:
    """The settings that the user has given to the constructor, and the name of a preset or None."""

    settings: Mapping[str, Any]
    preset: str | None

    def group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a parameter group with all settings; its own come before the constructor's.

        Raises:
            TypeError: if ``group`` is not a mapping.
        """
        if not isinstance(group, Mapping):
            raise TypeError(
                "param_groups= takes dictionaries with 'params' and settings of their own, not "
                f"{type(group).__name__}."
            )
        own = with_guards(group)
        preset = own.pop("preset", self.preset)
        return resolved({**self.settings, **own}, preset)


def told_unused(given: Mapping[str, Any], solver: Solver, name: str) -> str:
    """Return a sentence that names settings which have no effect; empty if there are none.

    Args:
        given: the settings that the user has given; those with the value of the default do not count.
        solver: the solver.
        name: the name of the solver.
    """
    unused = [n for n, value in given.items() if n in solver.ignores and value != DEFAULTS[n]]
    verb = "has" if len(unused) == 1 else "have"
    return f"{', '.join(unused)} {verb} no effect with solver={name!r}." if unused else ""


def warn_of_unused(given: Mapping[str, Any], solver: Solver, name: str) -> None:
    """Warn of settings that the user has given and that the solver, of this name, does not use."""
    told = told_unused(given, solver, name)
    if told and solver.warns_of_ignored:
        warnings.warn(told, stacklevel=3)


def _of_solver(solver: object) -> Mapping[str, Any]:
    """Return the settings that a solver of the user's choice starts from."""
    solver = SOLVERS.get(solver) if isinstance(solver, str) else solver
    return solver.defaults if isinstance(solver, Solver) else {}


def _implied(given: Mapping[str, Any]) -> str:
    solver = given.get("solver")
    if isinstance(solver, Spectral) or solver in ("spectral", "general"):
        return "general" if solver == "general" else "spectral"
    for name, value in given.items():
        names_method = name in SETTINGS and SETTINGS[name].names_method
        if names_method and (name in _ALWAYS_NAME_IT or value != DEFAULTS[name]):
            return _PAPER_NAMES["locoprop-m"]
    return GENERAL
