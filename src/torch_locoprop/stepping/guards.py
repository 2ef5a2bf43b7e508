"""Guards against local solutions that overshoot: ``cap=`` limits their length, ``gate=`` rejects them.

Both guards act on the displacement of one layer, and both are off by default. The cap scales weight
and bias by one common factor. A common factor keeps the direction of the displacement, along which a
convex local loss still decreases, and lets a bias near zero move as far as the weight allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_locoprop.fast import dispatch
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.objective import objective
from torch_locoprop.paper.tensors import Tensors


@dataclass(frozen=True)
class Guarded:
    """A solution after the guards, with boolean scalars that say what they changed."""

    new: Tensors
    gated: Tensor | None = None  # the BackProp step replaced the solution; None without gate=
    capped: Tensor | None = None  # the displacement was shortened; None without cap=


def guarded(
    problem: LocalProblem, new: Tensors, *, gate: bool, cap: float | None, cap_by: str
) -> Guarded:
    """Return the solution after gate and cap. A solution that they accept keeps every bit.

    Args:
        problem: the local problem.
        new: the solution of the problem.
        gate: replace the solution by the BackProp step if it does not decrease the objective.
        cap: the longest displacement, relative to the norm that ``cap_by`` names; None: no limit.
        cap_by: "weight" for the norm of the weight, otherwise that of the BackProp step.
    """
    start, gated, capped = problem.start, None, None
    backprop = problem.backprop_step
    if gate:
        gated = ~decreases_objective(problem, new)
        new = {k: torch.where(gated, start[k] + backprop[k], t) for k, t in new.items()}
    if cap is not None:
        moved = problem.displacement(new)
        reference = [problem.weight] if cap_by == "weight" else backprop.values()
        factor = cap_factor(problem.norm(moved.values()), problem.norm(reference), cap)
        capped = factor < 1
        new = {k: torch.where(capped, start[k] + factor * moved[k], t) for k, t in new.items()}
    return Guarded(new, gated, capped)


def drop_momentum(states: Iterable[Mapping[str, Tensor]], gated: Tensor | None) -> None:
    """Set momenta to zero if the gate has rejected the solution, because they point along it.

    Args:
        states: the solver states of a layer's tensors.
        gated: a boolean scalar: True if the solution was rejected; None without ``gate=``.
    """
    for state in states:
        if gated is not None and "momentum" in state:
            state["momentum"].masked_fill_(gated, 0.0)


def decreases_objective(problem: LocalProblem, new: Tensors) -> Tensor:
    """Return a boolean scalar: True if a solution is finite and does not raise the objective."""
    return dispatch.finite(list(new.values())) & (objective(problem, new) <= 0)


def cap_factor(length: Tensor, norm: Tensor, cap: float) -> Tensor:
    """Return the largest factor, at most 1, with ``factor · length ≤ cap · norm``.

    The factor is 1 if the reference is zero, as in LARS: otherwise a weight that starts at zero could
    never move.
    """
    allowed = cap * norm
    return torch.where((length > allowed) & (norm > 0), allowed / length, torch.ones_like(length))
