"""The value of a local problem's objective, for guards and diagnostics; no solver needs it.

The problem and the gradient of its loss are in ``local_problem.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_locoprop.paper.gram import Gram
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Tensors, at_least_float32

_AT_ONCE = 2**18  # number of entries that are converted to float64 at a time


def objective(problem: LocalProblem, at: Tensors) -> Tensor:
    """Return the objective minus its value at the start.

    The difference is the linear term ``⟨δ₀ᵀX, W̃ − W⟩``, plus what the loss adds to it by its curvature,
    plus the regularizer. For small displacements the curvature term is a small difference of
    large numbers. The change of the pre-activations is therefore computed from the
    displacement, and the terms are computed in float64.

    Args:
        problem: the local problem.
        at: the tensors W̃.
    """
    moved = problem.displacement(at)
    wide = {name: at_least_float32(t) for name, t in moved.items()}
    linear = torch.stack([(problem.first_gradient[k] * wide[k]).sum() for k in wide]).sum()
    penalty = problem.regularizer.value(moved, problem.eta, problem.metric)
    if isinstance(problem.x, Gram):
        bent = problem.x.to(linear.dtype).gradient(wide)
        half = 0.5 * torch.stack([(bent[k] * wide[k]).sum() for k in wide]).sum()
        quadratic = problem.of_all_processes(problem.row_weight * half)
        return problem.of_all_outputs(linear + quadratic + penalty)
    change = problem.row_change(moved)
    if problem.loss.is_quadratic(problem.transfer):
        beyond_linear = 0.5 * change.square().sum(-1)
    else:
        parts = (problem.a0, problem.target_rows.expand_as(problem.a0), change)
        most = max(_AT_ONCE * change.shape[-2] // max(change.numel(), 1), 1)
        some = zip(*(torch.split(t, most, -2) for t in parts), strict=True)
        beyond_linear = torch.cat(
            [_beyond_linear(problem, *map(_precise, each)) for each in some], -1
        )
    curved = problem.of_all_processes(_weighted_sum(problem, beyond_linear).to(linear))
    return problem.of_all_outputs(linear + curved + penalty)


def _beyond_linear(problem: LocalProblem, a0: Tensor, target: Tensor, change: Tensor) -> Tensor:
    """Return the loss of each row after a change of its pre-activations, minus the linear part."""
    before, after = (problem.loss.value(a, target, problem.transfer) for a in (a0, a0 + change))
    slope = problem.loss.residual(a0, target, problem.transfer)
    return after - before - (slope * change).sum(-1)


def objective_at_start(problem: LocalProblem) -> Tensor:
    """Return the objective at the start; NaN if it is not known.

    The value is not known if the target needs ∂L/∂a or ∂L/∂y of each row and they were not recorded, on
    this or another process. Some losses leave out a constant, and so does this value, except where
    the residual is ``a − a*``.
    """
    rows = _losses_at_start(problem)
    unknown = next(iter(problem.start.values())).new_full((), torch.nan)
    return problem.of_all_processes(
        unknown if rows is None else _weighted_sum(problem, rows).to(unknown)
    )


def _losses_at_start(problem: LocalProblem) -> Tensor | None:
    """Return the local loss of each row at the start ``[..., rows]``; None if it is not known."""
    g, target = problem.g, problem.target
    if target.starts_at_zero and g is None:
        g = None if problem.recorded is None else problem.recorded()
        if g is None:
            return None
        if problem.loss.is_quadratic(problem.transfer):
            # The residual of a row follows from its g as the first gradient follows from G.
            first = target.first_gradient({"weight": g.mT}, problem.gamma, problem.fisher)
            return None if first is None else 0.5 * first["weight"].square().sum(-2)
    given = {"g": g, "v": problem.v}
    if isinstance(problem.x, Gram) or any(given.get(name) is None for name in target.needs):
        return None
    goal = target(problem.a0, problem.transfer, g, problem.v, problem.gamma)
    return problem.loss.value(problem.a0, goal, problem.transfer)


def _weighted_sum(problem: LocalProblem, rows: Tensor) -> Tensor:
    """Return the sum of values of rows ``[..., rows]`` with the row weights, in float64."""
    weights = problem.row_weights
    weight = problem.row_weight if weights is None else _precise(weights).squeeze(-1)
    return (weight * _precise(rows)).sum()


def _precise(tensor: Tensor) -> Tensor:
    """Return a tensor in float64; from Apple's GPUs, which have no float64, on the host."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()
