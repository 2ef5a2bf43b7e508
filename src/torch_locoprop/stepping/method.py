"""How a layer's local problem is formed and solved: decided once for each plan of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn

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

    @property
    def is_first_order(self) -> bool:
        """True if the solver iterates along gradients of the local loss."""
        return isinstance(self.solver, FirstOrder)

    @property
    def is_backprop(self) -> bool:
        """True if the solution is the BackProp step: one plain iteration, with nothing added."""
        one = self.local_steps == 1 and type(self.solver) is type(SOLVERS["sgd"])
        free = self.regularizer is REGULARIZERS["none"]
        of_target = type(self.variant.target).first_gradient
        return one and free and of_target is BackPropTarget.first_gradient

    @property
    def needs_fisher(self) -> Any:
        """The target or regularizer that needs a Fisher matrix; None if neither does."""
        parts = (self.variant.target, self.regularizer)
        return next((part for part in parts if "fisher" in part.needs), None)

    def as_backprop(self) -> Method:
        """Return one local iteration, for a layer with a gradient but no rows or no Fisher matrix."""
        solver = self.solver if self.is_first_order else SOLVERS["sgd"]
        return Method(VARIANTS["locoprop-s"], solver, REGULARIZERS["none"], local_steps=1)


class Plan:
    """The methods of one step, for settings as they are now.

    A layer's method is decided at its first use and again only if the layer's role in the model
    turns out to be another one: its transfer is detected, it is the output, or something rules out
    a local problem.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        group_of: Mapping[nn.Parameter, Group],
        components: Components,
    ) -> None:
        self._groups, self._group_of, self._components = list(groups), group_of, components
        self._settings = self._current()
        self._methods: dict[LayerRecord, tuple[object, Method]] = {}

    def is_current(self, groups: Sequence[Group]) -> bool:
        """Return True if these are the groups of the plan, and no setting has changed since.

        Args:
            groups: the optimizer's groups of local problems; a user may have replaced one.
        """
        same = len(groups) == len(self._groups) and all(map(is_, groups, self._groups))
        return same and self._settings == self._current()

    def group(self, layer: LayerRecord) -> Group:
        """Return the group whose settings the layer's problem has: that of its weight."""
        return self._group_of[layer.given[0]]

    def method(self, layer: LayerRecord) -> Method:
        """Return how the layer's problem is solved if it has rows."""
        role = layer.role
        known = self._methods.get(layer)
        if known is None or known[0] != role:
            known = role, _method(layer, self.group(layer), self._components)
            self._methods[layer] = known
        return known[1]

    def method_now(self, layer: LayerRecord) -> Method:
        """Return how the layer's problem is solved in this step, with the rows that were recorded."""
        method = self.method(layer)
        rows = layer.has_rows if layer.shared_facts is None else layer.shared_facts.all_have_rows
        return method if rows else method.as_backprop()

    def asked_variant(self, layer: LayerRecord) -> Variant:
        """Return the variant that the layer's group names, whether or not it can serve the layer."""
        return self._components.variant(self.group(layer))

    def regularizer(self, layer: LayerRecord) -> Regularizer:
        """Return the regularizer that the layer's group names."""
        return self._components.regularizer(self.group(layer))

    def has_curvature(self) -> bool:
        """Return True if a step is more than one iteration along the parameters' gradients."""
        return any(_has_curvature(group, self._components) for group in self._groups)

    def _current(self) -> list[object]:
        return [group[name] for group in self._groups for name in PLAN_SETTINGS]


def effective_variant(variant: Variant, layer: LayerRecord) -> tuple[Variant, str]:
    """Return the variant that serves a layer, and a note where it is not quite what was asked for."""
    if layer.obstacle:
        return VARIANTS["locoprop-s"], layer.obstacle
    known = layer.decided or layer.explicit or layer.note
    if variant.loss.uses_transfer and known and layer.transfer is None:
        return VARIANTS["locoprop-s"], layer.note
    if variant.output_by_gradient_descent and layer.is_output:
        return variant, "output layer: plain gradient descent"
    if "fisher" in layer.needs and layer.compiled:
        return variant, IN_PIECES
    if "v" in variant.target.needs and layer.compiled and layer.transfer is not None:
        return variant, "" if layer.transfer.strictly_increasing else COMPILED
    return variant, layer.note if layer.note == NOT_CALLED else ""


def problems_before(group: Group) -> int:
    """Return how many local problems each layer of a group has had."""
    return int(-(-group["steps"] // group["every"]))


def is_quadratic(layer: LayerRecord, variant: Variant) -> bool:
    """Return True if the layer's local loss is quadratic in its pre-activations."""
    return variant.loss.is_quadratic(layer.transfer or Linear())


def _method(layer: LayerRecord, group: Group, components: Components) -> Method:
    variant, _ = effective_variant(components.variant(group), layer)
    if variant.output_by_gradient_descent and layer.is_output:
        return Method(variant, SOLVERS["sgd"], REGULARIZERS["none"], local_steps=1)
    method = Method(
        variant, components.solver(group), components.regularizer(group), group["local_steps"]
    )
    between = group["steps"] % group["every"] != 0
    return method.as_backprop() if between or layer.obstacle else method


def _has_curvature(group: Group, components: Components) -> bool:
    needs = components.variant(group).target.needs | components.regularizer(group).needs
    plain = group["local_steps"] == 1 and isinstance(components.solver(group), FirstOrder)
    return not plain or "fisher" in needs
