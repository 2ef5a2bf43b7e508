"""What a step did in each layer: measured only where ``diagnose=True`` asks for it.

opt = LocoProp(model, diagnose=True)
...
print(opt.diagnostics())                          # a table
opt.diagnostics().write(writer, step)             # scalars for a TensorBoard SummaryWriter
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from torch_locoprop.joint import join
from torch_locoprop.problem import LocalProblem

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class LayerDiagnostics:
    """One layer in the last step. Local losses are differences to the start: below zero is progress."""

    layer: str
    local_loss: float  # of the solution, with its regularizer
    backprop_loss: float  # of the BackProp step −η γ G in its place
    displacement: float  # ‖Δ‖ / ‖W‖
    cosine: float  # between Δ and the BackProp step
    length: float  # ‖Δ‖ over that of the BackProp step
    gated: int  # so far
    capped: int  # so far
    skipped: int  # so far, as not finite
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
        """The numbers by name."""
        return {
            field.name: float(getattr(self, field.name))
            for field in fields(self)
            if field.name != "layer"
        }


HEADINGS = {
    "layer": "layer",
    "local_loss": "local loss",
    "backprop_loss": "of BackProp",
    "displacement": "‖Δ‖/‖W‖",
    "cosine": "cosine",
    "length": "length",
    "gated": "gated",
    "capped": "capped",
    "skipped": "skipped",
    "milliseconds": "ms",
}


class Diagnostics(Sequence[LayerDiagnostics]):
    """All layers of the last step; prints as a table."""

    def __init__(self, rows: Sequence[LayerDiagnostics]) -> None:
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __str__(self) -> str:
        lines = [list(HEADINGS.values()), *self._cells()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines
        )

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(HEADINGS["layer"])
        for heading in list(HEADINGS.values())[1:]:
            table.add_column(heading, justify="right")
        for line in self._cells():
            table.add_row(*line)
        return table

    def write(self, writer: Any, step: int) -> None:
        """Add every number to a TensorBoard ``SummaryWriter``."""
        for row in self._rows:
            for name, value in row.scalars().items():
                writer.add_scalar(f"{name}/{row.layer or 'model'}", value, step)

    def _cells(self) -> Iterator[list[str]]:
        for row in self._rows:
            numbers = row.scalars()
            counts = ("gated", "capped", "skipped")
            yield [
                row.layer or "(model)",
                *(f"{v:.0f}" if n in counts else f"{v:.3g}" for n, v in numbers.items()),
            ]


@contextmanager
def timed(
    diagnosed: dict[str, dict[str, Tensor | float]] | None, layer: str, device: torch.device
) -> Iterator[None]:
    """Measure the milliseconds inside, if anything is measured at all."""
    if diagnosed is None:
        yield
        return
    began = _now(device)
    yield
    if layer in diagnosed:
        diagnosed[layer]["milliseconds"] += _now(device) - began


def _now(device: torch.device) -> float:
    """Milliseconds, when all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * time.perf_counter()


def measured(problem: LocalProblem, new: Tensors) -> dict[str, Tensor | float]:
    """The numbers of one solution, most as tensors on the device; milliseconds less what they take."""
    device = next(iter(new.values())).device
    began = _now(device)
    moved, start = problem.displacement(new), problem.start
    backprop = {name: -problem.eta * g for name, g in problem.first_gradient.items()}
    step = {name: start[name] + t for name, t in backprop.items()}
    weights = {name: problem.base.get(name, t) for name, t in start.items()}
    tiny = torch.finfo(next(iter(new.values())).dtype).tiny
    delta, direction = join(moved).flatten(), join(backprop).flatten()
    length, plain = delta.norm(), direction.norm()
    found: dict[str, Tensor | float] = {
        "local_loss": problem.objective(new),
        "backprop_loss": problem.objective(step),
        "displacement": length / join(weights).norm().clamp_min(tiny),
        "cosine": (delta / length.clamp_min(tiny)) @ (direction / plain.clamp_min(tiny)),
        "length": length / plain.clamp_min(tiny),
    }
    return found | {"milliseconds": began - _now(device)}
