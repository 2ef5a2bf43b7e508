"""The table of ``opt.summary()``, with a row for every module with parameters.

The transfers and notes that it shows are found in ``recording/``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import nn

from torch_locoprop.config.groups import Group
from torch_locoprop.paper.gram import FULL, Structure
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.model_scan import Unserved, newcomers
from torch_locoprop.solvers import AveragedPreconditioned, Solver, Spectral
from torch_locoprop.solvers.spectral import WIDEST
from torch_locoprop.stepping.first_step import FirstStep
from torch_locoprop.stepping.method import LayerPlan, Plan
from torch_locoprop.stepping.several_processes.layer_part import part_of

HEADER = ("layer", "kind", "shape", "transfer", "variant", "note")
FIRST_STEP_HEADER = ("first step", "target", "outputs", "weights")
FIRST_STEP = (
    "The first step: distance of the target over the size of the activations, change of the outputs\n"
    "over their size, change of the weight over its size."
)
DETECTED_LATER = "transfer is detected in the first step"
WITHOUT_GRAM = f"no XᵀX: more than {WIDEST} inputs with the bias"
USE_BLOCKS = '; gram="block" uses blocks'


def summary_of(
    model: nn.Module,
    layers: Sequence[LayerRecord],
    unserved: Sequence[Unserved],
    plan: Plan,
    given: set[nn.Parameter],
    trained_by: str,
    told: str,
) -> str:
    """Return the table of all modules with parameters.

    Args:
        model: the model.
        layers: the model's layers with a local problem.
        unserved: the model's other modules with parameters.
        plan: the settings of each layer.
        given: all parameters that the optimizer trains.
        trained_by: name of the optimizer that trains parameters without a local problem.
        told: a sentence on the settings, or an empty string.
    """
    present = set(model.modules())
    rows = [
        layer_row(layer, plan.of(layer), plan.group(layer), layer.module in present)
        for layer in layers
    ]
    for module in unserved:
        trained = not given.isdisjoint(module.parameters)
        rows.append(unserved_row(module, trained_by if trained else "–"))
    new = newcomers(model, layers, unserved)
    rows += [unserved_row(module, "–") for module in new]
    skipped = sum(int(layer.counts.get("skipped", 0)) for layer in layers)
    still_there = [layer for layer in layers if layer.module in present]
    last = footer(len(rows), still_there, model, skipped)
    last += f"\n{told}" if told else ""
    unchanged = not new and len(still_there) == len(layers)
    return f"{table(rows, HEADER)}\n\n{last}{first_steps(layers) if unchanged else ''}"


def layer_row(layer: LayerRecord, plan: LayerPlan, group: Group, in_model: bool) -> tuple[str, ...]:
    """Return the row of a layer with a local problem.

    Args:
        layer: the record of the layer.
        plan: the variant that serves the layer, and a note on it.
        group: the settings of the layer.
        in_model: False if the layer was removed from the model.
    """
    if not in_model:
        return layer.name, layer.kind.kind, "–", "–", "–", "was removed from the model"
    if not layer.is_intact:
        note = "its parameters were replaced: make a new optimizer"
        return layer.name, layer.kind.kind, "–", "–", "–", note
    note = plan.note
    transfer = layer.transfer.name if layer.transfer else ("none" if layer.note else "?")
    if not (layer.decided or layer.explicit or layer.note or layer.obstacle):
        note = "no backward pass has reached it yet" if group["steps"] else DETECTED_LATER
        if layer.shared_facts is not None and layer.shared_facts.rows > 0:
            note = "only rows of other processes have reached it: it takes BackProp steps"
    note = note or layer.division
    part = part_of(layer, plan.method)
    if part is not None:
        note = note or part.note(layer, plan.method, group)
    note = "; ".join(filter(None, (note, _note_on_gram(layer, plan.method.solver, group))))
    if not layer.trained:
        note = "frozen"
    shape = _shapes([layer.tensors["weight"]])
    return layer.name or "(model)", layer.kind.kind, shape, transfer, plan.variant.name, note


def _note_on_gram(layer: LayerRecord, solver: Solver, group: Group) -> str:
    """Return a note if the layer's steps are taken without XᵀX; otherwise an empty string."""
    with_bias = "bias" in layer.tensors and layer.tensors["bias"].requires_grad
    columns = layer.kind.matrix("weight", layer.like).shape[-1] + with_bias
    asked = Structure(group["gram"], group["block_size"])
    structure = asked if asked.reduces(columns) else FULL
    if not isinstance(solver, Spectral | AveragedPreconditioned):
        return ""
    if not solver.omits_gram(columns, structure) or not layer.tensors["weight"].requires_grad:
        return ""
    return WITHOUT_GRAM + (USE_BLOCKS if isinstance(solver, Spectral) else "")


def unserved_row(module: Unserved, trained_by: str) -> tuple[str, ...]:
    """Return the row of a module without a local problem.

    Args:
        module: the module.
        trained_by: name of the optimizer that trains it.
    """
    frozen = not any(p.requires_grad for p in module.parameters)
    who, why = ("–", "frozen") if frozen else (trained_by, module.reason)
    return module.name or "(model)", module.kind, _shapes(module.parameters), "–", who, why


def footer(modules: int, layers: Iterable[LayerRecord], model: nn.Module, skipped: int) -> str:
    """Return the line below the table: parameters in local problems, and skipped updates.

    Args:
        modules: number of rows of the table.
        layers: the layers with a local problem.
        model: the model.
        skipped: number of updates that were skipped so far.
    """
    local = sum(p.numel() for layer in layers for p in layer.trained)
    total = sum(p.numel() for p in model.parameters())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    count = f"{modules} module{'' if modules == 1 else 's'}"
    text = f"{count}; {local:,} of {total:,} parameters in local problems"
    text += f"; {frozen:,} not trained" if frozen else ""
    return text + (f"; {skipped} updates skipped as not finite" if skipped else "")


def first_steps(layers: Sequence[LayerRecord]) -> str:
    """Return the table of what the first step did in each layer; empty before it.

    Args:
        layers: the layers with a local problem.
    """
    found = [(layer.name, layer.first_step) for layer in layers]
    rows = [
        (f"in {name or '(model)'}", *(_short(x) for x in (step.target, step.outputs, step.weights)))
        for name, step in found
        if isinstance(step, FirstStep)
    ]
    return f"\n\n{FIRST_STEP}\n{table(rows, FIRST_STEP_HEADER)}" if rows else ""


def _short(number: float) -> str:
    return "–" if math.isnan(number) else f"{number:.1g}"


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Return rows as text under a header, each column as wide as its widest entry."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:]])


def _shapes(parameters: Iterable[nn.Parameter]) -> str:
    return ", ".join("×".join(map(str, p.shape)) or "scalar" for p in parameters)
