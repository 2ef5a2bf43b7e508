"""Values that the shell completes: names of methods, settings, data sets, models and figures.

The shell calls these functions with the beginning of a word. `locoprop --install-completion` sets the
shell up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer

from torch_locoprop.study import methods
from torch_locoprop.study.data import datasets
from torch_locoprop.study.equal_budgets.study import TASKS as TASK_NAMES
from torch_locoprop.study.figures import catalog
from torch_locoprop.study.models import architectures
from torch_locoprop.study.training import config, schedules

Complete = Callable[[str], list[str]]


def _one_of(known: Iterable[str]) -> Complete:
    return lambda incomplete: [name for name in known if name.startswith(incomplete)]


DATASETS = _one_of(datasets.NAMES)
MODELS = _one_of(architectures.PRESETS)
TRANSFERS = _one_of(architectures.SUITABLE)
SCHEDULES = _one_of(schedules.NAMES)
PRECISIONS = _one_of(config.PRECISIONS)
DEVICES = _one_of(config.DEVICES)
FIGURES = _one_of(("all", *catalog.NAMES))
TASKS = _one_of(TASK_NAMES)


def method_names(incomplete: str) -> list[str]:
    """Return the methods that begin with a text, those that a script registered too."""
    return [name for name in methods.names() if name.startswith(incomplete)]


def settings(context: typer.Context, incomplete: str) -> list[str]:
    """Return the settings, as `KEY=`, of the method that the command line names so far."""
    name = context.params.get("method") or "locoprop-m"
    try:
        found = methods.get(name).settings
    except ValueError:
        return []
    return [f"{setting}=" for setting in found if setting.startswith(incomplete)]


def settings_of_several(context: typer.Context, incomplete: str) -> list[str]:
    """Return the settings, as `METHOD.KEY=`, of the methods that are compared."""
    found = []
    for name in context.params.get("names") or context.args:
        try:
            found += [f"{name}.{setting}=" for setting in methods.get(name).settings]
        except ValueError:
            continue
    return [text for text in found if text.startswith(incomplete)]
