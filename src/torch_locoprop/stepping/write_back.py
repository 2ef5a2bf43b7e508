"""What a solver remembers of a parameter between steps: read in its place, written in place."""

from __future__ import annotations

from torch import Tensor, nn

from torch_locoprop.paper.tensors import Tensors


def like(parameter: nn.Parameter, state: Tensors, without: str = "") -> Tensors:
    """A parameter's state in its dtype and on its device, should the model have been moved."""
    return {
        key: value.to(parameter.device) if key == "step" else value.to(parameter)
        for key, value in state.items()
        if key != without
    }


def places(state: Tensors, new: Tensors, ok: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The new entries, and the old ones that they are to be written over if all was finite.

    In place where they fit, so that a step captured as a graph goes on from where it was; where they
    do not, they are kept here.
    """
    if all(_fits(state.get(key), entry) for key, entry in new.items()):
        return [(entry, state[key]) for key, entry in new.items() if entry is not state[key]]
    if bool(ok):
        state.update(new)
    return []


def _fits(old: Tensor | None, new: Tensor) -> bool:
    """Whether a state entry can be written in place."""
    return old is not None and (old.shape, old.dtype, old.device) == (
        new.shape,
        new.dtype,
        new.device,
    )
