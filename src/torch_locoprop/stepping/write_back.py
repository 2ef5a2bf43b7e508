"""Writes solutions and solver states to parameters and state: only finite ones, and in place.

Tensors keep their addresses, so that CUDA graphs can read them again. A population of K problems has
one flag for each member; every function here takes ``ok`` as a single flag or as ``[K]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torch_locoprop.fast import dispatch
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.solvers.base import Checked, States


def state_like(parameter: nn.Parameter, state: Tensors, without: str = "") -> Tensors:
    """Return a parameter's state in the parameter's dtype and on its device.

    Args:
        parameter: the parameter, which may have been moved since the last step.
        state: the solver's state of the parameter.
        without: the name of an entry to leave out.
    """
    return {
        key: value.to(parameter.device) if key == "step" else value.to(parameter)
        for key, value in state.items()
        if key != without
    }


def is_finite(new: Tensors, states: Mapping[str, Tensors]) -> Tensor:
    """Return a boolean scalar: True if a solution and the solver states after it are finite."""
    if isinstance(new, Checked):
        return new.finite[0]
    return all_finite(_entries(new, states))


def finite_members(new: Tensors, states: States, members: int) -> Tensor:
    """Return booleans ``[K]``: True for each member whose solution and solver states are finite."""
    if isinstance(new, Checked):
        return new.finite
    tensors = [t for t in _entries(new, states) if t.dim() > 0]
    fast = dispatch.finite(tensors, members)
    if fast is not None:
        return fast
    return torch.stack([t.isfinite().flatten(1).all(1) for t in tensors]).all(0)


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return a boolean scalar: True if every entry of the tensors is finite.

    Only the extreme entries are checked: on a CPU, ``isfinite`` of all entries takes far longer.

    Args:
        tensors: tensors on one device.
    """
    fast = dispatch.finite(tensors)
    if fast is not None:
        return fast[0]
    filled = [t for t in tensors if t.numel() > 0] or [tensors[0].new_zeros(1)]
    if filled[0].is_cpu:
        numbers = [end for t in filled for end in t.aminmax()]
    else:
        numbers = list(torch._foreach_norm(filled, torch.inf))
    return torch.stack([number.to(numbers[0].dtype) for number in numbers]).isfinite().all()


def write_if(ok: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the first tensor of each pair over the second where ``ok`` is true.

    Args:
        ok: one flag, or one for each member ``[K]`` of tensors ``[K, ...]``.
        pairs: new and old tensors of equal shapes.
    """
    if pairs and dispatch.write(ok, pairs):
        torch.autograd.graph.increment_version([old for _, old in pairs])
        return
    for new, old in pairs:
        flag = ok.to(new.device)
        if flag.dim() > 0:
            flag = flag.reshape(-1, *([1] * (new.dim() - 1)))
        torch.where(flag, new, old, out=old)


def state_pairs(state: Tensors, new: Tensors, ok: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of new and old entries of a state, for :func:`write_if`.

    If an entry cannot be written in place, all entries are put into ``state`` at once (if ``ok``), and
    no pairs are returned.

    Args:
        state: the state, which may have no entries yet.
        new: the new entries.
        ok: a boolean scalar: True if the new entries may be used.
    """
    if all(_fits(state.get(key), entry) for key, entry in new.items()):
        return [(entry, state[key]) for key, entry in new.items() if entry is not state[key]]
    if bool(ok):
        state.update(new)
    return []


def _fits(old: Tensor | None, new: Tensor) -> bool:
    """Return True if a state entry can be written in place."""
    return old is not None and (old.shape, old.dtype, old.device) == (
        new.shape,
        new.dtype,
        new.device,
    )


def _entries(new: Tensors, states: Mapping[str, Tensors]) -> list[Tensor]:
    return [*new.values(), *(entry for own in states.values() for entry in own.values())]
