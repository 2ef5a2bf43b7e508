"""The outer optimizer of ``apply="gradient"``: it gets the local displacements as gradients.

For a local problem with learning rate η, target distance γ and solution Δ, the outer optimizer gets the
gradient

    −Δ / (η γ) .

For one plain local iteration this is the gradient of the loss itself.

A cap relative to the weight limits what the outer optimizer writes, not the gradient it gets: many
optimizers, such as AdamW and Muon, ignore the length of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_locoprop.config.groups import OF_OUTER, Group
from torch_locoprop.distributed.fully_shard import local
from torch_locoprop.fast import dispatch
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.names import unknown
from torch_locoprop.paper.tensors import norm
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.stepping.fallback_optimizer import move_state
from torch_locoprop.stepping.guards import Guarded, cap_factor
from torch_locoprop.stepping.several_processes.layer_part import Part

RATE_TOLERANCE = 1e-6  # relative difference of equal learning rates, which schedules round
Apply = Literal["replace", "gradient", "nothing"]

Optimizers = Optimizer | Sequence[Optimizer]
OuterFactory = Callable[[list[nn.Parameter]], Optimizers] | Optimizers
"""The type of ``outer=``: optimizers, or a function of the parameters that returns optimizers."""


class Outer:
    """One or several optimizers that train the parameters of all local problems.

    An optimizer that the user has made may train the ``rest`` too, and there is no fallback then.
    Frozen parameters may be missing in it.

    Args:
        factory: the user's ``outer=``.
        params: the parameters of all local problems.
        rest: the parameters without a local problem.

    Raises:
        TypeError: if ``factory`` is not, or does not return, optimizers that need no closure.
        ValueError: if the optimizers train other parameters.
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
                "them once, or all parameters that this optimizer trains. Pass a function of the "
                "former, such as outer=lambda params: torch.optim.SGD(params, lr), or an optimizer of "
                "all parameters."
            )
        self._params = params
        self._is_empty = False  # the states have no content

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def name(self) -> str:
        """The class names of the optimizers, for the summary."""
        return " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    def factors(self, groups: Sequence[Group]) -> dict[nn.Parameter, float]:
        """Return the present over the first learning rate of each parameter, as schedules set it.

        Args:
            groups: LocoProp's groups, whose learning rates schedules change.

        Raises:
            RuntimeError: if parameters that the optimizers do not have were unfrozen, or parameters
                that they have were taken out of the groups.
            ValueError: if one group of the optimizers has parameters with different factors.
        """
        if any(p.grad is not None for p in self._missing):
            raise RuntimeError(
                "outer= does not have some parameters that were frozen when this optimizer was made "
                "and are trained now. Make a new LocoProp with an outer= of all trained parameters."
            )
        of_groups = [float(group["lr"]) / float(group["local_lr"]) for group in groups]
        factors = {
            p: f for group, f in zip(groups, of_groups, strict=True) for p in group["params"]
        }
        if any(p not in factors for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                "A parameter was taken out of param_groups, and outer= still trains it. Freeze it by "
                "requires_grad_(False) instead, or take it out of the groups of outer= too."
            )
        of_outer = [[factors[p] for p in group["params"]] or [1.0] for group in self.param_groups]
        if any(max(own) - min(own) > RATE_TOLERANCE * max(own) for own in of_outer):
            raise ValueError(
                "Schedules have changed the learning rates of LocoProp's groups by different factors, "
                "and one group of outer= has parameters of several of these groups. Give outer= a "
                "group for each of them."
            )
        return factors

    def step(
        self, directions: Mapping[nn.Parameter, Tensor], factors: Mapping[nn.Parameter, float]
    ) -> None:
        """Take a step of all optimizers.

        Args:
            directions: the gradient of each parameter for this step; other parameters have none.
            factors: the factor of each parameter's learning rate for this step.
        """
        if self._is_empty:
            for optimizer in self.optimizers:
                optimizer.state.clear()
            self._is_empty = False
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
            # The rates and gradients of before: schedules of the outer optimizer change its rates.
            for group, lr in rates:
                group["lr"] = lr
            for p, gradient in gradients:
                p.grad = gradient

    def make_empty_states(
        self, gradients: Mapping[nn.Parameter, Tensor], factors: Mapping[nn.Parameter, float]
    ) -> None:
        """Make states without content, into which tools load saved ones, unless there are states.

        Args:
            gradients: the gradient of each parameter, zeros.
            factors: the factor of each parameter's learning rate, zero.
        """
        if not any(optimizer.state for optimizer in self.optimizers):
            self.step(gradients, factors)
            self._is_empty = True

    def check_loadable(self, states: Sequence[dict[str, Any]]) -> None:
        """Raise ``ValueError`` if the state dicts are not those of such optimizers."""
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"The state dict has {len(states)} outer optimizers, but this optimizer has "
                f"{len(self.optimizers)}. Make this optimizer with the same outer=."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            saved, here = (_sizes(each) for each in (state["param_groups"], optimizer.param_groups))
            if saved != here:
                raise ValueError(
                    f"The groups of outer= have {here} parameters, but those in the state dict have "
                    f"{saved}. Make this optimizer with the same outer=."
                )

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the state dicts of all optimizers."""
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self._is_empty = False


def _sizes(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def make_outer(
    apply: str, factory: OuterFactory | None, groups: list[Group], rest: list[nn.Parameter]
) -> Outer | None:
    """Return the outer optimizer of the groups' parameters; None if the user asked for none.

    With an outer optimizer each group also gets ``local_lr``, the learning rate of its local problems,
    which schedules do not change. The first group gets a place for the outer optimizer's state dict.

    Args:
        apply: "replace", "gradient" or "nothing".
        factory: the user's ``outer=``.
        groups: the groups of the parameters with a local problem.
        rest: the parameters without a local problem.

    Raises:
        ValueError: if ``apply``, ``outer`` and the settings of the groups do not fit together.
    """
    if apply not in get_args(Apply):
        raise ValueError(unknown("apply", apply, get_args(Apply)))
    if apply != "nothing" and (apply == "gradient") != (factory is not None):
        raise ValueError(
            'apply="gradient" passes the local displacements to the optimizer of outer=. Pass both, '
            "such as outer=lambda params: torch.optim.AdamW(params, lr=1e-3), or neither."
        )
    if factory is None:
        return None
    for group in groups:
        if group["weight_decay"] != 0 or not float(group["lr"]) > 0:
            raise ValueError(
                f"Invalid weight_decay={group['weight_decay']}, lr={group['lr']}. With outer=, "
                "weight decay is a setting of that optimizer, and lr, the learning rate of the local "
                "problem, must be > 0."
            )
        group["local_lr"] = float(group["lr"])
    groups[0][OF_OUTER] = None
    return Outer(factory, [p for group in groups for p in group["params"]], rest)


def as_gradients(
    layer: LayerRecord,
    problem: LocalProblem,
    found: Guarded,
    ok: Tensor,
    plain: bool,
    group_of: Mapping[nn.Parameter, Group],
    part: Part | None = None,
) -> dict[nn.Parameter, Tensor]:
    """Return a layer's displacements as gradients ``−Δ / (η γ)`` for an outer optimizer.

    If the displacement is the BackProp step, because of ``plain`` or the gate, the gradients are
    those of the problem, with the same bits. If the solution is not finite, they are the gradients
    of the loss.

    Args:
        layer: the record of the layer.
        problem: the layer's local problem.
        found: the solution after the guards; ``found.new`` are displacements.
        ok: a boolean scalar: True if the solution is finite.
        plain: True if the solution is a BackProp step.
        group_of: the group of each parameter.
        part: the part of a sharded layer that this process solves.
    """
    is_backprop: bool | Tensor = plain if found.gated is None else found.gated | plain
    if found.capped is not None:
        is_backprop = ~found.capped & is_backprop
    gradients = {}
    for name, moved in found.new.items():
        p = layer.tensors[name]
        group = group_of[p]
        pair = moved, problem.backprop[name]
        if part is None:
            direction, backprop = (layer.kind.restored(name, each, p) for each in pair)
        else:
            direction, backprop = (part.restored(name, each) for each in pair)
        direction = direction / (-group["local_lr"] * group["gamma"])
        if is_backprop is True:
            direction = backprop
        elif is_backprop is not False:
            direction = torch.where(is_backprop, backprop, direction)
        assert p.grad is not None
        given = p.grad if part is None else local(part.shards.aligned(name, p.grad))
        ordinary = torch.nan_to_num(given, nan=0.0, posinf=0.0, neginf=0.0)
        gradient = torch.where(ok, direction, -ordinary if group["maximize"] else ordinary)
        gradients[p] = gradient if part is None else part.shards.like_parameter(name, gradient)
    return gradients


def caps_outer(apply: str, group: Group) -> bool:
    """Return True if a group's cap limits what the outer optimizer writes, not its gradients."""
    return apply == "gradient" and group["cap"] is not None and group["cap_by"] == "weight"


@contextmanager
def capped_step(
    apply: str,
    trained: Mapping[LayerRecord, Mapping[str, nn.Parameter]],
    group_of: Mapping[nn.Parameter, Group],
) -> Iterator[None]:
    """Apply the caps of :func:`caps_outer` to the outer optimizer's step inside the context.

    Args:
        apply: "replace", "gradient" or "nothing".
        trained: the parameters that this step moves, by layer and name.
        group_of: the group of each parameter.
    """
    capped = [layer for layer in trained if caps_outer(apply, group_of[layer.given[0]])]
    before = {layer: {p: local(p).clone() for p in trained[layer].values()} for layer in capped}
    yield
    for layer, start in before.items():
        weight = layer.tensors["weight"]
        moved = {p: local(p) - old for p, old in start.items()}
        cap = group_of[layer.given[0]]["cap"]
        counted = list(moved.values())
        if layer.shards is not None:
            counted = [layer.shards.counted_once(n, moved[p]) for n, p in trained[layer].items()]
        lengths = norm(counted), norm([start.get(weight, local(weight))])
        if layer.shards is not None:
            both = layer.shards.add_up(torch.stack(lengths).square()).sqrt()
            lengths = both[0], both[1]
        factor = cap_factor(*lengths, cap)
        over = factor < 1
        dispatch.write(
            over, [(start[p] + factor * change, local(p)) for p, change in moved.items()]
        )
        layer.count("capped", over)
