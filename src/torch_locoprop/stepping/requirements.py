"""Tells layers and hooks what to record for the next step.

Requirements are set for each new plan, and after each step of a plan that is not steady
(:attr:`~.method.Plan.is_steady`). What a step needs of the rows is :meth:`~.method.Plan.use_of_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from torch_locoprop.paper.gram import Gram
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.recording.hooks import ModelHooks
from torch_locoprop.recording.layer_record import LayerRecord, Orders
from torch_locoprop.stepping.method import Plan


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
        diagnosed: True if the step will be measured.
        fisher_missing: True if a layer had no Fisher matrix in the last step, so that one is sampled.
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
        layer.keeps_output = own.needs_output
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
    of_layer = partial(plan.use_of_rows, states, diagnosed)
    for layer in layers:
        layer.use_of_rows = of_layer


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
