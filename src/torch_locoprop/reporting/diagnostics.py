"""What a step did in each layer: measured only where ``diagnose=True`` asks for it.

opt = LocoProp(model, diagnose=True)
...
print(opt.diagnostics())                          # a table
opt.diagnostics().write(writer, step)             # scalars for a TensorBoard SummaryWriter
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.stepping.measurements import Measurements


@dataclass(frozen=True)
class LayerDiagnostics:
    """One layer in the last step.

    ``loss_before`` and ``loss_after`` are of the local problem that the layer had in this step (between
    those of ``every=`` that is LocoProp-S's), summed over rows or averaged as ``local_reduction`` says.
    The matching loss is without its constant ``F*(y*)``, which depends on the target alone, so it may
    be below zero; behind a linear transfer, and for all other losses, nothing is left out. Both are NaN
    where the layer had no rows of its own to measure: it is not called, or its weight is used elsewhere
    too. ``local_loss`` and ``backprop_loss`` are differences to the start: below zero is progress.
    """

    layer: str
    loss_before: float  # at the weights of the start, after weight decay
    loss_after: float  # at the solution, gated and capped, with its regularizer
    local_loss: float  # the latter less the former
    backprop_loss: float  # the same for the BackProp step −η γ G in place of the solution
    displacement: float  # ‖Δ‖ / ‖W‖, Δ of weight and bias, W the weight alone, as for cap
    cosine: float  # between Δ and the BackProp step
    length: float  # ‖Δ‖ over that of the BackProp step
    gated: int  # so far, before a resumption too, and likewise
    capped: int
    skipped: int  # as not finite
    milliseconds: float

    @classmethod
    def of(
        cls, layer: str, numbers: Mapping[str, Tensor | float], counts: Mapping[str, Tensor | int]
    ) -> LayerDiagnostics:
        """From what was measured and counted on the device."""
        values: dict[str, Any] = {name: float(value) for name, value in numbers.items()}
        values |= {name: int(counts.get(name, 0)) for name in ("gated", "capped", "skipped")}
        return cls(layer, **values)

    def scalars(self) -> dict[str, float]:
        """The numbers by name, as far as they are known."""
        unknown = ("loss_before", "loss_after") if math.isnan(self.loss_before) else ()
        return {
            field.name: float(getattr(self, field.name))
            for field in fields(self)
            if field.name not in ("layer", *unknown)
        }


# What the table shows; the columns have to fit into 80 characters.
HEADINGS = {
    "loss_before": "before",
    "loss_after": "after",
    "local_loss": "change",
    "backprop_loss": "BackProp",
    "displacement": "‖Δ‖/‖W‖",
    "cosine": "cosine",
    "gated": "gate",
    "capped": "cap",
    "skipped": "skip",
    "milliseconds": "ms",
}


class Diagnostics(Sequence[LayerDiagnostics]):
    """All layers of the last step; prints as a table.

    Its columns: the local loss before the step and after, its change, that of a BackProp step in its
    place, ‖Δ‖/‖W‖, the cosine to the BackProp step, how often the layer was gated, capped and skipped
    so far, and milliseconds. A dash is a number that is not known.
    """

    def __init__(self, rows: Sequence[LayerDiagnostics]) -> None:
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __str__(self) -> str:
        lines = [["layer", *HEADINGS.values()], *self._cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            " ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines
        )

    def __rich__(self) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
        table.add_column("layer", overflow="fold")
        for heading in HEADINGS.values():
            table.add_column(heading, justify="right", no_wrap=True)
        for line in self._cells():
            table.add_row(*line)
        return table

    def write(self, writer: Any, step: int) -> None:
        """Add every number that is known to a TensorBoard ``SummaryWriter``, as ``cosine/layer``."""
        for row in self._rows:
            for name, value in row.scalars().items():
                writer.add_scalar(f"{name}/{row.layer or 'model'}", value, step)

    def _cells(self) -> Iterator[list[str]]:
        for row in self._rows:
            known = row.scalars()
            numbers = [_short(known[name]) if name in known else "–" for name in HEADINGS]
            yield [row.layer or "(model)", *numbers]


def _short(number: float) -> str:
    """In three digits, or all those of an integer up to a million; at most eight characters."""
    if number.is_integer() and abs(number) < 1e6:
        return f"{number:.0f}"
    mantissa, e, exponent = f"{number:.3g}".partition("e")
    return mantissa + e + str(int(exponent)) if e else mantissa


def diagnostics_of(layers: Sequence[LayerRecord], measurements: Measurements | None) -> Diagnostics:
    """Return the diagnostics of the last step.

    Args:
        layers: all layers with a local problem.
        measurements: what the step has measured of them; None if nothing is measured.
    """
    if measurements is None:
        raise RuntimeError("Nothing was measured. Make the optimizer with diagnose=True.")
    return Diagnostics(
        [
            LayerDiagnostics.of(layer.name, measurements[layer.name], layer.counts)
            for layer in layers
            if layer.name in measurements
        ]
    )
