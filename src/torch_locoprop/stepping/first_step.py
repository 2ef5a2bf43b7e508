"""Measures what the first step did in each layer, relative to the layer's own size.

``summary()`` shows the numbers. If they are far from those of runs that train, one warning names the
setting to change and a value. Later steps are measured only with ``diagnose=True``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from torch_locoprop.paper.gram import FULL, Gram
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.targets import GradientDescent, MirrorDescent
from torch_locoprop.paper.tensors import Tensors, at_least_float32, has_values, join
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.solvers import Solver

# For the median over layers: the range of sensible ratios, and the ratio that a suggestion aims at.
TARGET_RANGE, GOOD_TARGET = (1e-4, 1e6), 1e-2
SPECTRAL_RANGE, GOOD_SPECTRAL_MOVE = (1e-6, 10.0), 0.1  # fine-tuning and warm-ups take small steps
# Up to this rate, entries move by about 0.2 lr at most, and only weights near zero move far relatively.
SENSIBLE_SPECTRAL_RATE = 0.1
# Bounds for local iterations, whose momentum makes later steps longer.
LARGEST_MOVE, GOOD_MOVE = 100.0, 0.01


@dataclass(frozen=True)
class FirstStep:
    """Ratios of root mean squares over rows and features; NaN where a number is not known."""

    target: float  # distance of the target from the activations, over the activations
    outputs: float  # change of the pre-activations, over the pre-activations
    weights: float  # change of the weight, over the weight


Ratios = tuple[
    Tensor | None, Tensor | None, Tensor | None
]  # the fields of a FirstStep, on the device


def ratios(
    layer: LayerRecord, problem: LocalProblem, new: Tensors, solver: Solver, of_row: float
) -> Ratios:
    """Return the numbers of a layer's :class:`FirstStep` as scalars on the device, without a sync.

    Args:
        layer: the record of the layer.
        problem: the layer's local problem.
        new: the solution, after the guards.
        solver: the layer's solver, which may have no use for a target.
        of_row: factor of the recorded gradient of a row in the problem.
    """
    moved = problem.displacement(new)
    a = change = distance = y = None
    if layer.has_rows:
        a, y = _sizes(problem)
        change = _change(problem, moved)
        distance = None if "gamma" in solver.ignores else _target_distance(layer, problem, of_row)
    weight = _rms(moved["weight"]) if "weight" in moved else None
    return _ratio(distance, y), _ratio(change, a), _ratio(weight, _rms(problem.weight))


def on_host(found: Ratios) -> FirstStep:
    """Return the numbers of a layer on the host; on an accelerator this is a host sync."""
    return FirstStep(*(math.nan if x is None or not has_values(x) else float(x) for x in found))


def advice(steps: Iterable[FirstStep], group: Mapping[str, Any], solver: Solver) -> str:
    """Return what to change if the first step was out of range; empty if it was not.

    The median over the layers decides: the settings are those of all layers, and single layers may
    begin at weights of zero. A step in a warm-up is judged as a step at the full learning rate.
    Solutions that are not finite are not judged, because another warning names them. Steps with
    ``cap`` are not judged, because the cap limits them.

    Args:
        steps: the first steps of the layers of a group.
        group: the group.
        solver: the solver of the group.
    """
    steps = list(steps)
    if any(math.isnan(step.weights) and math.isnan(step.outputs) for step in steps):
        return ""
    lr = float(group["lr"])
    full = float(group.get("initial_lr", lr)) / lr if lr > 0 else 0.0
    target = _typical(step.target for step in steps)
    moved = _typical(step.weights * full for step in steps)
    low, high = TARGET_RANGE
    if target is not None and not low <= target <= high:
        value = float(group["gamma"]) * GOOD_TARGET / target
        return (
            f"In the first step the targets are {target:.1g} of the size of the activations away from "
            f"them (median over the layers), which is too {'far' if target > high else 'near'}. Try "
            f"gamma={value:.1g}."
        )
    spectral = "gamma" in solver.ignores
    low, high = SPECTRAL_RANGE if spectral else (0.0, LARGEST_MOVE)
    if moved is None or low <= moved <= high or group["cap"] is not None:
        return ""
    if spectral and moved > high and lr * full <= SENSIBLE_SPECTRAL_RATE:
        return ""
    value = lr * full * (GOOD_SPECTRAL_MOVE if spectral else GOOD_MOVE) / moved
    return (
        f"The first step changes the weights by {moved:.1g} of their size (median over the layers), "
        f"which is too {'much' if moved > high else 'little'}. Try lr={value:.1g}."
    )


def _typical(numbers: Iterable[float]) -> float | None:
    known = [number for number in numbers if math.isfinite(number) and number > 0]
    return median(known) if known else None


def _target_distance(layer: LayerRecord, problem: LocalProblem, of_row: float) -> Tensor | None:
    """Return the root mean square of ``γ g`` or ``γ v``; None if the target has no such form."""
    if problem.v is not None:
        return _rms(problem.v) * problem.gamma
    norms = [call.g_norm for call in layer.calls if call.g_norm is not None]
    if type(problem.target) not in (GradientDescent, MirrorDescent) or not norms:
        return None
    size = math.sqrt(layer.row_count * layer.width)
    distance: Tensor = torch.stack(norms).norm() * abs(of_row) * problem.gamma / size
    return distance


def _sizes(problem: LocalProblem) -> tuple[Tensor | None, Tensor | None]:
    """Return the root mean squares of the pre-activations and of the activations that have a target."""
    if isinstance(problem.x, Gram):  # only where the local loss is quadratic: f is linear
        size = _size_through_gram(problem.x, {**problem.fixed, **problem.start, **problem.base})
        return size, size
    a = problem.a0  # the solver has computed it, or the forward pass left it
    size = _rms(a)
    return size, _rms(problem.transfer.f(a)) if problem.loss.uses_transfer else size


def _change(problem: LocalProblem, moved: Tensors) -> Tensor | None:
    """Return the root mean square of the change of the pre-activations; None if it costs too much."""
    if isinstance(problem.x, Gram):
        return _size_through_gram(problem.x, moved)
    return _rms(problem.row_change(moved)) if problem.linear_map.holds_rows else None


def _size_through_gram(gram: Gram, tensors: Tensors) -> Tensor | None:
    """Return the root mean square of ``X Wᵀ + b``; None if not all products of the rows were kept."""
    if not gram.is_known or gram.structure != FULL:
        return None
    joined = at_least_float32(join(tensors))
    joint = gram.to(joined.dtype).joint("weight" in tensors, "bias" in tensors)
    square = ((joined @ joint) * joined).sum() / (gram.rows * joined.shape[-2])
    return square.clamp_min(0).sqrt()


def _rms(tensor: Tensor) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return norm / math.sqrt(max(tensor.numel(), 1))


def _ratio(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one / other
