"""The methods that the study compares: one record each, found by name.

A file of this package holds one family of methods and registers a record for each of them. Every file
is imported here, so a new method is a new file and nothing else. A script can also register a method
of its own:

    import torch
    from torch_locoprop.study import methods

    def build(model, settings):
        return torch.optim.SGD(model.parameters(), **settings)

    methods.register(methods.Method("mine", build, {"lr": 0.1}, source="untuned"))

If the script ends in ``torch_locoprop.study.cli.main.main()``, it is the command line with this method:
``python mine.py compare mine adam``.

How figures draw methods is in ``figures``; how their settings are searched is in ``tuning``.
"""

from importlib import import_module
from pkgutil import iter_modules

from torch_locoprop.study.methods.record import (
    TUNED,
    UNTUNED,
    Build,
    EqualBudgets,
    Method,
    Settings,
    colour,
    get,
    in_equal_budgets,
    label,
    marker,
    names,
    register,
)
from torch_locoprop.study.methods.search_space import Choices, Span
from torch_locoprop.study.methods.step_cost import StepCost
from torch_locoprop.study.methods.task_settings import TaskSettings, iterations

__all__ = [
    "TUNED",
    "UNTUNED",
    "Build",
    "Choices",
    "EqualBudgets",
    "Method",
    "Settings",
    "Span",
    "StepCost",
    "TaskSettings",
    "colour",
    "get",
    "import_all",
    "in_equal_budgets",
    "iterations",
    "label",
    "marker",
    "names",
    "register",
]


def import_all() -> None:
    """Import every file of this package, so that each registers its methods."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")


import_all()
