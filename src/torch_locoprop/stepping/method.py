"""How a layer's local problem is formed and solved: decided once for each plan.

A plan is kept from step to step until a setting changes. What the forward and backward pass record for
a plan is set in ``requirements.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any

from torch import Tensor

from torch_locoprop.config.components import Components
from torch_locoprop.config.groups import Group
from torch_locoprop.config.settings import PLAN_SETTINGS
from torch_locoprop.paper.gram import FULL, RowUse, Structure
from torch_locoprop.paper.regularizers import REGULARIZERS, Regularizer
from torch_locoprop.paper.targets import BackPropTarget
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.paper.transfers import Linear
from torch_locoprop.paper.variants import VARIANTS, Variant
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.transfer_assignment import COMPILED, IN_PIECES, NOT_CALLED
from torch_locoprop.solvers import SOLVERS, FirstOrder, Solver

# A count of a layer, 0 or 1: the layer was absent from a step in which its solver renews what it keeps.
MISSED = "missed"


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
    """The variant that a layer's group names, and how the layer's problem is solved in its role."""

    asked: Variant  # the variant that the group names
    variant: Variant  # the variant that serves the layer
    note: str  # why the variant is not the one that was asked for; empty if it is
    regularizer: Regularizer  # the regularizer that the group names
    method: Method  # how the layer's problem is solved if it has rows
    needs_output: bool  # the step uses the pre-activations of the forward pass
    needs_rows: bool  # all rows: p.grad and XᵀX are not enough
    rows_are_steady: bool  # the solver needs the same of the rows in every step
    gram_serves: bool  # XᵀX can replace the rows: the local loss is quadratic


class Plan:
    """The methods of all layers, for settings as they are now.

    A layer's method is decided at its first use, and again only if the layer's role in the model turns
    out to be another one (its transfer is detected, it is the output, or something rules out a local
    problem), or between the steps with local problems if ``every`` is larger than 1.

    Args:
        groups: the groups of local problems.
        components: what the names in the groups stand for.

    Attributes:
        group_of: the group of each parameter.
        is_steady: True if layers and hooks record the same in every step as long as settings and roles
            stay, but for what :meth:`use_of_rows` returns.
    """

    def __init__(self, groups: Iterable[Group], components: Components) -> None:
        self._groups, self._components = list(groups), components
        self.group_of = {p: group for group in self._groups for p in group["params"]}
        self._parameters, self._settings = parameters_of(self._groups), _settings_of(self._groups)
        self._layers: dict[LayerRecord, tuple[object, LayerPlan]] = {}
        self._row_uses: dict[LayerRecord, tuple[object, RowUse | None]] = {}
        self._required_for: list[object] | None = None  # roles that the passes record for
        self.is_steady = all(_is_steady(group, components) for group in self._groups)

    def is_current(self, groups: Sequence[Group]) -> bool:
        """Return True if these are the groups of the plan, and no setting has changed since.

        Args:
            groups: the optimizer's groups of local problems; a user may have replaced one.
        """
        same = len(groups) == len(self._groups) and all(map(is_, groups, self._groups))
        unchanged = same and self._settings == _settings_of(self._groups)
        return unchanged and self._parameters == parameters_of(groups)

    def with_parameters_of(self, groups: Sequence[Group]) -> Plan:
        """Return this plan, or a new one if the groups have other parameters than it was made for."""
        same = self._parameters == parameters_of(groups)
        return self if same else Plan(groups, self._components)

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
        group = self.group_of[layer.given[0]]
        case = layer.role, group["steps"] % group["every"] != 0
        known = self._layers.get(layer)
        if known is None or known[0] != case:
            known = case, _layer_plan(layer, group, self._components, between=case[1])
            self._layers[layer] = known
            self._row_uses.pop(layer, None)
        return known[1]

    def method(self, layer: LayerRecord) -> Method:
        """Return how the layer's problem is solved if it has rows."""
        return self.of(layer).method

    def method_now(self, layer: LayerRecord) -> Method:
        """Return how the layer's problem is solved in this step, with the rows that were recorded."""
        method = self.of(layer).method
        return method if layer.all_have_rows else method.as_backprop()

    def use_of_rows(
        self,
        states: Mapping[Tensor, Tensors],
        diagnosed: bool,
        layer: LayerRecord,
        moved: Collection[str],
    ) -> RowUse | None:
        """Return what the next step needs of a layer's rows; None: possibly all of them.

        The answer is kept until the layer's plan or ``moved`` changes, or the next step, if it may
        depend on the step.

        Args:
            states: solver states by parameter.
            diagnosed: True if the step will be measured.
            layer: the layer.
            moved: names of the tensors that the step moves.
        """
        own = self.of(layer)
        step = None if own.rows_are_steady else self.group(layer)["steps"]
        case = tuple(moved), step
        known = self._row_uses.get(layer)
        if known is None or known[0] != case:
            known = case, self._use_of_rows_now(own, states, diagnosed, layer, moved)
            self._row_uses[layer] = known
        return known[1]

    def _use_of_rows_now(
        self,
        own: LayerPlan,
        states: Mapping[Tensor, Tensors],
        diagnosed: bool,
        layer: LayerRecord,
        moved: Collection[str],
    ) -> RowUse | None:
        group = self.group(layer)
        if own.needs_rows or not layer.is_intact:  # if it is not, step() will raise
            return None
        weight = layer.kind.matrix("weight", layer.like)
        columns = ("weight" in moved) * weight.shape[-1] + ("bias" in moved)
        owner = layer.tensors["weight" if "weight" in moved else "bias"]
        kept = group["state_of"] in (None, group["solver"])  # step() drops another solver's state
        state = states.get(owner, {}) if kept else {}
        asked = Structure(group["gram"], group["block_size"], ones="bias" in moved)
        structure = asked if asked.reduces(columns) else FULL
        given = {} if structure == FULL else {"structure": structure}
        solver, number = own.method.solver, number_of(layer, group)
        use = solver.use_of_rows(own.method.local_steps, number, state, columns, **given)
        if use is None:
            return None
        coarse = use.coarse and group["local_products"] == "bf16"
        use = use._replace(structure=structure, coarse=coarse)
        # Measuring takes what is there: it must not change which way the iterations go.
        if group["gate"] or (diagnosed and not use.is_any):
            use = use._replace(gradients=use.gradients + 1)
        return use if own.gram_serves or not use.is_any else None

    def has_curvature(self) -> bool:
        """Return True if a step is more than one iteration along the parameters' gradients."""
        return any(_has_curvature(group, self._components) for group in self._groups)


def _settings_of(groups: Sequence[Group]) -> list[object]:
    return [group[name] for group in groups for name in PLAN_SETTINGS]


def parameters_of(groups: Sequence[Group]) -> list[int]:
    """Return the ids of the parameters in some groups, in their order."""
    return [id(p) for group in groups for p in group["params"]]


def problems_before(group: Group) -> int:
    """Return how many local problems a layer of a group has had if it took part in all steps."""
    return int(-(-group["steps"] // group["every"]))


def number_of(layer: LayerRecord, group: Group) -> int:
    """Return the number of a layer's problem, by which solvers decide what they renew.

    A layer that was absent from a step that renews gets the number zero in its next step, which renews.
    """
    return 0 if layer.counts.get(MISSED) else problems_before(group)


def is_ours(component: object) -> bool:
    """Return True if a component is of a class of this library, whose behaviour is known."""
    return type(component).__module__.partition(".")[0] == __name__.partition(".")[0]


def _layer_plan(
    layer: LayerRecord, group: Group, components: Components, between: bool
) -> LayerPlan:
    """Return the plan of a layer in its present role.

    Args:
        layer: the layer.
        group: the layer's group.
        components: what the names in the group stand for.
        between: the step is between two steps with local problems.
    """
    asked, regularizer = components.variant(group), components.regularizer(group)
    variant, note = _effective_variant(asked, regularizer, layer)
    if variant.output_by_gradient_descent and layer.is_output:
        method = Method(variant, SOLVERS["sgd"], REGULARIZERS["none"], local_steps=1)
    else:
        method = Method(variant, components.solver(group), regularizer, group["local_steps"])
        method = method.as_backprop() if between or layer.obstacle else method
    loss = method.variant.loss
    # As long as the transfer is not known, only single iterations are known to need no rows.
    known = layer.decided or layer.explicit
    settled = known or not asked.loss.uses_transfer
    quadratic = loss.is_quadratic(layer.transfer or Linear())
    # A closed form needs the pre-activations for the curvature of a loss with a transfer.
    bent = method.solver.closed_form and (loss.uses_transfer or not settled)
    starts = asked.target.knows_first_gradient and method.variant.target.knows_first_gradient
    return LayerPlan(
        asked=asked,
        variant=variant,
        note=note,
        regularizer=regularizer,
        method=method,
        needs_output=_needs_output(layer, method, known and quadratic),
        needs_rows=bent or not starts or bool(method.regularizer.needs),
        rows_are_steady=type(method.solver).use_of_rows is FirstOrder.use_of_rows,
        gram_serves=settled and quadratic,
    )


def _needs_output(layer: LayerRecord, method: Method, straight: bool) -> bool:
    """Return True if the step uses the layer's pre-activations: its loss has a non-linear transfer.

    As long as the transfer is not known the answer is True; otherwise the first step after a resumption
    would differ from the step of the run that it continues.

    Args:
        layer: the layer.
        method: how its problem is solved.
        straight: the layer's transfer is known, and the local loss is quadratic.
    """
    if layer.shards is not None:
        return False
    return method.variant.loss.uses_transfer and not straight and method.local_steps > 1


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
    """Return True if what a group's layers record, XᵀX apart, does not depend on the step's number."""
    every_row = group["every"] == 1 and group["max_rows"] is None
    return every_row and not _needs_fisher(group, components)


def _needs_fisher(group: Group, components: Components) -> bool:
    return "fisher" in components.variant(group).target.needs | components.regularizer(group).needs


def _has_curvature(group: Group, components: Components) -> bool:
    plain = group["local_steps"] == 1 and isinstance(components.solver(group), FirstOrder)
    return not plain or _needs_fisher(group, components)
