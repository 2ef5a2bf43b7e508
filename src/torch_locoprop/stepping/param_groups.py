"""Parameter groups of ``LocoProp``: their checks, groups that are added later, groups of ``outer=``.

Which settings a group may have, and how it is divided, is in ``config/groups.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from torch_locoprop.config.groups import (
    BOOKKEEPING,
    Group,
    checked_group,
    restricted,
    warn_of_ignored,
)
from torch_locoprop.recording.model_scan import scan
from torch_locoprop.stepping.layer_optimizer import LayerOptimizer


class WithParamGroups(LayerOptimizer):
    """Base class of :class:`~torch_locoprop.LocoProp` that takes parameter groups, also later."""

    def _checked(self, group: Mapping[str, Any]) -> Group:
        return checked_group(group, self._model, self._components, self._loss.known_transfer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; parameters of it that have no local problem go to the fallback."""
        if not self._attached:  # called by the constructor, which has checked and divided them
            super().add_param_group(param_group)
            return
        if self._outer is not None:
            raise ValueError(
                "The outer optimizer trains the parameters it was made for. To add some, make a new "
                "LocoProp."
            )
        if any(layer.calls for layer in self._layers):
            raise RuntimeError(
                "A group was added between backward() and step(): what the layers recorded would be "
                "lost. Call step() or zero_grad() first."
            )
        group = self._checked(BOOKKEEPING | self._given.group(param_group))
        known = {p for own in self.param_groups for p in own["params"]}
        if known & set(group["params"]):
            raise ValueError("some parameters appear in more than one parameter group")
        served, _ = scan(self._model, known | set(group["params"]), patterns=self._patterns)
        local = {p for layer in served for p in layer.tensors.values()}
        self._check_agreement(served, self._group_of() | dict.fromkeys(group["params"], group))
        warn_of_ignored([param_group], [group], local)
        for part in restricted([group], local):
            super().add_param_group(part)
        self._attach()
        rest = [p for p in group["params"] if p not in local]
        self._add_to_fallback(rest, self._fallback_factory)

    def _add_to_outer(self, checked: list[Group], rest: list[nn.Parameter]) -> None:
        """Put the parameters without a local problem into groups that ``outer=`` trains."""
        if self._fallback_factory is not None or any(group["maximize"] for group in checked):
            raise ValueError(
                "outer= trains all parameters, those without a local problem too. Leave fallback= and "
                "maximize= out, or give outer= the parameters of the layers alone."
            )
        for group in restricted(checked, set(rest)):  # schedules of lr scale outer's rates
            rate = {"lr": group["lr"], "local_lr": float(group["lr"])}
            self.param_groups.append({"params": group["params"], **rate, "fallback": True})
