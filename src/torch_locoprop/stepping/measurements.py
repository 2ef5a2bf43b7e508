"""Measures what a step did in each layer, for ``diagnose=True``.

How the numbers are shown is in ``reporting/diagnostics.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.objective import objective, objective_at_start
from torch_locoprop.paper.tensors import Tensors, join

Measurements = dict[str, dict[str, Tensor | float]]  # numbers by layer, then by name


@contextmanager
def timed(
    measurements: Measurements | None, layers: Sequence[str], device: torch.device
) -> Iterator[None]:
    """Set the ``milliseconds`` of some layers to equal parts of the time that the context takes.

    Args:
        measurements: the measurements of all layers; None measures nothing.
        layers: the names of the layers.
        device: the device of the layers; its work inside the context is waited for.
    """
    if measurements is None:
        yield
        return
    began = _now(device)
    yield
    own = [measurements[layer] for layer in layers if layer in measurements]
    time_of_all = _now(device) - began + sum(each["milliseconds"] for each in own)
    for each in own:
        each["milliseconds"] = time_of_all / len(own)


def _now(device: torch.device) -> float:
    """Return the time in milliseconds, after all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * time.perf_counter()


def measured(problem: LocalProblem, new: Tensors) -> dict[str, Tensor | float]:
    """Return the numbers of :class:`~torch_locoprop.reporting.diagnostics.LayerDiagnostics` by name.

    ``milliseconds`` is minus the time that this function takes, which :func:`timed` leaves out of the
    time of the step. The other numbers are scalars on the device.

    Args:
        problem: a layer's local problem.
        new: the solution of the problem, after the guards.
    """
    device = next(iter(new.values())).device
    began = _now(device)
    moved, start = problem.displacement(new), problem.start
    backprop = problem.backprop_step
    after_backprop = {name: start[name] + t for name, t in backprop.items()}
    tiny = torch.finfo(next(iter(new.values())).dtype).tiny
    delta, direction = join(moved).flatten(), join(backprop).flatten()
    length, backprop_length = delta.norm(), direction.norm()
    before, change = objective_at_start(problem), objective(problem, new)
    found: dict[str, Tensor | float] = {
        "loss_before": before,
        "loss_after": before + change,
        "local_loss": change,
        "backprop_loss": objective(problem, after_backprop),
        "displacement": length / problem.weight.norm().clamp_min(tiny),
        "cosine": (delta / length.clamp_min(tiny)) @ (direction / backprop_length.clamp_min(tiny)),
        "length": length / backprop_length.clamp_min(tiny),
    }
    return found | {"milliseconds": began - _now(device)}
