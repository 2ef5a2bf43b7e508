"""Detects that other code scales a layer's ``p.grad`` after a backward pass, or sets it to zero.

``layer_record.py`` decides what follows from such a change for the recorded calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from torch_locoprop.paper.tensors import holds

# Memory and version of each gradient, except sparse ones. A weak reference to the tensor itself would
# keep torch.utils.swap_tensors from changing its dtype.
Versions = list[tuple[weakref.ref[torch.UntypedStorage], int]]


class GradientNorms:
    """The norms of some parameters' gradients as a backward pass left them, to detect their scaling."""

    def __init__(self) -> None:
        self.known: dict[nn.Parameter, Tensor] = {}

    def remember(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember the norms of the gradients."""
        self.known = {
            p: torch.linalg.vector_norm(
                p.grad, dtype=torch.promote_types(p.grad.dtype, torch.float32)
            )
            for p in parameters
            if p.grad is not None
        }

    def factor(self, parameters: Iterable[nn.Parameter]) -> Tensor | None:
        """Return the factor by which the gradients were scaled since their norms were remembered.

        Unscaling and clipping multiply ``p.grad`` by a factor, which shows in its norm. (It does not
        always show in its version: a ``GradScaler`` leaves that unchanged.) The new norms are
        remembered.

        Returns:
            A scalar on the device, without a host sync; None if no norm was remembered.
        """
        then = self.known
        self.remember(parameters)
        now = self.known
        both = [p for p in now if p in then]
        if not both:
            return None
        before, after = (torch.stack([norms[p] for p in both]).norm() for norms in (then, now))
        return torch.where(before > 0, after / before, torch.ones_like(after))


def were_zeroed(gradients: Sequence[Tensor], left: Versions) -> bool:
    """Return True if there are no gradients, or they were set to zero since a backward pass left them.

    Args:
        gradients: the gradients of a layer's parameters.
        left: what the pass left.
    """
    if not gradients:
        return True
    known = [(ref(), version) for ref, version in left]
    if len(gradients) == len(known) and all(
        g.layout == torch.strided and g.untyped_storage() is before and g._version == then
        for g, (before, then) in zip(gradients, known, strict=True)
    ):
        return False
    return not any(holds(g.any(), unknown=True) for g in gradients)
