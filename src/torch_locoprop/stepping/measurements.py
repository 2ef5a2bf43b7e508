"""What a step did in one layer, in numbers: measured only if ``diagnose=True`` asks for it.

How the numbers are shown is in ``reporting/diagnostics.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Tensors, join

Measurements = dict[str, dict[str, Tensor | float]]  # by layer


@contextmanager
def timed(
    measurements: dict[str, dict[str, Tensor | float]] | None, layer: str, device: torch.device
) -> Iterator[None]:
    """Add the milliseconds inside to a layer's measurements, if layers are measured.

    Args:
        measurements: by layer; None if nothing is measured.
        layer: the layer's name.
        device: whose work is waited for.
    """
    if measurements is None:
        yield
        return
    began = _now(device)
    yield
    if layer in measurements:
        measurements[layer]["milliseconds"] += _now(device) - began


def _now(device: torch.device) -> float:
    """Return the time in milliseconds, after all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * time.perf_counter()


def measured(problem: LocalProblem, new: Tensors) -> dict[str, Tensor | float]:
    """Return the numbers of one solution, most as tensors on the device.

    ``milliseconds`` starts below zero, at what measuring takes, so that :func:`timed` leaves it out.
    """
    device = next(iter(new.values())).device
    began = _now(device)
    moved, start = problem.displacement(new), problem.start
    backprop = {name: -problem.eta * g for name, g in problem.first_gradient.items()}
    step = {name: start[name] + t for name, t in backprop.items()}
    weight = (problem.fixed | start | problem.base)["weight"]
    tiny = torch.finfo(next(iter(new.values())).dtype).tiny
    delta, direction = join(moved).flatten(), join(backprop).flatten()
    length, plain = delta.norm(), direction.norm()
    before, change = problem.objective_at_start(), problem.objective(new)
    found: dict[str, Tensor | float] = {
        "loss_before": before,
        "loss_after": before + change,
        "local_loss": change,
        "backprop_loss": problem.objective(step),
        "displacement": length / weight.norm().clamp_min(tiny),
        "cosine": (delta / length.clamp_min(tiny)) @ (direction / plain.clamp_min(tiny)),
        "length": length / plain.clamp_min(tiny),
    }
    return found | {"milliseconds": began - _now(device)}
