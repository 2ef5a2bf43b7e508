"""Detects changes of the gradients of a layer whose tensors are divided among processes.

A process has some rows of a gradient, possibly none. If other code sets a gradient to zero after a
backward pass, the input rows that were recorded before do not count any more. One process sees only
whether its own rows are zero. The calls are set aside until the processes have exchanged this.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from torch_locoprop.distributed.fully_shard import local
from torch_locoprop.paper.tensors import holds
from torch_locoprop.recording.call import Call
from torch_locoprop.recording.gradient_changes import Versions


@dataclass(eq=False)
class ShardedGradients:
    """The gradients of a sharded layer since the last step, and calls that may not count any more."""

    unreduced: bool = False  # fully_shard has not yet added up the gradients of all processes
    _passes: int = 0  # passes since the last step that added up gradients: equal in all processes
    # Calls that were set aside, each list with the number of passes before it.
    _aside: list[tuple[int, list[Call]]] = field(default_factory=list)
    _found: Versions = field(default_factory=list)  # gradients as the running pass found them
    _left: Versions = field(default_factory=list)  # gradients as the last pass left them

    @property
    def begins(self) -> int:
        """The number of passes before the first one whose calls this process has not set aside."""
        return self._aside[-1][0] if self._aside else 0

    def begin_pass(self, gradients: Sequence[Tensor]) -> None:
        """Note the gradients before a pass adds to them."""
        self._found = _versions(gradients)

    def may_be_zeroed(self, gradients: Sequence[Tensor]) -> bool:
        """Return True if, since the last pass, the gradients were written to and are zero now.

        Args:
            gradients: the rows of the gradients that this process has before a pass, possibly none.
        """
        if self.unreduced or _same(self._found, self._left):
            return False
        return not any(holds(local(g).any(), unknown=True) for g in gradients)

    def end_pass(self, gradients: Sequence[Tensor]) -> None:
        """Note the gradients after a pass, and whether ``fully_shard`` has added up all processes."""
        self._left = _versions(gradients)
        self.unreduced = not self._left or _same(self._left, self._found)
        self._passes += not self.unreduced

    def set_aside(self, calls: Sequence[Call]) -> None:
        """Keep calls from before a pass that may have begun with gradients of zeros."""
        self._aside.append((self._passes, list(calls)))

    def taken_back(self, passes: int) -> list[Call]:
        """Return the calls that count after all; those of the first ``passes`` passes do not."""
        found = [call for number, calls in self._aside if number > passes for call in calls]
        self._aside = [each for each in self._aside if each[0] <= passes]
        return found

    def forget_calls(self) -> None:
        """Drop the calls that were set aside."""
        self._aside.clear()

    def clear(self) -> None:
        """Begin anew after a step."""
        self.unreduced, self._passes = False, 0
        self._aside.clear()


def _versions(gradients: Sequence[Tensor]) -> Versions:
    """Return memory and version of sharded gradients.

    An operation on a DTensor raises the version of the DTensor. ``fully_shard`` raises the version of
    the local part.
    """
    found = []
    for g in gradients:
        own = local(g)
        found.append((weakref.ref(own.untyped_storage()), g._version + own._version))
    return found


def _same(one: Versions, other: Versions) -> bool:
    return [(ref(), version) for ref, version in one] == [
        (ref(), version) for ref, version in other
    ]
