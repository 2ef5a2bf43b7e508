"""Parameter groups: what a user may pass, divided into local problems and the fallback's share."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.config.settings import Components, unknown
from torch_locoprop.paper.fisher import PREDICTIVE
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording.layer_record import ServedLayer
from torch_locoprop.solvers import Numbers

Group = dict[str, Any]

_BOOKKEEPING = ("params", "name", "initial_lr", "local_lr", "fallback", "steps", "state_of")


def merged(defaults: Mapping[str, Any], group: Mapping[str, Any]) -> Group:
    """A group with the defaults for all it does not set."""
    if not isinstance(group, Mapping):
        raise TypeError(
            "param_groups= takes dictionaries with 'params' and settings of their own, not "
            f"{type(group).__name__}."
        )
    return {**defaults, **group}


def checked_group(
    group: Mapping[str, Any], model: nn.Module, components: Components, output: Transfer | None
) -> Group:
    """A group with its settings checked, names for its components, and a list of parameters."""
    if "params" not in group:
        raise ValueError("A parameter group has no 'params': the parameters it is for.")
    for key in group:
        if key not in components.settings and key not in _BOOKKEEPING:
            raise ValueError(unknown("setting in a parameter group", key, components.settings))
    checked = components.check(group)
    params = group["params"]
    params = [params] if isinstance(params, Tensor) else list(params)
    checked["params"] = [p[1] if isinstance(p, tuple) else p for p in params]
    own = set(model.parameters())
    if any(p not in own for p in checked["params"]):
        raise ValueError("A parameter group holds parameters that are not the model's.")
    check_predictive(checked, components, output)
    return checked


def check_predictive(
    group: Mapping[str, Any], components: Components, output: Transfer | None
) -> None:
    """Raise if labels would have to be drawn from a distribution that is not known."""
    needs = components.variant(group).target.needs | components.regularizer(group).needs
    if "fisher" in needs and (output is None or output.name not in PREDICTIVE):
        raise ValueError(
            f"variant={group['variant']!r} with regularizer={group['regularizer']!r} draws "
            "labels from the model's predictive distribution. Say which by loss_fn=, or by "
            f"output_transfer= ({', '.join(PREDICTIVE)})."
        )


LAYER_SETTINGS = (
    "variant",
    "solver",
    "regularizer",
    "gamma",
    "local_steps",
    "local_decay",
    "local_reduction",
    "local_products",
    "maximize",
    "every",
    "max_rows",
    "gate",
    "cap",
    "cap_by",
)


def check_agreement(layers: Iterable[ServedLayer], group_of: Mapping[nn.Parameter, Group]) -> None:
    """Weight and bias are one local problem: their groups may differ in the solver's numbers only."""
    for layer in layers:
        first, *others = (group_of[p] for p in layer.given)
        names = (*LAYER_SETTINGS, *(["lr"] if first["solver"].lower().startswith("exact") else []))
        for other in others:
            differing = [name for name in names if first[name] != other[name]]
            if differing:
                raise ValueError(
                    f"Weight and bias of layer {layer.name!r} solve one local problem, but their "
                    f"groups differ in {', '.join(differing)}. Give both the same."
                )


def check_division(saved: Iterable[Group], here: Iterable[Group]) -> None:
    """Raise if a state dict's groups have other parameters, or others to train them."""
    divisions = [
        [(g["fallback"], g["fallback"] and "local_lr" in g, len(g["params"])) for g in groups]
        for groups in (saved, here)
    ]
    if divisions[0] != divisions[1]:
        raise ValueError(
            "The state dict has other groups of parameters than this optimizer. Make it with the "
            "same layers=, param_groups=, outer= and fallback= as the one that was saved."
        )


def warn_of_ignored(
    groups: Iterable[Mapping[str, Any]], checked: Iterable[Group], local: set[nn.Parameter]
) -> None:
    """Settings given to parameters that fall back have no effect: the fallback has its own."""
    for given, group in zip(groups, checked, strict=True):
        ignored = sorted(set(given) - set(_BOOKKEEPING))
        count = sum(p not in local for p in group["params"])
        if ignored and count:
            warnings.warn(
                f"{count} parameters of a group have no local problem; its {', '.join(ignored)} "
                "do not apply to them. Set those in fallback=.",
                stacklevel=4,
            )


def restricted(groups: Iterable[Group], parameters: set[nn.Parameter]) -> list[Group]:
    """The groups without parameters outside the set; groups that are left empty are dropped."""
    inside = [
        {**group, "params": [p for p in group["params"] if p in parameters]} for group in groups
    ]
    return [group for group in inside if group["params"]]


def numbers(group: Group) -> Numbers:
    """The solver's numbers of a group.

    Where an outer optimizer makes the step, schedules move its learning rate, and the local problem
    keeps the one it began with.
    """
    local = group.get("local_lr")
    lr = group["lr"] if local is None else local
    return Numbers(lr, group["momentum"], group["decay"], group["eps"])


def decayed(name: str, parameter: nn.Parameter, group: Group) -> Tensor:
    """Where the local iterations start: decoupled weight decay, for weights and not for biases."""
    if name != "weight" or group["weight_decay"] == 0:
        return parameter.detach()
    lr, weight_decay = group["lr"], group["weight_decay"]
    if isinstance(lr, Tensor) and not lr.is_cpu:  # one kernel
        return torch.addcmul(parameter, parameter, lr, value=-weight_decay)
    start: Tensor = parameter * (1 - lr * weight_decay)
    return start
