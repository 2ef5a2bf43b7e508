"""What other code does to a layer's ``p.grad`` after a backward pass: scale it, or set it to zero.

A layer's record compares the gradients with what it remembers of them here. What follows from a
change for the recorded calls is decided in ``layer_record.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torch_locoprop.paper.tensors import holds


class GradientChanges:
    """The gradients of some parameters as a backward pass left them, to detect later changes."""

    def __init__(self) -> None:
        # Memory and version of each gradient. A weak reference to the tensor itself would keep
        # torch.utils.swap_tensors from changing its dtype.
        self._versions: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self._norms: dict[nn.Parameter, Tensor] = {}

    def remember(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember which tensors the gradients are, and their versions; sparse ones are not known."""
        gradients = (p.grad for p in parameters if p.grad is not None)
        self._versions = [
            (weakref.ref(g.untyped_storage()), g._version)
            for g in gradients
            if g.layout == torch.strided
        ]

    def remember_norms(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember the norms of the gradients."""
        self._norms = {
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
        then = self._norms
        self.remember_norms(parameters)
        now = self._norms
        both = [p for p in now if p in then]
        if not both:
            return None
        before, after = (torch.stack([norms[p] for p in both]).norm() for norms in (then, now))
        return torch.where(before > 0, after / before, torch.ones_like(after))

    def were_zeroed(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return True if all gradients are None, or were set to zero since they were remembered."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return True
        known = [(ref(), version) for ref, version in self._versions]
        if len(gradients) == len(known) and all(
            g.layout == torch.strided and g.untyped_storage() is before and g._version == then
            for g, (before, then) in zip(gradients, known, strict=True)
        ):
            return False
        return not any(holds(g.any(), unknown=True) for g in gradients)
