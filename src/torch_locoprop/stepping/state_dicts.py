"""State dicts of ``LocoProp``: whether one fits, and the outer optimizer's part in it.

``optimizer.py`` saves and loads them. The form of the outer optimizer's state is in ``outer_state.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from torch_locoprop.config.components import Components
from torch_locoprop.config.groups import Group, check_division, check_predictive, check_structure
from torch_locoprop.recording.loss_inspection import GivenLoss
from torch_locoprop.stepping.fallback_optimizer import WithFallback
from torch_locoprop.stepping.outer_optimizer import Outer
from torch_locoprop.stepping.outer_state import (
    StateDict,
    put_beside,
    saved_outer,
    with_outer,
    without_absent,
    without_outer,
)


class WithStateDict(WithFallback):
    """Base class of optimizers whose state dicts include those of a fallback and an outer optimizer."""

    _components: Components
    _loss: GivenLoss  # what output_transfer= and loss_fn= tell
    _outer: Outer | None

    def _check_loadable(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if a state dict is not that of an optimizer made like this one."""
        if not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError(
                "This is not the state dict of an optimizer: it has no 'state' and 'param_groups'. "
                "Pass what opt.state_dict() returned."
            )
        outer = saved_outer(state_dict)
        for group in state_dict["param_groups"]:
            if "fallback" not in group:
                raise ValueError("This is not the state dict of a LocoProp optimizer.")
        # Flattening drops the state of an outer optimizer that the loading optimizer does not have.
        has_outer = outer is not None or _has_outer_rates(state_dict["param_groups"])
        if has_outer != (self._outer is not None):
            raise ValueError(
                "The state dict and this optimizer differ in apply=: one has an outer optimizer. Make "
                "this optimizer with the same apply= and outer= as the one that was saved."
            )
        for group in state_dict["param_groups"]:
            if not group["fallback"]:
                self._check_loaded_group({**self.defaults, **group})
        check_division(state_dict["param_groups"], self.param_groups)
        check_structure(state_dict.get("structure", {}), self._structure())
        if self._outer is not None and outer is not None:
            self._outer.check_loadable(outer)

    def _with_outer(self, state_dict: StateDict) -> StateDict:
        """Return a state dict with the state of the outer optimizer, if there is one."""
        if self._outer is None:
            return state_dict
        return with_outer(state_dict, self._outer.optimizers, self._parameters())

    def _without_outer(self, state_dict: StateDict) -> tuple[StateDict, list[StateDict]]:
        """Return the state dict of this optimizer, and those of the outer optimizers."""
        state_dict = without_absent(state_dict)
        if self._outer is None:
            return state_dict, []
        return without_outer(state_dict, self._outer.optimizers, self._parameters())

    def _load_outer(self, state_dicts: list[StateDict]) -> None:
        """Load the state dicts of the outer optimizers, if there are any."""
        if self._outer is not None:
            self._outer.load_state_dict(state_dicts)
            self._put_outer_beside()

    def _put_outer_beside(self) -> None:
        """Put the state of the outer optimizer beside ours, where tools read its entries' names."""
        if self._outer is not None:
            put_beside(self.state, self._outer.optimizers)

    def _parameters(self) -> list[nn.Parameter]:
        """Return all parameters in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def _structure(self) -> dict[str, Any]:
        """Return what a state must have been saved with to fit: shapes, and the kind of fallback."""
        shapes = ["×".join(map(str, p.shape)) for p in self._parameters()]
        return {"shapes": shapes, "fallback": type(self._fallback).__name__}

    def _check_loaded_group(self, group: Group) -> None:
        try:
            self._components.check(group)
            check_predictive(group, self._components, self._loss.known_transfer)
        except ValueError as error:
            raise ValueError(
                f"The state dict does not fit: {error} Make this optimizer with the same "
                "components as the one that was saved."
            ) from error


def _has_outer_rates(groups: Iterable[Group]) -> bool:
    """Return True if groups of a state dict have rates for an outer optimizer, which it then had."""
    return any(group.get("local_lr") is not None for group in groups)
