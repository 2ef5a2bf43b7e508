"""How a layer's local problem is formed and solved: decided once for each plan.

A plan is kept from step to step until a setting, or a layer's role in the model, changes. What the
passes record for it is set in ``requirements.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any

from torch_locoprop.config.components import Components
from torch_locoprop.config.groups import Group
from torch_locoprop.config.settings import PLAN_SETTINGS
from torch_locoprop.paper.regularizers import REGULARIZERS, Regularizer
from torch_locoprop.paper.targets import BackPropTarget
from torch_locoprop.paper.transfers import Linear
from torch_locoprop.paper.variants import VARIANTS, Variant
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.transfer_assignment import COMPILED, IN_PIECES, NOT_CALLED
from torch_locoprop.solvers import SOLVERS, FirstOrder, Solver


@dataclass(frozen=True)
class Method:
    """The components that form and solve one layer's problem."""

    variant: Variant
    solver: Solver
    regularizer: Regularizer
    local_steps: int

    @cached_property
    def is_backprop(self) -> bool:
        """True if the solution is the BackProp step: one plain iteration, with nothing added."""
        one = self.local_steps == 1 and type(self.solver) is type(SOLVERS["sgd"])
        free = self.regularizer is REGULARIZERS["none"]
        of_target = type(self.variant.target).first_gradient
        return one and free and of_target is BackPropTarget.first_gradient

    @cached_property
    def needs_fisher(self) -> Any:
        """The target or regularizer that needs a Fisher matrix; None if neither does."""
        parts = (self.variant.target, self.regularizer)
        return next((part for part in parts if "fisher" in part.needs), None)

    def as_backprop(self) -> Method:
        """Return one local iteration, for a layer with a gradient but no rows or no Fisher matrix."""
        solver = self.solver.without_rows() or SOLVERS["sgd"]
        return Method(VARIANTS["locoprop-s"], solver, REGULARIZERS["none"], local_steps=1)


@dataclass(frozen=True)
class LayerPlan:
    """What a layer's group asks for, and what the layer's role in the model makes of it."""

    asked: Variant  # the variant that the group names
    variant: Variant  # the variant that serves the layer
    note: str  # where the variant is not quite what was asked for
    regularizer: Regularizer  # that the group names
    method: Method  # how the layer's problem is solved if it has rows


class Plan:
    """The methods of all layers, for settings as they are now.

    A layer's method is decided at its first use and again only if the layer's role in the model
    turns out to be another one: its transfer is detected, it is the output, or something rules out
    a local problem.

    Args:
        groups: the groups of local problems.
        components: what the names in the groups stand for.

    Attributes:
        group_of: the group of each parameter.
        is_steady: True if a step needs of the layers what the step before needed, as long as settings
            and roles stay. Then the number of the step does not matter, nor the solver's state.
    """

    def __init__(self, groups: Iterable[Group], components: Components) -> None:
        self._groups, self._components = list(groups), components
        self.group_of = {p: group for group in self._groups for p in group["params"]}
        self._parameters, self._settings = self._parameters_now(), self._settings_now()
        self._layers: dict[LayerRecord, tuple[object, LayerPlan]] = {}
        self._required_for: list[object] | None = None  # roles that the passes record for
        self.is_steady = all(_is_steady(group, components) for group in self._groups)

    def is_current(self, groups: Sequence[Group]) -> bool:
        """Return True if these are the groups of the plan, and no setting has changed since.

        Args:
            groups: the optimizer's groups of local problems; a user may have replaced one.
        """
        same = len(groups) == len(self._groups) and all(map(is_, groups, self._groups))
        unchanged = same and self._settings == self._settings_now()
        return unchanged and self._parameters == self._parameters_now()

    def note_required(self, layers: Iterable[LayerRecord]) -> None:
        """Note that the layers record what this plan needs of them in their present roles."""
        self._required_for = [layer.role for layer in layers]

    def is_required(self, layers: Iterable[LayerRecord]) -> bool:
        """Return True if the layers already record what the next step of this plan needs of them."""
        return self.is_steady and self._required_for == [layer.role for layer in layers]

    def group(self, layer: LayerRecord) -> Group:
        """Return the group whose settings the layer's problem has: that of its weight."""
        return self.group_of[layer.given[0]]

    def of(self, layer: LayerRecord) -> LayerPlan:
        """Return the plan of one layer, for its present role in the model."""
        role = layer.role
        known = self._layers.get(layer)
        if known is None or known[0] != role:
            known = role, _layer_plan(layer, self.group(layer), self._components)
            self._layers[layer] = known
        return known[1]

    def method(self, layer: LayerRecord) -> Method:
        """Return how the layer's problem is solved if it has rows."""
        return self.of(layer).method

    def method_now(self, layer: LayerRecord) -> Method:
        """Return how the layer's problem is solved in this step, with the rows that were recorded."""
        method = self.of(layer).method
        rows = layer.has_rows if layer.shared_facts is None else layer.shared_facts.all_have_rows
        return method if rows else method.as_backprop()

    def has_curvature(self) -> bool:
        """Return True if a step is more than one iteration along the parameters' gradients."""
        return any(_has_curvature(group, self._components) for group in self._groups)

    def _settings_now(self) -> list[object]:
        return [group[name] for group in self._groups for name in PLAN_SETTINGS]

    def _parameters_now(self) -> list[int]:
        return [id(p) for group in self._groups for p in group["params"]]


def problems_before(group: Group) -> int:
    """Return how many local problems each layer of a group has had."""
    return int(-(-group["steps"] // group["every"]))


def is_ours(component: object) -> bool:
    """Return True if the class of a component is this library's; others may do anything."""
    return type(component).__module__.partition(".")[0] == __name__.partition(".")[0]


def is_quadratic(layer: LayerRecord, variant: Variant) -> bool:
    """Return True if the layer's local loss is quadratic in its pre-activations."""
    return variant.loss.is_quadratic(layer.transfer or Linear())


def _layer_plan(layer: LayerRecord, group: Group, components: Components) -> LayerPlan:
    asked, regularizer = components.variant(group), components.regularizer(group)
    variant, note = _effective_variant(asked, regularizer, layer)
    if variant.output_by_gradient_descent and layer.is_output:
        method = Method(variant, SOLVERS["sgd"], REGULARIZERS["none"], local_steps=1)
        return LayerPlan(asked, variant, note, regularizer, method)
    method = Method(variant, components.solver(group), regularizer, group["local_steps"])
    between = group["steps"] % group["every"] != 0
    if between or layer.obstacle:
        method = method.as_backprop()
    return LayerPlan(asked, variant, note, regularizer, method)


def _effective_variant(
    variant: Variant, regularizer: Regularizer, layer: LayerRecord
) -> tuple[Variant, str]:
    """Return the variant that serves a layer, and a note where it is not quite what was asked for."""
    if layer.obstacle:
        return VARIANTS["locoprop-s"], layer.obstacle
    known = layer.decided or layer.explicit or layer.note
    if variant.loss.uses_transfer and known and layer.transfer is None:
        return VARIANTS["locoprop-s"], layer.note
    if variant.output_by_gradient_descent and layer.is_output:
        return variant, "output layer: plain gradient descent"
    if layer.compiled and "fisher" in variant.target.needs | regularizer.needs:
        return variant, IN_PIECES
    if "v" in variant.target.needs and layer.compiled and layer.transfer is not None:
        return variant, "" if layer.transfer.strictly_increasing else COMPILED
    return variant, layer.note if layer.note == NOT_CALLED else ""


def _is_steady(group: Group, components: Components) -> bool:
    """Return True if what a step needs of a group's layers does not depend on the step's number."""
    solver = components.solver(group)
    first_order = isinstance(solver, FirstOrder)
    iterates = first_order and type(solver).use_of_rows is FirstOrder.use_of_rows
    every_row = group["every"] == 1 and group["max_rows"] is None
    return iterates and every_row and not _needs_fisher(group, components)


def _needs_fisher(group: Group, components: Components) -> bool:
    return "fisher" in components.variant(group).target.needs | components.regularizer(group).needs


def _has_curvature(group: Group, components: Components) -> bool:
    plain = group["local_steps"] == 1 and isinstance(components.solver(group), FirstOrder)
    return not plain or _needs_fisher(group, components)
