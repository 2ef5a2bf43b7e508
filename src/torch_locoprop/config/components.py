"""The variants, solvers and regularizers that names in a parameter group stand for.

Groups hold numbers and strings only, so that a state dict loads with ``weights_only=True``. A
user's own variant, solver or regularizer is remembered under a name, and the group holds the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from torch_locoprop.config.settings import SETTINGS
from torch_locoprop.paper.losses import LocalLoss
from torch_locoprop.paper.names import unknown
from torch_locoprop.paper.regularizers import L2, REGULARIZERS, Regularizer
from torch_locoprop.paper.targets import Target
from torch_locoprop.paper.variants import VARIANTS, Variant
from torch_locoprop.solvers import (
    SOLVERS,
    AveragedPreconditioned,
    Exact,
    FirstOrder,
    Preconditioned,
    Solver,
    Spectral,
)


class Components:
    """The built-in components and those that the user of one optimizer has given, by name."""

    def __init__(self) -> None:
        self._roles: dict[str, tuple[type, dict[str, Any]]] = {
            "variant": (Variant, dict(VARIANTS)),
            "solver": (Solver, dict(SOLVERS)),
            "regularizer": (Regularizer, dict(REGULARIZERS)),
        }

    def variant(self, group: Mapping[str, Any]) -> Variant:
        """Return the variant that a group names."""
        variant: Variant = self._find("variant", group["variant"])
        return variant

    def solver(self, group: Mapping[str, Any]) -> Solver:
        """Return the solver that a group names."""
        solver: Solver = self._find("solver", group["solver"])
        return solver

    def regularizer(self, group: Mapping[str, Any]) -> Regularizer:
        """Return the regularizer that a group names."""
        regularizer: Regularizer = self._find("regularizer", group["regularizer"])
        return regularizer

    def check(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Check all settings of a group and return it with every component replaced by its name."""
        named = {**group, **{role: self._name(role, group[role]) for role in self._roles}}
        for name, setting in SETTINGS.items():
            setting.check(name, group[name])
        self._check_together(named)
        return named

    def _check_together(self, group: Mapping[str, Any]) -> None:
        variant, solver = self.variant(group), self.solver(group)
        if group["solver"] == "adagrad" and not group["eps"] > 0:
            raise ValueError(
                f"Invalid eps={group['eps']}. Must be > 0: with solver='adagrad' it is the start "
                "of the accumulator that gradients are divided by."
            )
        if not solver.serves(variant.loss):
            served = [repr(name) for name, each in VARIANTS.items() if solver.serves(each.loss)]
            raise ValueError(
                f"Variant {variant.name!r} has no closed form for solver={group['solver']!r}. Use a "
                f"first-order solver, or variant={', '.join(served)}."
            )
        if solver.closed_form and type(self.regularizer(group)) not in (Regularizer, L2):
            raise ValueError(
                f"regularizer={group['regularizer']!r} needs a first-order solver, not "
                f"solver={group['solver']!r}."
            )
        if group["gram"] != "full":
            self._check_structure(group)
        if isinstance(solver, Spectral | AveragedPreconditioned):
            self._check_without_units(group)
        if isinstance(solver, Preconditioned | AveragedPreconditioned):
            self._check_unregularized(group)
        if isinstance(solver, Preconditioned):
            self._check_preconditioned(group)
        if isinstance(solver, AveragedPreconditioned) and group["local_steps"] != 1:
            raise ValueError(
                f"Invalid local_steps={group['local_steps']}. Must be 1 with "
                f"solver={group['solver']!r}, which averages one iteration over the batches. For more "
                "iterations, use solver='preconditioned'."
            )

    def _check_structure(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if a step of the group takes more of the inputs than XᵀX."""
        solver, variant = self.solver(group), self.variant(group)
        own = type(solver).solve in (FirstOrder.solve, Exact.solve, Spectral.solve)
        squared = not variant.loss.uses_transfer and variant.target.knows_first_gradient
        if not (own and squared) or self.regularizer(group).needs:
            raise ValueError(
                f"gram={group['gram']!r} needs a step that takes no more than XᵀX of the inputs: "
                "solver='spectral', or variant='locoprop-s' with solver='exact' or a first-order one. "
                f"Given: variant={group['variant']!r}, solver={group['solver']!r}, "
                f"regularizer={group['regularizer']!r}."
            )

    def _check_without_units(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for settings that a step of normalised length cannot follow.

        Refused settings depend on the scale of the loss, or need plain gradient steps between
        the normalised ones.
        """
        solver = type(self.solver(group)).__name__
        if group["gate"] or (group["cap"] is not None and group["cap_by"] == "backprop"):
            raise ValueError(
                "gate=True and cap_by='backprop' depend on gamma and on the scale of the loss, and "
                f"solver={group['solver']!r} does not. Leave them out, or use a first-order solver."
            )
        if group["every"] != 1:
            raise ValueError(
                f"Invalid every={group['every']} with solver={group['solver']!r}, all of whose steps "
                f"are alike. To renew XᵀX in every k-th step, pass solver={solver}(every=k)."
            )
        if self.variant(group).output_by_gradient_descent:
            raise ValueError(
                f"variant={group['variant']!r} takes a plain gradient step in the output layer, whose "
                "learning rate would be another one. Use a first-order solver or solver='exact'."
            )

    def _check_unregularized(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for a regularizer, which preconditioned steps do not take."""
        if type(self.regularizer(group)) is not Regularizer:
            raise ValueError(
                f"regularizer={group['regularizer']!r} needs another solver: "
                f"solver={group['solver']!r} solves problems without a regularizer."
            )

    def _check_preconditioned(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for settings that the preconditioned solver does not support."""
        if self.variant(group).output_by_gradient_descent or group["every"] != 1:
            raise ValueError(
                "solver='preconditioned' takes no plain gradient steps, whose learning rate would be "
                f"another one: variant={group['variant']!r} with every={group['every']} needs a "
                "first-order solver or solver='exact'."
            )
        if not group["lr"] <= 1:
            raise ValueError(
                f"Invalid lr={group['lr']}. Must be <= 1 with solver='preconditioned': it is the part "
                "of the way to the local solution that a step takes."
            )

    def _name(self, role: str, value: object) -> str:
        cls, known = self._roles[role]
        if value is None and role == "regularizer":
            return "none"
        if isinstance(value, str):
            if value not in known:
                raise ValueError(unknown(role, value, known))
            return value
        if not isinstance(value, cls):
            raise TypeError(
                f"Invalid {role}={value!r}. Expected one of {', '.join(known)}, or an instance of "
                f"torch_locoprop's {cls.__name__}."
            )
        if isinstance(value, Variant):
            _check_instance("target", value.target, Target)
            _check_instance("loss", value.loss, LocalLoss)
        return _remember(value, known)

    def _find(self, role: str, name: object) -> Any:
        """Return the component of a group's entry, which may have changed since it was checked."""
        cls, known = self._roles[role]
        if isinstance(name, str) and name in known:
            return known[name]
        if name is None or isinstance(name, str):
            return known[self._name(role, name)]
        raise TypeError(
            f"Invalid {role}={name!r} in a parameter group, which holds names: {', '.join(known)}. "
            f"A {cls.__name__} of your own is given when the optimizer, or the group, is made."
        )


def _check_instance(role: str, value: object, cls: type) -> None:
    if not isinstance(value, cls):
        raise TypeError(f"Invalid {role}={value!r} in a variant. Must be a {cls.__name__}.")


def _remember(value: Any, known: dict[str, Any]) -> str:
    """Return the name of a component; it is the same in every run that builds the same groups.

    A component equal to a known one shares its name. A dataclass is known by its parameters, so that a
    state dict is not loaded into one with others.
    """
    for name, other in known.items():
        if _same(value, other):
            return name
    plain = str(getattr(value, "name", type(value).__name__))
    base = repr(value) if is_dataclass(value) and not isinstance(value, Variant) else plain
    name, number = base, 1
    while name in known:
        number += 1
        name = f"{base}-{number}"
    known[name] = value
    return name


def _same(one: Any, other: Any) -> bool:
    """Return True if two components are of one class and have equal parameters."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if is_dataclass(one):
        return all(_same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if hasattr(one, "__dict__"):
        mine, theirs = vars(one), vars(other)
        return mine.keys() == theirs.keys() and all(_same(mine[k], theirs[k]) for k in mine)
    return bool(one == other)
