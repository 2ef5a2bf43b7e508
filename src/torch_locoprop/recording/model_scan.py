"""Finds the layers of a model that have a local problem, and says why the others have none.

The transfer of each layer is found later, in ``transfer_assignment.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from torch_locoprop.distributed.placements import managed_parameters, shards_of
from torch_locoprop.layers import layer_kind
from torch_locoprop.layers.linear import UNCALLED
from torch_locoprop.paper.names import unknown
from torch_locoprop.paper.tensors import has_values
from torch_locoprop.recording.layer_record import LayerRecord

NOT_GIVEN = "not given to this optimizer"
NEW = "was added after the optimizer was made: make a new optimizer"


@dataclass(frozen=True)
class Unserved:
    """A module with parameters but without a local problem."""

    name: str
    kind: str  # the name of its class
    reason: str  # why it has no local problem
    parameters: tuple[nn.Parameter, ...]


def scan(
    model: nn.Module,
    given: set[nn.Parameter],
    kinds: type[nn.Module] = nn.Module,
    patterns: Sequence[str] | None = None,
) -> tuple[list[LayerRecord], list[Unserved]]:
    """Return the records of all layers with a local problem, and all other modules with parameters.

    Args:
        model: the model.
        given: the parameters that the optimizer trains.
        kinds: only modules of this class may have a local problem.
        patterns: only modules whose name matches one of these may have a local problem; None allows
            all.

    Raises:
        ValueError: if a parameter is not initialized.
    """
    owners: dict[object, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            _check_initialized(name, parameter)
            owners.setdefault(_memory(parameter), []).append(name or "(model)")
    managed = managed_parameters(model)
    served: list[LayerRecord] = []
    unserved: list[Unserved] = []
    for name, module in model.named_modules():
        own = tuple(module.parameters(recurse=False))
        kind = layer_kind(module) if isinstance(module, kinds) else None
        reason = kind.refuses(module) if kind else _no_kind(module)
        shards = None if kind is None or reason else shards_of(module, managed)
        if isinstance(shards, str):
            reason, shards = shards, None
        ours = [p for p in own if p in given]
        reason = reason or _tied(module, owners)
        if patterns is not None and not any(fnmatchcase(name, each) for each in patterns):
            reason = reason or "not among layers="
        reason = reason or (None if ours else NOT_GIVEN)
        if kind and reason is None:
            served.append(LayerRecord(name, module, kind, ours, shards))
        elif own:
            kind_name = type(module).__name__.removeprefix("FSDP")  # fully_shard adds the prefix
            unserved.append(Unserved(name, kind_name, str(reason), own))
    return served, unserved


def newcomers(
    model: nn.Module, served: Iterable[LayerRecord], unserved: Iterable[Unserved]
) -> list[Unserved]:
    """Return the modules that were added to the model since the scan: no optimizer trains them.

    Args:
        model: the model.
        served: the layers with a local problem that the scan found.
        unserved: the other modules that the scan found.
    """
    known = {p for module in unserved for p in module.parameters}
    known |= {p for layer in served for p in layer.module.parameters(recurse=False)}
    found = []
    for name, module in model.named_modules():
        own = tuple(p for p in module.parameters(recurse=False) if p not in known)
        if own:
            found.append(Unserved(name, type(module).__name__, NEW, own))
    return found


def check_complete(model: nn.Module) -> None:
    """Raise ``RuntimeError`` if a model is copied or loaded while its own optimizer is."""
    if "_modules" not in vars(model):
        raise RuntimeError(
            f"A {type(model).__name__} cannot be copied or pickled while it holds the optimizer that "
            "was made for all of it. Keep the optimizer outside of the model, or make it for a module "
            "inside: LocoProp(self.net)."
        )


def check_any_served(served: Sequence[LayerRecord], unserved: Sequence[Unserved]) -> None:
    """Raise ``ValueError``, with reasons, if no layer of the model has a local problem."""
    if not served:
        reasons = "; ".join(f"{m.name or 'model'} ({m.kind}): {m.reason}" for m in unserved[:5])
        raise ValueError(
            "The model has no layer with a local problem; use an ordinary optimizer. "
            f"{reasons or 'It has no parameters.'}"
        )


def layer_patterns(layers: Iterable[str], model: nn.Module) -> tuple[str, ...]:
    """Return ``layers=`` as a tuple of names and patterns, each of which matches a layer.

    Args:
        layers: names of layers or patterns such as ``"encoder.*"``; one string is one pattern.
        model: the model.

    Raises:
        TypeError: if an entry is not a string.
        ValueError: if there is no entry, or if an entry matches no layer.
    """
    given = (
        [layers] if isinstance(layers, str) or not isinstance(layers, Iterable) else list(layers)
    )
    for each in given:
        if not isinstance(each, str):
            raise TypeError(
                "layers= takes names of layers, or patterns such as 'encoder.*', not "
                f"{type(each).__name__}."
            )
    if not given:
        raise ValueError(
            "layers= is empty. Pass None for all layers that can have a local problem."
        )
    patterns = tuple(given)
    names = [name for name, module in model.named_modules() if layer_kind(module) is not None]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(unknown("layer in layers=", pattern, names))
    return patterns


def _check_initialized(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(
            f"Module {name!r} has parameters that are not initialized yet. Run one forward pass "
            "through the model before making the optimizer."
        )


def _no_kind(module: nn.Module) -> str:
    """Return why a module has no local problem if it is of no known layer kind."""
    if isinstance(module, nn.MultiheadAttention):
        return UNCALLED
    return "no local problem for this kind of module"


def _memory(parameter: nn.Parameter) -> object:
    """Return a key that is equal for tied parameters: one parameter, or several in the same memory.

    Parameters are in the same memory after ``decoder.weight.data = encoder.weight.data.t()``.
    """
    plain = type(parameter) is nn.Parameter and parameter.layout == torch.strided
    if not plain or parameter.numel() == 0 or not has_values(parameter):
        return parameter
    place = parameter.data_ptr()
    return (parameter.device, place) if place else parameter


def _tied(module: nn.Module, owners: dict[object, list[str]]) -> str | None:
    """Return why a module has no local problem if it shares a parameter; None if it shares none."""
    for parameter in module.parameters(recurse=False):
        names = owners[_memory(parameter)]
        if len(names) > 1:
            return f"tied: a parameter is shared by {', '.join(map(repr, names))}"
    return None
