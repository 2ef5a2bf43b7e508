"""Decides what each layer gets: the transfer that follows it, and the variant that serves it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch_locoprop import transfers
from torch_locoprop.capture import ServedLayer
from torch_locoprop.settings import unknown
from torch_locoprop.transfers import NON_MONOTONE, Transfer
from torch_locoprop.variants import VARIANTS, Variant

INSIDE_LOSS = "its transfer is inside the loss: pass output_transfer= or loss_fn="


def give_transfers(layers: Iterable[ServedLayer], given: Mapping[str, str | Transfer]) -> None:
    """Set the transfers the user named, by module name."""
    by_name = {layer.name: layer for layer in layers}
    for name, transfer in given.items():
        if name not in by_name:
            raise ValueError(unknown("module in transfers=", name, by_name))
        layer = by_name[name]
        layer.decided = layer.explicit = True
        if isinstance(transfer, str) and transfer.lower() in NON_MONOTONE:
            layer.note = f"{transfer} is not monotone: it has no matching loss"
        else:
            layer.transfer = transfers.get(transfer)


def decide(
    layer: ServedLayer, output_transfer: Transfer | None, loss_transfer: Transfer | None
) -> None:
    """Settle a layer's transfer from its recorded calls, unless the user gave it."""
    findings = layer.findings()
    layer.is_output = all(finding.is_output for finding in findings)
    if layer.explicit:
        return
    layer.decided = True
    if layer.is_output and output_transfer is not None:
        layer.transfer = output_transfer
        return
    found = {finding.transfer for finding in findings}
    if len(found) > 1:
        layer.note = "called with different transfers"
        return
    layer.transfer, layer.note = found.pop(), findings[0].reason
    if layer.transfer is None and all(finding.inside_loss for finding in findings):
        layer.transfer = loss_transfer
        layer.note = "" if loss_transfer else INSIDE_LOSS


def effective_variant(variant: Variant, layer: ServedLayer) -> tuple[Variant, str]:
    """The variant that serves a layer, and a note where it is not quite what was asked for."""
    if variant.loss.uses_transfer and layer.decided and layer.transfer is None:
        return VARIANTS["locoprop-s"], layer.note
    if variant.output_by_gradient_descent and layer.is_output:
        return variant, "output layer: plain gradient descent"
    return variant, ""
