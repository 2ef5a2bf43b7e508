"""Tells layers and hooks what to record for the next step.

This is done after each step, unless its plan is steady (:attr:`~.method.Plan.is_steady`), and before a
forward pass if a setting has changed since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from torch_locoprop.config.groups import Group
from torch_locoprop.paper.gram import FULL, Gram, RowUse, Structure
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.recording.hooks import ModelHooks
from torch_locoprop.recording.layer_record import LayerRecord, Orders
from torch_locoprop.stepping.method import Plan, is_quadratic, problems_before


def require(
    plan: Plan,
    layers: Sequence[LayerRecord],
    hooks: ModelHooks,
    states: Mapping[Tensor, Tensors],
    *,
    steps: int,
    diagnosed: bool,
    fisher_missing: bool,
) -> None:
    """Set on layers and hooks what the next step will need of them.

    Args:
        plan: the methods of the next step.
        layers: all layers with a local problem.
        hooks: the hooks that record for them.
        states: solver states by parameter.
        steps: number of steps taken so far.
        diagnosed: whether the step will be measured.
        fisher_missing: whether a layer had no Fisher matrix in the last step, so that one is sampled.
    """
    draw, searching = fisher_missing, False
    orders: Orders = {}
    for layer in layers:
        group, own = plan.group(layer), plan.of(layer)
        needs = own.variant.target.needs | own.regularizer.needs
        searching |= bool(layer.trained) and (not layer.decided or bool(needs))
        layer.needs = needs | {"g"} if diagnosed else needs
        if layer.shards is not None and layer.needs:
            raise ValueError(_needs_rows(layer, diagnosed))
        layer.overlap_allowed = not (own.asked.target.needs | layer.needs)
        reported = steps == 0 and layer.shards is None
        if reported and "gamma" not in own.method.solver.ignores and not needs:
            layer.needs |= {"g_norm"}  # for the report on the first step
        layer.keeps_output = needs_output(plan, layer)
        layer.max_rows, layer.row_seed, layer.orders = group["max_rows"], 1000 * steps, orders
        if "fisher" in layer.needs:
            draw |= steps % getattr(own.variant.target, "every", 1) == 0
    require_rows(plan, layers, states, diagnosed=diagnosed)
    hooks.labels.draw_before(steps if draw else None)
    hooks.search.is_on = searching
    active = [layer for layer in layers if layer.trained]
    hooks.search.records_gradients = any("v" in layer.needs for layer in active)
    plan.note_required(layers)


def require_rows(
    plan: Plan,
    layers: Iterable[LayerRecord],
    states: Mapping[Tensor, Tensors],
    *,
    diagnosed: bool,
) -> None:
    """Set ``use_of_rows`` of each layer, which says what a step of this plan needs of its rows."""
    of_layer = partial(use_of_rows, plan, states, diagnosed)
    for layer in layers:
        layer.use_of_rows = of_layer


def needs_output(plan: Plan, layer: LayerRecord) -> bool:
    """Return True if the step uses the layer's pre-activations: its loss has a non-linear transfer.

    As long as the transfer is not known the answer is True; otherwise the first step after a resumption
    would differ from the step of the run that it continues.
    """
    own = plan.of(layer)
    if not own.asked.loss.uses_transfer or layer.shards is not None:
        return False
    method = own.method
    known, loss = layer.decided or layer.explicit, method.variant.loss
    straight = known and is_quadratic(layer, method.variant)
    return loss.uses_transfer and not straight and method.local_steps > 1


def use_of_rows(
    plan: Plan,
    states: Mapping[Tensor, Tensors],
    diagnosed: bool,
    layer: LayerRecord,
    moved: Collection[str],
) -> RowUse | None:
    """Return what the next step needs of a layer's rows; None: possibly all of them.

    As long as a layer's transfer is not known, only one iteration is known to need no rows.

    Args:
        plan: the methods of the step.
        states: solver states by parameter.
        diagnosed: whether the step will be measured.
        layer: the layer.
        moved: names of the tensors that the step moves.
    """
    group, own = plan.group(layer), plan.of(layer)
    asked, method, variant = own.asked, own.method, own.method.variant
    first_known = all(t.knows_first_gradient for t in (asked.target, variant.target))
    if method.regularizer.needs or not first_known or not layer.is_intact:  # step() will raise
        return None
    weight = layer.kind.matrix("weight", layer.like)
    columns = ("weight" in moved) * weight.shape[-1] + ("bias" in moved)
    owner = layer.tensors["weight" if "weight" in moved else "bias"]
    kept = group["state_of"] in (None, group["solver"])  # step() drops another solver's state
    state = states.get(owner, {}) if kept else {}
    number = problems_before(group)
    structure = structure_of(group, columns, moved)
    given = {} if structure == FULL else {"structure": structure}
    use = method.solver.use_of_rows(method.local_steps, number, state, columns, **given)
    if use is not None:
        use = use._replace(structure=structure)
    # Measuring takes what is there: it must not change which way the iterations go.
    if use is not None and (group["gate"] or (diagnosed and not use.is_any)):
        use = use._replace(gradients=use.gradients + 1)
    settled = layer.decided or layer.explicit or not asked.loss.uses_transfer
    # A closed form needs the pre-activations for the curvature of a loss with a transfer.
    bent = method.solver.closed_form and (variant.loss.uses_transfer or not settled)
    if use is None or not (use.is_any or bent):
        return use
    if bent or not settled:
        return None
    return use if is_quadratic(layer, variant) else None


def structure_of(group: Group, columns: int, moved: Collection[str]) -> Structure:
    """Return which entries of XᵀX a step takes; FULL if the group's settings leave out none.

    Args:
        group: the settings of the layer.
        columns: how many columns of ``[W b]`` are trained.
        moved: names of the tensors that are trained.
    """
    asked = Structure(group["gram"], group["block_size"], ones="bias" in moved)
    return asked if asked.reduces(columns) else FULL


def check_recorded_needs(plan: Plan, layers: Iterable[LayerRecord]) -> None:
    """Raise ``RuntimeError`` if settings that changed after the passes need what was not recorded."""
    for layer in layers:
        if not layer.calls:
            continue
        needs = plan.method(layer).variant.target.needs & {"g", "v"}
        if not needs <= layer.needs:
            raise changed(layer, "gradients of its outputs, which were not kept")
        x, own = layer.inputs(), layer.with_gradient
        if isinstance(x, Gram) and not x.serves(layer.row_use(own), layer.like):
            raise changed(layer, "its inputs, of which only a summary was kept")


def _needs_rows(layer: LayerRecord, diagnosed: bool) -> str:
    """Return the message for settings that no sharded layer supports."""
    what = "diagnose=True" if diagnosed else "This variant or regularizer"
    return (
        f"{what} needs gradients of the outputs of layer {layer.name!r} or their Fisher matrix, which "
        "are not exchanged between processes for a layer that fully_shard has sharded. LocoProp-S, "
        "LocoProp-M, closed forms and the spectral step need none, without diagnose=True."
    )


def changed(layer: LayerRecord, needed: str) -> RuntimeError:
    """Return the error for settings that changed after the passes had recorded for other ones."""
    return RuntimeError(
        f"The settings of layer {layer.name!r} were changed between backward() and step(), or before a "
        f"forward pass of its parts or of a compiled model, to some that need {needed}. Call "
        "zero_grad() and run forward and backward again: from now on it is kept."
    )
