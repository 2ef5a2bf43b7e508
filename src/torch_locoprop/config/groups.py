"""Parameter groups: what a user may pass, divided between local problems and the fallback."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn

from torch_locoprop.config.components import Components
from torch_locoprop.config.settings import LAYER_SETTINGS, check_names
from torch_locoprop.paper.fisher import PREDICTIVE
from torch_locoprop.paper.transfers import Transfer

Group = dict[str, Any]

BOOKKEEPING: dict[str, Any] = {
    "local_lr": None,  # lr of the local problem, where an outer optimizer's schedule moves lr
    "fallback": False,  # True: the group belongs to the fallback
    "steps": 0,  # steps taken so far
    "state_of": None,  # the solver that made the states of the parameters, or EMPTY
}
EMPTY = "nothing"  # the states have no content
# With outer=, a key of the first group. Its value is None; in a state dict, it is the state dict of the
# outer optimizer without the states of parameters.
OF_OUTER = "outer"
OUTER_PREFIX = "outer."  # the names of the outer optimizer's entries in the state of a parameter
_NO_SETTINGS = ("params", "name", "initial_lr", OF_OUTER, *BOOKKEEPING)


def checked_group(
    group: Mapping[str, Any], model: nn.Module, components: Components, output: Transfer | None
) -> Group:
    """Return a group with its settings checked, names for components, and a list of parameters.

    Raises:
        ValueError: if a setting is unknown or out of range, or a parameter is not the model's.
    """
    if "params" not in group:
        raise ValueError("A parameter group has no 'params': the parameters it is for.")
    check_names(group, "setting in a parameter group", _NO_SETTINGS)
    if group.get(OF_OUTER) is not None:
        raise ValueError("outer= is an argument of LocoProp, not a setting of a parameter group.")
    if group.get("fallback"):
        raise ValueError(
            "A parameter group has fallback=True: it is a group of a fallback optimizer. Leave it out, "
            "or give its parameters in a group of their own."
        )
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
    """Raise ``ValueError`` if a group needs sampled labels and their distribution is not known.

    Args:
        group: the settings of the group.
        components: what the names in the group stand for.
        output: the transfer of the model's output, which defines the distribution; None if not known.
    """
    needs = components.variant(group).target.needs | components.regularizer(group).needs
    if "fisher" in needs and (output is None or output.name not in PREDICTIVE):
        raise ValueError(
            f"variant={group['variant']!r} with regularizer={group['regularizer']!r} draws "
            "labels from the model's predictive distribution. Say which by loss_fn=, or by "
            f"output_transfer= ({', '.join(PREDICTIVE)})."
        )


def check_agreement(
    layer: str, groups: Sequence[Group], components: Components, *, later: bool = False
) -> None:
    """Raise ``ValueError`` unless the groups of a layer's weight and bias have equal settings.

    Only settings that a tensor may have for itself, such as ``lr`` of iterative solvers, may differ.

    Args:
        layer: the layer's name.
        groups: the group of each of its parameters.
        components: what the names in the groups stand for.
        later: compare only the numbers of a solver that moves weight and bias as one matrix; of other
            settings that were changed since the constructor, those of the weight count.
    """
    first, *others = groups
    names = components.solver(first).joint_settings
    names = names if later else (*LAYER_SETTINGS, *names)
    for other in others:
        differing = [name for name in names if first[name] != other[name]]
        if differing:
            raise ValueError(
                f"Weight and bias of layer {layer!r} solve one local problem, but their groups "
                f"differ in {', '.join(differing)}. Give both the same."
            )


def check_division(saved: Iterable[Group], here: Iterable[Group]) -> None:
    """Raise ``ValueError`` if a state dict's groups do not correspond to those of this optimizer.

    Two groups correspond if they have the same number of parameters and are trained by the same
    optimizer: local problems, the fallback or an outer optimizer.

    Args:
        saved: the groups of the state dict.
        here: the groups of this optimizer.
    """
    divisions = [
        [(g["fallback"], g["fallback"] and "local_lr" in g, len(g["params"])) for g in groups]
        for groups in (saved, here)
    ]
    if divisions[0] != divisions[1]:
        raise ValueError(
            "The state dict has other groups of parameters than this optimizer. Make it with the "
            "same layers=, param_groups=, outer= and fallback= as the one that was saved."
        )


def check_structure(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a state was saved with other shapes or another kind of fallback.

    Args:
        saved: the structure in the state dict; empty in those of early versions.
        here: the structure of this optimizer.
    """
    pairs = zip(saved.get("shapes", []), here["shapes"], strict=False)
    for number, (before, now) in enumerate(pairs):
        if before != now:
            raise ValueError(
                f"The state dict is that of another model: its parameter {number} is {before}, and "
                f"here it is {now}."
            )
    fallback = saved.get("fallback", here["fallback"])
    if fallback != here["fallback"]:
        raise ValueError(
            f"The state dict has the state of a fallback of type {fallback}, and this optimizer's is "
            f"of type {here['fallback']}. Give the same fallback= as before."
        )


def warn_of_ignored(
    groups: Iterable[Mapping[str, Any]], checked: Iterable[Group], local: set[nn.Parameter]
) -> None:
    """Warn of settings given to parameters of the fallback, which has settings of its own.

    Args:
        groups: the groups as the user gave them.
        checked: the same groups with all settings.
        local: the parameters with a local problem.
    """
    for given, group in zip(groups, checked, strict=True):
        ignored = sorted(set(given) - set(_NO_SETTINGS))
        count = sum(p not in local for p in group["params"])
        if ignored and count:
            warnings.warn(
                f"{count} parameters of a group have no local problem; its {', '.join(ignored)} "
                "do not apply to them. Set those in fallback=.",
                stacklevel=3,
            )


def restricted(groups: Iterable[Group], parameters: set[nn.Parameter]) -> list[Group]:
    """Return the groups with only those of their parameters that are in a set; drop empty groups."""
    inside = [
        {**group, "params": [p for p in group["params"] if p in parameters]} for group in groups
    ]
    return [group for group in inside if group["params"]]


def forget_other_solvers(groups: Iterable[Group], state: MutableMapping[Any, Any]) -> None:
    """Drop the state of a solver that was replaced by another, and states without content.

    Another solver could not read a state. States without content are those of
    ``stepping/empty_state.py``, unless a saved state was loaded since.

    Args:
        groups: the groups of local problems.
        state: the optimizer's state by parameter.
    """
    for group in groups:
        if group["state_of"] == EMPTY:
            for p in group["params"]:
                state.pop(p, None)
        elif group["state_of"] not in (None, group["solver"]):
            for p in group["params"]:
                kept = state[p].get("fisher")
                state[p] = {} if kept is None else {"fisher": kept}
        group["state_of"] = group["solver"]
