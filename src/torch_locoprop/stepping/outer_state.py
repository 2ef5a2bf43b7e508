"""The states of outer optimizers inside our state dict.

``torch.distributed.checkpoint`` and other tools keep two parts of a state dict: the entries of
``state`` for each parameter, by the parameter's name, and ``param_groups``. So the entries of an
outer optimizer are stored beside ours, under names such as ``outer.exp_avg``. The rest of its state
dict, such as its groups, is stored in our first group.

With ``flatten_optimizer_state_dict=True``, PyTorch reads from the loading optimizer which entries to
load, not from the state dict: from ``state`` and ``param_groups`` themselves. So the entries are there,
too, and the first group has a place for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torch_locoprop.config.groups import OF_OUTER, OUTER_PREFIX

StateDict = dict[str, Any]


def own_entries(state: Mapping[str, Any]) -> StateDict:
    """Return the entries of a parameter's state that are not those of an outer optimizer."""
    return {key: entry for key, entry in state.items() if not key.startswith(OUTER_PREFIX)}


def put_beside(state: MutableMapping[Any, StateDict], optimizers: Sequence[Optimizer]) -> None:
    """Put the states of outer optimizers beside ours.

    Args:
        state: the state of our optimizer by parameter.
        optimizers: the outer optimizers.
    """
    for optimizer in optimizers:
        for p, entries in optimizer.state.items():
            if isinstance(p, nn.Parameter):
                state[p].update({f"{OUTER_PREFIX}{name}": entry for name, entry in entries.items()})


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
    state: dict[Any, StateDict] = {i: own_entries(own) for i, own in state_dict["state"].items()}
    rest = []
    for optimizer in optimizers:
        saved = optimizer.state_dict()
        others = dict(saved["state"])
        for i, p in _by_id(saved, optimizer):
            entries = {f"{OUTER_PREFIX}{name}": entry for name, entry in others.pop(i, {}).items()}
            if entries:
                state.setdefault(number[p], {}).update(entries)
        rest.append({**saved, "state": others})
    first, *groups = state_dict["param_groups"]
    return {**state_dict, "state": state, "param_groups": [{**first, OF_OUTER: rest}, *groups]}


def without_absent(state_dict: StateDict) -> StateDict:
    """Return a state dict without the states that were not saved.

    Where a flattened state dict has no entry, PyTorch puts an empty dict in its place. A parameter had
    no state, ours or that of an outer optimizer, if all entries are such dicts.
    """
    state = {}
    for i, entries in state_dict["state"].items():
        ours = own_entries(entries)
        parts = ours, {key: e for key, e in entries.items() if key not in ours}
        saved = [p for p in parts if not all(isinstance(e, dict) and not e for e in p.values())]
        state[i] = {key: e for part in saved for key, e in part.items()}
    return {**state_dict, "state": state}


def saved_outer(state_dict: Mapping[str, Any]) -> list[StateDict] | None:
    """Return the state dicts of the outer optimizers, possibly without entries; None if there are none.

    State dicts of early versions have complete state dicts of the outer optimizers beside the groups.
    """
    groups: Sequence[StateDict] = state_dict["param_groups"]
    found: list[StateDict] | None = state_dict.get(
        OF_OUTER, groups[0].get(OF_OUTER) if groups else None
    )
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
    first, *groups = state_dict["param_groups"]
    own_groups = [{**first, OF_OUTER: None}, *groups]
    if OF_OUTER in state_dict:
        early = {key: value for key, value in state_dict.items() if key != OF_OUTER}
        return {**early, "param_groups": own_groups}, found
    name_of = dict(zip(params, (i for g in (first, *groups) for i in g["params"]), strict=True))
    own, entries = {}, {}
    for i, state in state_dict["state"].items():
        own[i] = own_entries(state)
        taken = {
            k.removeprefix(OUTER_PREFIX): e for k, e in state.items() if k.startswith(OUTER_PREFIX)
        }
        if taken:
            entries[i] = taken
    states = []
    for optimizer, rest in zip(optimizers, found, strict=True):
        theirs = {
            i: entries[name_of[p]] for i, p in _by_id(rest, optimizer) if name_of[p] in entries
        }
        # Tools leave out what is empty.
        states.append({**rest, "state": {**rest.get("state", {}), **theirs}})
    return {**state_dict, "state": own, "param_groups": own_groups}, states


def _by_id(saved: StateDict, optimizer: Optimizer) -> Iterator[tuple[Any, nn.Parameter]]:
    """Yield the parameters of an optimizer, each with its id in a state dict."""
    ids = (i for group in saved["param_groups"] for i in group["params"])
    own = (p for group in optimizer.param_groups for p in group["params"])
    return zip(ids, own, strict=True)
