"""The table that ``opt.summary()`` prints: a row for every module with parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from torch_locoprop.paper.variants import Variant
from torch_locoprop.recording.layer_record import ServedLayer
from torch_locoprop.recording.model_scan import Unserved
from torch_locoprop.recording.transfer_assignment import effective_variant

HEADER = ("layer", "kind", "shape", "transfer", "variant", "note")
DETECTED_LATER = "transfer is detected in the first step"


def layer_row(
    layer: ServedLayer, asked_for: Variant, steps: int, in_model: bool
) -> tuple[str, ...]:
    """A layer with a local problem, after so many steps."""
    if not in_model:
        return layer.name, layer.kind.kind, "–", "–", "–", "is not in the model any more"
    if not layer.is_intact:
        note = "its parameters were replaced: make a new optimizer"
        return layer.name, layer.kind.kind, "–", "–", "–", note
    variant, note = effective_variant(asked_for, layer)
    transfer = layer.transfer.name if layer.transfer else ("none" if layer.note else "?")
    if not (layer.decided or layer.explicit or layer.note or layer.obstacle):
        note = "no backward pass has reached it yet" if steps else DETECTED_LATER
    if not layer.trained:
        note = "frozen"
    shape = _shapes([layer.tensors["weight"]])
    return layer.name or "(model)", layer.kind.kind, shape, transfer, variant.name, note


def unserved_row(module: Unserved, trained_by: str) -> tuple[str, ...]:
    """A module without a local problem, and who trains it."""
    frozen = not any(p.requires_grad for p in module.parameters)
    who, why = ("–", "frozen") if frozen else (trained_by, module.reason)
    return module.name or "(model)", module.kind, _shapes(module.parameters), "–", who, why


def footer(modules: int, layers: Iterable[ServedLayer], model: nn.Module, skipped: int) -> str:
    """How much of the model is in local problems, and how many updates were skipped."""
    local = sum(p.numel() for layer in layers for p in layer.given)
    total = sum(p.numel() for p in model.parameters())
    text = f"{modules} modules; {local:,} of {total:,} parameters in local problems"
    return text + (f"; {skipped} updates skipped as not finite" if skipped else "")


def table(rows: Sequence[Sequence[str]], footer: str) -> str:
    """Rows under :data:`HEADER`, columns padded to their widest entry."""
    widths = [max(len(row[i]) for row in (HEADER, *rows)) for i in range(len(HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (HEADER, *rows)
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:], "", footer])


def _shapes(parameters: Iterable[nn.Parameter]) -> str:
    return ", ".join("×".join(map(str, p.shape)) or "scalar" for p in parameters)
