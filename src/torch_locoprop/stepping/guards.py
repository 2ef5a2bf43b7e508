"""What keeps a local solution from overshooting: a cap on its length, and a gate on its local loss.

Both act on the displacement of one layer, weight and bias together, and are off unless asked for. One
factor for both keeps its direction, along which a convex local loss still falls, and lets a bias that
is near zero move as far as the layer may.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.stepping.write_back import all_finite


@dataclass(frozen=True)
class Guarded:
    """A solution that may be applied, and whether it had to be changed for that."""

    new: Tensors
    gated: Tensor | None = None  # the BackProp step stands in for it
    capped: Tensor | None = None  # it was shortened


def guarded(
    problem: LocalProblem, new: Tensors, *, gate: bool, cap: float | None, cap_by: str
) -> Guarded:
    """The solution, or the BackProp step where the gate closes, no longer than the cap allows.

    What they leave alone they leave to the last bit.
    """
    if not gate and cap is None:
        return Guarded(new)
    start, closed, over = problem.start, None, None
    backprop = {name: -problem.eta * g for name, g in problem.first_gradient.items()}
    if gate:
        closed = ~falls(problem, new)
        new = {k: torch.where(closed, start[k] + backprop[k], t) for k, t in new.items()}
    if cap is not None:
        moved = problem.displacement(new)
        weight = (problem.fixed | start | problem.base)["weight"]
        factor = shorten(moved.values(), [weight] if cap_by == "weight" else backprop.values(), cap)
        over = factor < 1
        new = {k: torch.where(over, start[k] + factor * moved[k], t) for k, t in new.items()}
    return Guarded(new, closed, over)


def drop_momentum(states: Iterable[Mapping[str, Tensor]], gated: Tensor | None) -> None:
    """Set momenta to zero where the gate is closed: they would repeat the step it has rejected."""
    for state in states:
        if gated is not None and "momentum" in state:
            state["momentum"].masked_fill_(gated, 0.0)


def falls(problem: LocalProblem, new: Tensors) -> Tensor:
    """Whether the solution is finite and its local objective below that of the start."""
    return all_finite(list(new.values())) & (problem.objective(new) <= 0)


def shorten(moved: Iterable[Tensor], reference: Iterable[Tensor], cap: float) -> Tensor:
    """The factor, at most one, that makes ``‖moved‖ ≤ cap · ‖reference‖``.

    One where the reference is zero, as in LARS: nothing that starts at zero could ever leave it.
    """
    length, norm = _norm(moved), _norm(reference)
    allowed = cap * norm
    return torch.where((length > allowed) & (norm > 0), allowed / length, torch.ones_like(length))


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """Of all their entries together, in float32 at least."""
    norms = [
        torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))
        for t in tensors
    ]
    together: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return together
