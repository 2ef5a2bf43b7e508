"""Several optimizers, each with parameters of its own, as one optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """Step several optimizers as one.

    The parameter groups are those of all parts in their order, so schedulers and state dicts work as
    for any optimizer.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share_groups_and_state()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every part."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share_groups_and_state()

    def _share_groups_and_state(self) -> None:
        """Let the parts work on the groups and states of this optimizer, not on copies."""
        first = 0
        for part in self._parts:
            last = first + len(part.param_groups)
            part.param_groups = self.param_groups[first:last]
            part.state = self.state
            first = last
