"""The record of one method, and the registry of all records.

A record holds every fact about a method that the rest of the study needs: how its optimizer is built,
its settings, and how it is named, drawn, searched and measured. The records themselves are in the other
files of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import util
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torch_locoprop.paper.names import unknown
from torch_locoprop.study.methods.search_space import Space
from torch_locoprop.study.methods.step_cost import StepCost
from torch_locoprop.study.methods.task_settings import TaskSettings
from torch_locoprop.study.models import architectures

Settings = Mapping[str, Any]
Build = Callable[[nn.Module, Settings], Optimizer]

TUNED = "tuned on mnist"
"""Origin of settings found by a search on MNIST: tanh, the standard model, batches of 1000."""

UNTUNED = "untuned"
"""Origin of settings that no search has looked at."""

FALLBACK_COLOURS = ("#555555", "#9c755f", "#8f8580", "#5d9a93", "#e15759", "#499894")
"""Colours of methods whose record names none, and of methods that are not registered."""

FALLBACK_MARKER = "."
"""The marker of methods whose record names none, and of methods that are not registered."""


@dataclass(frozen=True)
class EqualBudgets:
    """The part of a method in the study of equal budgets.

    Args:
        place: Its place in the order in which methods are started; the lowest is first.
        every: The method takes part as ``name@every``; 0 if as ``name``.
        strict: On a GPU its matrix products are in strict float32, as in the method's other results.
    """

    place: int
    every: int = 0
    strict: bool = False


@dataclass(frozen=True)
class Method:
    """One method of the study.

    A method with a setting ``every`` also answers to ``name@k``: the same method with ``every=k``.

    Args:
        name: What users type; no ``@``.
        build: ``build(model, settings)`` returns the optimizer. ``settings`` are all settings of the
            method and ``weight_decay``, which is decoupled, spares biases and is the same for all
            methods.
        settings: The settings with their defaults.
        source: Where the defaults come from, such as ``"tuned on mnist, 32 trials"``.
        label: The name in figures; by default ``name``.
        colour: The colour in figures and reports, as ``#rrggbb``; by default one of
            ``FALLBACK_COLOURS``, chosen by the name. LocoProp's methods are blue or blue-green, and
            its spectral step at full length is nearly black. First-order methods have warm colours.
            Dark enough to be seen on white: a contrast of at least 3.
        marker: The mark on its lines in figures, as matplotlib names it, so that a line is
            recognised without its colour. No other method has it; ``X`` marks diverged runs.
        space: Where settings are searched, if not in the ranges that all methods share
            (``search_space.SHARED``).
        packages: Optional packages that ``build`` imports.
        install: The command that installs ``packages``.
        population: The method as a local problem, so that many settings can be trained together as
            one batched model: ``variant``, and of ``solver``, ``local_steps``, ``local_decay``,
            ``local_reduction`` and ``regularizer`` those that are not settings of the method. None
            if the method is no local problem.
        matrix_update: The class of ``training.matrix_updates`` that trains many settings together as
            one batched model, if the method is no local problem; empty if there is none.
        cost: Its row of the paper's Table 1, if it has one. Compared methods with a row are in the
            table of costs.
        first_steps: How many first steps of a run cost more than later ones.
        whole_batch: The optimizer needs the rows of the whole batch in one process.
        compared: Draw the method in all figures that compare methods, beside those of the paper.
        tasks: Settings on a task of the paper, or for a number of local iterations
            (``task_settings.iterations``), where the defaults do not fit.
        quick: Its settings in quick figures, which have small models and few images; by default those
            of ``settings``.
        quick_tasks: Settings on a task of the quick figures, where ``quick`` does not fit.
        ends_in_frame: Figures show where its lines end even if they end far above the others.
        equal_budgets: How it takes part in the study of equal budgets; None if only on request.
    """

    name: str
    build: Build
    settings: dict[str, Any]
    source: str
    label: str = ""
    colour: str = ""
    marker: str = ""
    space: Space = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    install: str = ""
    population: Settings | None = None
    matrix_update: str = ""
    cost: StepCost | None = None
    first_steps: int = 0
    whole_batch: bool = False
    compared: bool = False
    tasks: Mapping[str, TaskSettings] = field(default_factory=dict)
    quick: Settings = field(default_factory=dict)
    quick_tasks: Mapping[str, Settings] = field(default_factory=dict)
    ends_in_frame: bool = False
    equal_budgets: EqualBudgets | None = None

    def resolve(self, given: Settings) -> dict[str, Any]:
        """Return all settings: ``given`` in the types of the defaults, and the other defaults.

        Raises:
            ValueError: If a setting is unknown, or contradicts the ``@k`` of the name.
        """
        for name in given:
            if name not in self.settings:
                raise ValueError(unknown(f"setting of {self.name}", name, self.settings))
        base, at, every = self.name.partition("@")
        if at and given.get("every", int(every)) != int(every):
            raise ValueError(
                f"{self.name} renews every {every} steps, and every={given['every']} contradicts "
                f"it. Use {base}@{given['every']}."
            )
        typed = {name: _in_type_of(self.settings[name], value) for name, value in given.items()}
        return {**self.settings, **typed}

    def check(self, settings: Settings) -> None:
        """Build the optimizer of a small model, so that bad settings raise before any work is done.

        Raises:
            ValueError: If the optimizer refuses a setting.
            ImportError: If a package is missing.
        """
        self.build(architectures.build("3-2"), settings)

    @property
    def missing_package(self) -> str:
        """A sentence on the package that the method needs and that is missing; empty if none is."""
        for package in self.packages:
            if util.find_spec(package) is None:
                return f"needs {self.install or f'the package {package}'}"
        return ""


_RECORDS: dict[str, Method] = {}


def register(method: Method) -> None:
    """Add the record of a method.

    Raises:
        ValueError: If the name is taken, or contains an ``@``.
    """
    if method.name in _RECORDS:
        raise ValueError(f"There is a method {method.name!r} already. Choose another name.")
    if "@" in method.name:
        raise ValueError(f"Invalid name={method.name!r}. An @ is reserved for the setting every.")
    _RECORDS[method.name] = method


def names() -> tuple[str, ...]:
    """Return the names of all methods, in alphabetical order and without ``@k``."""
    return tuple(sorted(_RECORDS))


def in_equal_budgets() -> tuple[str, ...]:
    """Return the methods of the study of equal budgets, with their ``@k``, in order of their places."""
    places = [
        (own.place, f"{name}@{own.every}" if own.every else name)
        for name, method in _RECORDS.items()
        if (own := method.equal_budgets) is not None
    ]
    return tuple(name for _, name in sorted(places))


def get(name: str) -> Method:
    """Return the record of a method.

    Args:
        name: A registered name, or ``name@k`` for a method with the setting ``every``.

    Raises:
        ValueError: If there is no such method.
    """
    base, at, every = name.partition("@")
    if base not in _RECORDS:
        raise ValueError(unknown("method", name, names()))
    method = _RECORDS[base]
    if not at:
        return method
    if "every" not in method.settings:
        raise ValueError(f"Unknown method {name!r}: {base} has no setting every, so it has no @k.")
    if not every.isdecimal() or int(every) < 1:
        raise ValueError(f"Unknown method {name!r}. The @ must be followed by an integer >= 1.")
    return replace(
        method, name=f"{base}@{int(every)}", settings={**method.settings, "every": int(every)}
    )


def label(name: str) -> str:
    """Return the name of a method as figures write it, with its ``@k``.

    Runs of methods that are not registered here can be drawn too: their label is their name.
    """
    base, at, every = name.partition("@")
    own = _RECORDS[base].label if base in _RECORDS else ""
    return f"{own or base}{at}{every}"


def colour(name: str) -> str:
    """Return the colour of a method as ``#rrggbb``, the same for every ``@k``."""
    base = name.partition("@")[0]
    own = _RECORDS[base].colour if base in _RECORDS else ""
    return own or FALLBACK_COLOURS[sum(map(ord, base)) % len(FALLBACK_COLOURS)]


def marker(name: str) -> str:
    """Return the marker of a method as matplotlib names it, the same for every ``@k``."""
    base = name.partition("@")[0]
    own = _RECORDS[base].marker if base in _RECORDS else ""
    return own or FALLBACK_MARKER


def _in_type_of(default: Any, value: Any) -> Any:
    """Return 10.0 for 10 where the default is a float, so that equal settings compare equal."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, float) and number:
        return float(value)
    if isinstance(default, int) and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
