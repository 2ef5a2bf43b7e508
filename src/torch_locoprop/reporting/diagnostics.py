"""The numbers of ``opt.diagnostics()``, as a table and as scalars.

How the numbers are measured is in ``stepping/measurements.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

from torch import Tensor

from torch_locoprop.paper.tensors import has_values
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.stepping.measurements import Measurements


@dataclass(frozen=True)
class LayerDiagnostics:
    """The numbers of one layer in the last step.

    ``loss_before`` and ``loss_after`` are values of the local problem that the layer solved in this
    step. With ``every=k``, the steps between those that solve the local problems are measured on
    the problem of LocoProp-S. The values are summed over rows, or averaged, as ``local_reduction``
    says. The matching loss leaves out its constant ``F*(y*)``, which depends on the target alone,
    so its value may be negative; with a linear transfer, and for all other losses, the value is
    complete. Both are NaN if the layer recorded no rows: its forward was not called, or its weight or
    bias is used outside of its forward too.

    ``local_loss`` and ``backprop_loss`` are changes of the local loss: negative values are progress.
    """

    layer: str
    loss_before: float  # at the start of the local problem, after weight decay
    loss_after: float  # at the solution after gate and cap, with the regularizer
    local_loss: float  # loss_after − loss_before
    backprop_loss: float  # the change of the local loss by the BackProp step −η γ G
    displacement: float  # ‖Δ‖ / ‖W‖, with Δ of weight and bias and W the weight, as in cap=
    cosine: float  # cosine of the angle between Δ and the BackProp step
    length: float  # ‖Δ‖ / ‖BackProp step‖
    gated: int  # steps so far that the gate rejected; a resumed run continues the three counts
    capped: int  # steps so far that the cap shortened
    skipped: int  # steps so far that were not written because they were not finite
    milliseconds: float  # time of the layer's step

    @classmethod
    def of(
        cls, layer: str, numbers: Mapping[str, Tensor | float], counts: Mapping[str, Tensor | int]
    ) -> LayerDiagnostics:
        """Return the diagnostics of a layer, with all numbers on the host; NaN where one has no value.

        Args:
            layer: the layer's name.
            numbers: what the last step measured, by field name.
            counts: how many steps were gated, capped and skipped so far.
        """
        values: dict[str, Any] = {name: _number(value) for name, value in numbers.items()}
        values |= {name: int(counts.get(name, 0)) for name in ("gated", "capped", "skipped")}
        return cls(layer, **values)

    def scalars(self) -> dict[str, float]:
        """Return all known numbers by name; unknown losses are left out."""
        unknown = ("loss_before", "loss_after") if math.isnan(self.loss_before) else ()
        return {
            field.name: float(getattr(self, field.name))
            for field in fields(self)
            if field.name not in ("layer", *unknown)
        }


def _number(value: Tensor | float) -> float:
    return math.nan if isinstance(value, Tensor) and not has_values(value) else float(value)


# The columns of the table, which has to fit into 80 characters.
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
    """The diagnostics of all layers in the last step: a sequence that prints as a table.

    The columns are: the local loss before and after the step, its change, its change by a BackProp
    step, ‖Δ‖/‖W‖, the cosine of the angle to the BackProp step, the numbers of gated, capped and
    skipped steps so far, and the time in milliseconds. A dash means that a number is not known.

    Example::

        opt = LocoProp(model, diagnose=True)
        ...
        print(opt.diagnostics())                # a table
        opt.diagnostics().write(writer, step)   # scalars for a TensorBoard SummaryWriter
    """

    def __init__(self, rows: Sequence[LayerDiagnostics]) -> None:
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> LayerDiagnostics: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[LayerDiagnostics, ...]: ...

    def __getitem__(self, index: int | slice) -> LayerDiagnostics | tuple[LayerDiagnostics, ...]:
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
        """Add all known numbers to a TensorBoard ``SummaryWriter``, as ``cosine/<layer>`` and so on.

        Args:
            writer: an object with ``add_scalar(tag, value, step)``.
            step: the step to write them for.
        """
        for row in self._rows:
            for name, value in row.scalars().items():
                writer.add_scalar(f"{name}/{row.layer or 'model'}", value, step)

    def _cells(self) -> Iterator[list[str]]:
        """Yield the cells of each row of the table."""
        for row in self._rows:
            known = row.scalars()
            numbers = [_short(known[name]) if name in known else "–" for name in HEADINGS]
            yield [row.layer or "(model)", *numbers]


def _short(number: float) -> str:
    """Return a number with three digits, or an integer below a million with all its digits."""
    if number.is_integer() and abs(number) < 1e6:
        return f"{number:.0f}"
    mantissa, e, exponent = f"{number:.3g}".partition("e")
    return mantissa + e + str(int(exponent)) if e else mantissa


def diagnostics_of(layers: Sequence[LayerRecord], measurements: Measurements | None) -> Diagnostics:
    """Return the diagnostics of the last step.

    Args:
        layers: all layers with a local problem.
        measurements: what the last step measured, by layer; None without ``diagnose=True``.

    Raises:
        RuntimeError: if the optimizer was made without ``diagnose=True``.
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
