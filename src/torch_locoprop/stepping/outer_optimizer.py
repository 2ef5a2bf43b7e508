"""``apply="gradient"``: the local displacement goes as a gradient to an optimizer of the user's choice.

With the local problem at learning rate η, target distance γ and solution Δ, the outer optimizer sees

    −Δ / (η γ) ,

which for one plain local iteration is the gradient of the loss itself.

A cap relative to the weight holds for what that optimizer writes: many of them, such as AdamW and Muon,
take no notice of the length of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_locoprop.config.groups import Group
from torch_locoprop.config.settings import unknown
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.stepping.fallback_optimizer import move_state
from torch_locoprop.stepping.guards import Guarded, shorten
from torch_locoprop.stepping.write_back import write_if

SAME = 1e-6  # of a learning rate: schedules round
APPLY = ("replace", "gradient", "nothing")

Optimizers = Optimizer | Sequence[Optimizer]
OuterFactory = Callable[[list[nn.Parameter]], Optimizers] | Optimizers
"""What ``outer=`` takes: optimizers, or what makes them of the parameters it is given."""


class Outer:
    """One or several optimizers that together train the parameters of all local problems.

    Or all parameters, the ``rest`` too, for which there is no fallback then. Those that were made by
    the user may lack what is frozen.
    """

    def __init__(
        self, factory: OuterFactory, params: list[nn.Parameter], rest: list[nn.Parameter]
    ) -> None:
        made = factory(params) if callable(factory) else factory
        self.optimizers: list[Optimizer]
        if isinstance(made, Iterable) and not isinstance(made, Optimizer):
            self.optimizers = list(made)
        else:
            self.optimizers = [made]
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
                raise TypeError(
                    "outer= must be, or return, a torch.optim.Optimizer that needs no closure, or a "
                    f"list of them, not {type(optimizer).__name__}."
                )
        trained = [p for group in self.param_groups for p in group["params"]]
        known, own = set(trained), not callable(factory)
        self.trains_rest = (
            bool(rest) and own and all(p in known or not p.requires_grad for p in rest)
        )
        expected = [*params, *rest] if self.trains_rest else params
        self._missing = [p for p in expected if p not in known]
        lacking = [p for p in self._missing if p.requires_grad or not own]
        if len(trained) != len(known) or not known <= set(expected) or lacking:
            raise ValueError(
                "outer= must train exactly the parameters of the layers with a local problem, each of "
                "them once, or all that this optimizer trains. Give a function of the former, such as "
                "outer=lambda params: torch.optim.SGD(params, lr), or an optimizer of all."
            )
        self._params = params

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def name(self) -> str:
        return " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    def factors(self, groups: Sequence[Group]) -> dict[nn.Parameter, float]:
        """What schedules have made of each parameter's learning rate since the beginning."""
        if any(p.grad is not None for p in self._missing):
            raise RuntimeError(
                "outer= lacks parameters that were frozen when this optimizer was made, and are no "
                "longer. Make a new one, with an outer= of all that is trained."
            )
        each = [float(group["lr"]) / float(group["local_lr"]) for group in groups]
        found = {p: f for group, f in zip(groups, each, strict=True) for p in group["params"]}
        inside = [[found[p] for p in group["params"]] or [1.0] for group in self.param_groups]
        if any(max(own) - min(own) > SAME * max(own) for own in inside):
            raise ValueError(
                "Schedules have made the learning rates of LocoProp's groups different parts of what "
                "they were, and a group of outer= has parameters of several. Give outer= a group for "
                "each of them."
            )
        return found

    def step(
        self, directions: Mapping[nn.Parameter, Tensor], factors: Mapping[nn.Parameter, float]
    ) -> None:
        """Step with the directions for gradients, at the learning rates times ``factors``."""
        rates = [(group, group["lr"]) for group in self.param_groups if group["params"]]
        gradients = [(p, p.grad) for p in self._params]
        try:
            for group, lr in rates:
                group["lr"] = lr * factors[group["params"][0]]
            for p, _ in gradients:
                p.grad = directions.get(p)
            for optimizer in self.optimizers:
                move_state(optimizer)
                optimizer.step()
        finally:
            for group, lr in rates:  # which schedules of its own may move
                group["lr"] = lr
            for p, gradient in gradients:
                p.grad = gradient

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def check_loadable(self, states: Sequence[dict[str, Any]]) -> None:
        """Raise if the state dicts are those of others."""
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"The state dict has {len(states)} outer optimizers, and here are "
                f"{len(self.optimizers)}. Make this optimizer with the same outer=."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            saved, here = (_sizes(each) for each in (state["param_groups"], optimizer.param_groups))
            if saved != here:
                raise ValueError(
                    f"Groups of outer= have {here} parameters, and {saved} in the state dict. Make "
                    "this optimizer with the same outer=."
                )

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
            for group in optimizer.param_groups:  # of a version whose schedules moved lr itself
                group["lr"] = group.pop("base_lr", group["lr"])


def _sizes(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def make_outer(
    apply: str, factory: OuterFactory | None, groups: list[Group], rest: list[nn.Parameter]
) -> Outer | None:
    """The optimizer of the groups' parameters, where the user asked for one.

    The groups note the learning rate of the local problem, which schedules leave alone from now on.
    """
    if apply not in APPLY:
        raise ValueError(unknown("apply", apply, APPLY))
    if apply != "nothing" and (apply == "gradient") != (factory is not None):
        raise ValueError(
            'apply="gradient" hands the local displacement to an optimizer that outer= makes: '
            "give both, such as outer=lambda params: torch.optim.AdamW(params, lr=1e-3), or none."
        )
    if factory is None:
        return None
    for group in groups:
        if group["weight_decay"] != 0 or not float(group["lr"]) > 0:
            raise ValueError(
                f"Invalid weight_decay={group['weight_decay']}, lr={group['lr']}. With outer=, "
                "weight decay is a setting of that optimizer, and lr, which shapes the local problem, "
                "must be > 0."
            )
        group["local_lr"] = float(group["lr"])
    return Outer(factory, [p for group in groups for p in group["params"]], rest)


def as_gradients(
    layer: LayerRecord,
    problem: LocalProblem,
    found: Guarded,
    ok: Tensor,
    plain: bool,
    group_of: Mapping[nn.Parameter, Group],
) -> dict[nn.Parameter, Tensor]:
    """A layer's displacements as the gradients that would have made them.

    Where they are the BackProp step, because it is ``plain`` or the gate is closed, those are the
    gradients of the problem to the last bit; the ordinary ones where the solution is not finite.
    """
    is_backprop: bool | Tensor = plain if found.gated is None else found.gated | plain
    if found.capped is not None:
        is_backprop = ~found.capped & is_backprop
    gradients = {}
    for name, moved in found.new.items():
        p = layer.tensors[name]
        group = group_of[p]
        direction = layer.kind.restored(name, moved, p) / (-group["local_lr"] * group["gamma"])
        backprop = layer.kind.restored(name, problem.backprop[name], p)
        if is_backprop is True:
            direction = backprop
        elif is_backprop is not False:
            direction = torch.where(is_backprop, backprop, direction)
        assert p.grad is not None
        ordinary = torch.nan_to_num(p.grad, nan=0.0, posinf=0.0, neginf=0.0)
        gradients[p] = torch.where(ok, direction, -ordinary if group["maximize"] else ordinary)
    return gradients


def caps_outer(apply: str, group: Group) -> bool:
    """Whether the group's cap is for what the outer optimizer writes, not for what it is given."""
    return apply == "gradient" and group["cap"] is not None and group["cap_by"] == "weight"


@contextmanager
def capped_step(
    apply: str,
    trained: Mapping[LayerRecord, Mapping[str, nn.Parameter]],
    group_of: Mapping[nn.Parameter, Group],
) -> Iterator[None]:
    """Shorten what the outer optimizer does to a layer inside, where :func:`caps_outer`."""
    capped = [layer for layer in trained if caps_outer(apply, group_of[layer.given[0]])]
    before = {layer: {p: p.clone() for p in trained[layer].values()} for layer in capped}
    yield
    for layer, start in before.items():
        weight = layer.tensors["weight"]
        moved = {p: p - old for p, old in start.items()}
        cap = group_of[layer.given[0]]["cap"]
        factor = shorten(moved.values(), [start.get(weight, weight)], cap)
        over = factor < 1
        write_if(over, [(start[p] + factor * change, p) for p, change in moved.items()])
        layer.count("capped", over)
