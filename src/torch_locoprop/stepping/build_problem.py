"""Builds the local problem of a layer from its record and the settings of its group.

The problem itself, which knows neither layers nor settings, is in ``paper/local_problem.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_locoprop.config.groups import Group
from torch_locoprop.distributed.ddp import Exchange, SharedFacts
from torch_locoprop.fast import dispatch
from torch_locoprop.paper.fisher import running_average, second_moment
from torch_locoprop.paper.gram import FULL, Gram, RowUse
from torch_locoprop.paper.local_problem import Before, LocalProblem
from torch_locoprop.paper.transfers import Linear
from torch_locoprop.recording import row_gradients
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.row_reduction import gram_of_calls, row_weight
from torch_locoprop.solvers import Numbers
from torch_locoprop.solvers.base import States
from torch_locoprop.stepping.method import Method, number_of
from torch_locoprop.stepping.requirements import changed
from torch_locoprop.stepping.several_processes.layer_part import Inputs, Part


class Posed(NamedTuple):
    """The problem of a layer, with all that its solution needs."""

    layer: LayerRecord
    trained: Mapping[str, nn.Parameter]  # the layer's tensors with a gradient, which the step moves
    method: Method
    part: Part | None  # the part of a sharded layer that this process solves
    problem: LocalProblem
    states: States
    numbers: dict[str, Numbers]
    fisher: Tensor | None  # the new running Fisher matrix


def local_problem(
    layer: LayerRecord,
    trained: Mapping[str, nn.Parameter],
    method: Method,
    group_of: Mapping[nn.Parameter, Group],
    fisher: Tensor | None,
    loss_terms: float,
    relative: bool,
    part: Part | None = None,
) -> LocalProblem:
    """Return the problem over the layer's tensors that have a gradient.

    Numbers of the problem as a whole (γ, η, the reduction) are those of the weight's group, with which
    the bias's group must agree.

    Args:
        layer: the record of the layer.
        trained: the layer's tensors that have a gradient.
        method: how its problem is formed.
        group_of: the group of each parameter.
        fisher: Fisher matrix of the pre-activations ``[d, d]``, if the method needs one.
        loss_terms: number of terms of a loss that sums, otherwise 1.
        relative: solve for the displacement instead of the tensors themselves.
        part: the part of a sharded layer that this process solves.
    """
    group, tensors = group_of[layer.given[0]], layer.tensors
    kind = layer.kind if part is None else part.kind
    use = layer.row_use(trained)
    x, weight, linear_map = _inputs(layer, trained, method, group, use, part)
    mean = group["local_reduction"] == "mean"
    scale = (-1 if group["maximize"] else 1) / (loss_terms if mean else 1)
    facts = layer.shared_facts
    exchange = Exchange(facts, mean) if isinstance(facts, SharedFacts) else None
    of_row = row_factor(layer, group, loss_terms)
    target = method.variant.target
    if not target.needs.isdisjoint({"g", "v"}):
        layer.rescale_row_gradients()
    own: dict[nn.Parameter, Tensor] = {p: p.detach() for p in tensors.values()}
    own = own if part is None else {p: part.taken(name, p) for name, p in tensors.items()}
    start = {
        name: kind.matrix(name, decayed(name, own[p], group_of[p])) for name, p in trained.items()
    }
    base = start if relative else {}
    start = {name: torch.zeros_like(t) for name, t in start.items()} if relative else start
    return LocalProblem(
        linear_map=linear_map,
        x=x,
        start=start,
        fixed={n: kind.matrix(n, own[p]) for n, p in tensors.items() if n not in trained},
        backprop={
            name: kind.matrix(name, gradient if scale == 1 else scale * gradient)
            for name, gradient in _gradients(trained, part).items()
        },
        target=target,
        loss=method.variant.loss,
        transfer=layer.transfer or Linear(),
        gamma=group["gamma"],
        eta=numbers(group).lr,
        regularizer=method.regularizer,
        row_weight=weight,
        # A row's problem has the gradient of the row's own loss, not of its share in the mean.
        g=_scaled(row_gradients.gradients(layer), of_row) if "g" in target.needs else None,
        v=_scaled(_post_gradients(layer, x), of_row) if "v" in target.needs else None,
        recorded=partial(_recorded, layer, of_row),
        fisher=fisher,
        before=None if relative or part is not None else _before(layer, trained, group_of),
        base=base,
        products=group["local_products"],
        others=exchange,
        outputs=None if part is None else part.outputs,
        gram_of=dispatch.gram,
        structure=None if use is None or use.structure == FULL else use.structure,
        number=number_of(layer, group),
    )


def _inputs(
    layer: LayerRecord,
    trained: Mapping[str, nn.Parameter],
    method: Method,
    group: Group,
    use: RowUse | None,
    part: Part | None,
) -> Inputs:
    """Return the layer's inputs as its problem has them: the rows, XᵀX, or those of all processes.

    Args:
        layer: the record of the layer.
        trained: the layer's tensors that have a gradient.
        method: how its problem is formed.
        group: the group of its weight.
        use: what the step needs of the rows; None: possibly all of them.
        part: the part of a sharded layer that this process solves.

    Raises:
        RuntimeError: if the step needs rows that were not kept, because settings have changed.
    """
    if not layer.all_have_rows:  # those that were recorded must not count for all
        return Inputs(layer.collected([]), 1.0, layer.kind.linear_map)
    x = layer.inputs()
    if isinstance(x, Gram) and not x.serves(use, layer.like):
        raise changed(layer, "its inputs, of which only a summary was kept")
    if part is not None:
        return part.inputs(layer, method, group, x, trained)
    mean = group["local_reduction"] == "mean"
    of_each = 1 / max(layer.row_count, 1) if mean else 1.0
    weight: float | Tensor = of_each
    if use is not None and use.is_any and use.structure != FULL and layer.calls:
        if not isinstance(x, Gram):
            x = gram_of_calls(layer, layer.calls, use)
    elif any(call.kept is not None for call in layer.calls):
        weight = row_weight(layer, of_each)
    return Inputs(x, weight, layer.kind.linear_map)


def row_factor(layer: LayerRecord, group: Group, loss_terms: float) -> float:
    """Return the factor of the recorded gradient of a row in the layer's problem.

    Args:
        layer: the record of the layer.
        group: the group of its weight.
        loss_terms: number of terms of a loss that sums, otherwise 1.
    """
    sign = -1 if group["maximize"] else 1
    if group["local_reduction"] == "mean":
        return sign / loss_terms * max(layer.row_count, 1)
    # DDP divides the gradient of a row by the number of processes, the sum over rows does not.
    facts = layer.shared_facts
    return sign / (facts.divisor if isinstance(facts, SharedFacts) else 1)


def numbers(group: Group) -> Numbers:
    """Return the solver's numbers of a group.

    Where an outer optimizer makes the step, schedules move its learning rate, and the local problem
    keeps the one it began with.
    """
    local = group.get("local_lr")
    lr = group["lr"] if local is None else local
    return Numbers(lr, group["momentum"], group["decay"], group["eps"])


def _gradients(trained: Mapping[str, nn.Parameter], part: Part | None) -> dict[str, Tensor]:
    """Return the gradients of a layer's tensors; for a sharded layer, of the part to solve only.

    They have the dtype of the tensors, also where ``grad_dtype`` says otherwise.
    """
    given = {name: p.grad.to(p.dtype) for name, p in trained.items() if p.grad is not None}
    return (
        given
        if part is None
        else {name: part.taken(name, part.shards.aligned(name, g)) for name, g in given.items()}
    )


def decayed(name: str, parameter: Tensor, group: Group) -> Tensor:
    """Return a parameter after weight decay, where local iterations start; biases do not decay."""
    if name != "weight" or group["weight_decay"] == 0:
        return parameter
    lr, weight_decay = group["lr"], group["weight_decay"]
    if isinstance(lr, Tensor) and not lr.is_cpu:  # one kernel
        return torch.addcmul(parameter, parameter, lr, value=-weight_decay)
    start: Tensor = parameter * (1 - lr * weight_decay)
    return start


def running_fisher(layer: LayerRecord, method: Method, running: Tensor | None) -> Tensor | None:
    """Return the Fisher matrix of the pre-activations, averaged over steps, if the method needs it.

    Args:
        layer: the record of the layer, with gradients of sampled labels.
        method: how its problem is formed.
        running: the average before this step; None at first.
    """
    component = method.needs_fisher
    if component is None:
        return None
    sampled = row_gradients.sampled(layer)
    if sampled is None:
        return running
    moment = second_moment(sampled)
    if isinstance(layer.shared_facts, SharedFacts):
        moment = layer.shared_facts.average(moment)
    return running_average(running, moment, component.decay)


def count_loss_terms(layers: Sequence[LayerRecord], by_row: bool | None) -> int | None:
    """Return how many terms a loss that sums has, from the rows of the model's output.

    None if the model does not return the output of exactly one layer: how the loss sums over several
    outputs is not known.

    Args:
        layers: all layers with a local problem.
        by_row: the loss has one term for each row; if False, one for each row and feature; None if
            that is not known.
    """
    outputs = [layer for layer in layers if layer.calls and layer.is_output]
    if len(outputs) != 1 or by_row is None:
        return None
    return (1 if by_row else outputs[0].width) * outputs[0].row_count


def _before(
    layer: LayerRecord, trained: Mapping[str, nn.Parameter], group_of: Mapping[nn.Parameter, Group]
) -> Before | None:
    """Return the pre-activations of the forward pass, if they were kept."""
    a, weight = layer.outputs(), trained.get("weight")
    if a is None or weight is None:
        return None
    return Before(a, group_of[weight]["lr"], group_of[weight]["weight_decay"])


def _post_gradients(layer: LayerRecord, x: Any) -> Tensor | None:
    """Return ∂L/∂y as it was recorded, or computed from ∂L/∂a if the transfer is inside the loss."""
    recorded = row_gradients.post_gradients(layer)
    if recorded is not None or isinstance(x, Gram):
        return recorded
    tensors = {name: layer.kind.matrix(name, p) for name, p in layer.tensors.items()}
    return row_gradients.pulled_back(layer, layer.kind.linear_map.forward(x, **tensors))


def _recorded(layer: LayerRecord, of_row: float) -> Tensor | None:
    """Return ∂L/∂a divided by ``row_weight``; None if it was not recorded, or explains a part only."""
    if layer.obstacle:
        return None
    layer.rescale_row_gradients()
    return _scaled(row_gradients.weighted_gradients(layer), of_row)


def _scaled(rows: Tensor | None, scale: float) -> Tensor | None:
    return rows if rows is None or scale == 1 else scale * rows
