"""The states of outer optimizers inside our state dict.

``torch.distributed.checkpoint`` and other tools keep two parts of a state dict: the entries of
``state`` for each parameter, by the parameter's name, and ``param_groups``. So the entries of an
outer optimizer are stored beside ours, under names such as ``outer.exp_avg``. The rest of its state
dict, such as its groups, is stored in our first group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

_KEY = "outer"
_PREFIX = "outer."
StateDict = dict[str, Any]


def with_outer(
    state_dict: StateDict, optimizers: Sequence[Optimizer], params: Sequence[nn.Parameter]
) -> StateDict:
    """Return a state dict with the states of outer optimizers in it.

    Args:
        state_dict: the state dict of our optimizer.
        optimizers: the outer optimizers.
        params: the parameters in the order of our groups.
    """
    number = {p: i for i, p in enumerate(params)}
    state, rest = {i: dict(own) for i, own in state_dict["state"].items()}, []
    for optimizer in optimizers:
        saved = optimizer.state_dict()
        others = dict(saved["state"])
        for i, p in _by_id(saved, optimizer):
            entries = {f"{_PREFIX}{name}": entry for name, entry in others.pop(i, {}).items()}
            if entries:
                state.setdefault(number[p], {}).update(entries)
        rest.append({**saved, "state": others})
    first, *groups = state_dict["param_groups"]
    return {**state_dict, "state": state, "param_groups": [{**first, _KEY: rest}, *groups]}


def saved_outer(state_dict: Mapping[str, Any]) -> list[StateDict] | None:
    """Return the state dicts of the outer optimizers, possibly without entries; None if there are none.

    State dicts of early versions have complete state dicts of the outer optimizers beside the groups.
    """
    groups: Sequence[StateDict] = state_dict["param_groups"]
    found: list[StateDict] | None = state_dict.get(_KEY, groups[0].get(_KEY) if groups else None)
    return found


def without_outer(
    state_dict: StateDict, optimizers: Sequence[Optimizer], params: Sequence[nn.Parameter]
) -> tuple[StateDict, list[StateDict]]:
    """Return our own state dict, and those of the outer optimizers.

    Args:
        state_dict: a state dict that fits the optimizers.
        optimizers: the outer optimizers.
        params: the parameters in the order of our groups.
    """
    found = saved_outer(state_dict)
    assert found is not None
    if _KEY in state_dict:
        return {key: value for key, value in state_dict.items() if key != _KEY}, found
    first, *groups = state_dict["param_groups"]
    name_of = dict(zip(params, (i for g in (first, *groups) for i in g["params"]), strict=True))
    own, entries = {}, {}
    for i, state in state_dict["state"].items():
        own[i] = {key: e for key, e in state.items() if not key.startswith(_PREFIX)}
        taken = {k.removeprefix(_PREFIX): e for k, e in state.items() if k.startswith(_PREFIX)}
        if taken:
            entries[i] = taken
    states = []
    for optimizer, rest in zip(optimizers, found, strict=True):
        theirs = {
            i: entries[name_of[p]] for i, p in _by_id(rest, optimizer) if name_of[p] in entries
        }
        # Tools leave out what is empty.
        states.append({**rest, "state": {**rest.get("state", {}), **theirs}})
    first = {key: value for key, value in first.items() if key != _KEY}
    return {**state_dict, "state": own, "param_groups": [first, *groups]}, states


def _by_id(saved: StateDict, optimizer: Optimizer) -> Iterator[tuple[Any, nn.Parameter]]:
    """Yield the parameters of an optimizer, each with its id in a state dict."""
    ids = (i for group in saved["param_groups"] for i in group["params"])
    own = (p for group in optimizer.param_groups for p in group["params"])
    return zip(ids, own, strict=True)
