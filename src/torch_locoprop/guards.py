"""What keeps a local solution from overshooting: a cap on its length, and a gate on its local loss.

Both act on the displacement of one layer and are off unless asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_locoprop.kernels import on_device, writing
from torch_locoprop.problem import LocalProblem

Tensors = dict[str, Tensor]

CAPS = ("weight", "backprop")


@dataclass(frozen=True)
class Guarded:
    """A solution that may be applied, and whether it had to be changed for that."""

    new: Tensors
    gated: Tensor | None = None  # the BackProp step stands in for it
    capped: Tensor | None = None  # at least one tensor was shortened


def guarded(
    problem: LocalProblem, new: Tensors, *, gate: bool, cap: float | None, cap_by: str
) -> Guarded:
    """The solution, or the BackProp step where the gate closes, no longer than the cap allows."""
    if not gate and cap is None:
        return Guarded(new)
    moved, closed, over = problem.displacement(new), None, None
    backprop = {name: -problem.eta * g for name, g in problem.first_gradient.items()}
    if gate:
        closed = ~falls(problem, new)
        moved = {name: torch.where(closed, backprop[name], t) for name, t in moved.items()}
    if cap is not None:
        at = {name: problem.base.get(name, t) for name, t in problem.start.items()}
        scales = {
            name: shorten(t, at[name] if cap_by == "weight" else backprop[name], cap)
            for name, t in moved.items()
        }
        moved = {name: t * scales[name] for name, t in moved.items()}
        over = torch.stack([scale < 1 for scale in scales.values()]).any()
    found = {name: problem.start[name] + t for name, t in moved.items()}
    return Guarded(found, closed, over)


def falls(problem: LocalProblem, new: Tensors) -> Tensor:
    """Whether the solution is finite and its local objective below that of the start."""
    return all_finite(list(new.values())) & (problem.objective(new) <= 0)


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether nothing in them, which are on one device, is infinite or not a number.

    By their largest entries: on a CPU, looking at each takes far longer.
    """
    if on_device.takes(tensors):
        return writing.finite(tensors)[0]
    filled = [t for t in tensors if t.numel() > 0] or [tensors[0].new_zeros(1)]
    if filled[0].is_cpu:
        numbers = [end for t in filled for end in t.aminmax()]
    else:
        numbers = list(torch._foreach_norm(filled, torch.inf))
    return torch.stack([number.to(numbers[0].dtype) for number in numbers]).isfinite().all()


def write_if(ok: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the first of each pair over the second one if all is well."""
    tensors = [tensor for pair in pairs for tensor in pair]
    if on_device.takes(tensors) and all(t.device == ok.device for t in tensors):
        writing.write(ok.reshape(1), pairs)
        torch.autograd.graph.increment_version([old for _, old in pairs])
        return
    for new, old in pairs:
        torch.where(ok.to(new.device), new, old, out=old)


def shorten(moved: Tensor, reference: Tensor, cap: float) -> Tensor:
    """The factor, at most one, that makes ``‖moved‖ ≤ cap · ‖reference‖``."""
    allowed = cap * torch.linalg.vector_norm(reference)
    length = torch.linalg.vector_norm(moved)
    return torch.where(length > allowed, allowed / length, torch.ones_like(length))
