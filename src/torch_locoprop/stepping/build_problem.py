"""From what was recorded for a layer to its local problem and the solver that takes it on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.config.groups import Group, decayed, numbers
from torch_locoprop.config.settings import Components
from torch_locoprop.distributed.exchange import Exchange, averaged
from torch_locoprop.fast.dispatch import transfer_in
from torch_locoprop.fast.triton import availability, local_iterations
from torch_locoprop.paper.fisher import running_average, second_moment
from torch_locoprop.paper.gram import Gram, Use
from torch_locoprop.paper.local_problem import Before, LocalProblem
from torch_locoprop.paper.regularizers import REGULARIZERS, Regularizer
from torch_locoprop.paper.targets import BackPropTarget
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.paper.transfers import Linear
from torch_locoprop.paper.variants import VARIANTS, Variant
from torch_locoprop.recording.layer_record import ServedLayer
from torch_locoprop.recording.transfer_assignment import effective_variant
from torch_locoprop.solvers import SOLVERS, FirstOrder, Solver


@dataclass(frozen=True)
class Method:
    """How one layer's problem is formed and solved."""

    variant: Variant
    solver: Solver
    regularizer: Regularizer
    local_steps: int


def method_for(layer: ServedLayer, group: Group, components: Components) -> Method:
    """What serves a layer in this step."""
    method = planned_method(layer, group, components)
    rows = layer.has_rows if layer.together is None else layer.together.all_have_rows
    return method if rows else backprop_step(method)


def planned_method(layer: ServedLayer, group: Group, components: Components) -> Method:
    """What serves a layer in this step if there are rows."""
    variant, _ = effective_variant(components.variant(group), layer)
    if variant.output_by_gradient_descent and layer.is_output:
        return Method(variant, SOLVERS["sgd"], REGULARIZERS["none"], local_steps=1)
    method = Method(
        variant, components.solver(group), components.regularizer(group), group["local_steps"]
    )
    between = group["steps"] % group["every"] != 0
    return backprop_step(method) if between or layer.obstacle else method


def local_problems_before(group: Group) -> int:
    """How many local problems each layer of a group has had."""
    return int(-(-group["steps"] // group["every"]))


def _is_exact(method: Method) -> bool:
    return not isinstance(method.solver, FirstOrder)


def backprop_step(method: Method) -> Method:
    """One local iteration: all that is left for a layer with a gradient but no rows or no Fisher."""
    solver = SOLVERS["sgd"] if _is_exact(method) else method.solver
    return Method(VARIANTS["locoprop-s"], solver, REGULARIZERS["none"], local_steps=1)


def is_backprop(method: Method) -> bool:
    """Whether the solution is the BackProp step: one plain iteration, with nothing added."""
    one = method.local_steps == 1 and type(method.solver) is type(SOLVERS["sgd"])
    free = method.regularizer is REGULARIZERS["none"]
    of_target = type(method.variant.target).first_gradient
    return one and free and of_target is BackPropTarget.first_gradient


def local_problem(
    layer: ServedLayer,
    method: Method,
    group_of: dict[nn.Parameter, Group],
    fisher: Tensor | None,
    loss_terms: float,
    relative: bool,
) -> LocalProblem:
    """The problem over the layer's tensors that have a gradient, or over their displacements.

    Numbers of the problem as a whole (γ, η, the reduction) are those of the weight's group, with
    which the bias's must agree; ``loss_terms`` is how many terms a loss that sums has, otherwise 1.
    """
    trained = layer.with_gradient
    group = group_of[layer.given[0]]
    kind, x = layer.kind, layer.inputs()
    _check_rows(layer, x)
    mean = group["local_reduction"] == "mean"
    of_each = 1 / max(layer.row_count, 1) if mean else 1.0
    scale = (-1 if group["maximize"] else 1) / (loss_terms if mean else 1)
    exchange = None if layer.together is None else Exchange(layer.together, mean)
    # What a row's loss counts in the sum of its process is divided by that of the others.
    shares = 1 if exchange is None or mean else exchange.together.processes
    of_row = scale / of_each / shares  # times the recorded gradient of a row
    target = method.variant.target
    if not target.needs.isdisjoint({"g", "v"}):
        layer.follow_gradients()
    start = {name: kind.matrix(name, decayed(name, p, group_of[p])) for name, p in trained.items()}
    base = start if relative else {}
    start = {name: torch.zeros_like(t) for name, t in start.items()} if relative else start
    return LocalProblem(
        layer=kind,
        x=x,
        start=start,
        fixed={
            name: kind.matrix(name, p) for name, p in layer.tensors.items() if name not in trained
        },
        backprop={
            name: kind.matrix(name, p.grad if scale == 1 else scale * p.grad)
            for name, p in trained.items()
            if p.grad is not None
        },
        target=target,
        loss=method.variant.loss,
        transfer=layer.transfer or Linear(),
        gamma=group["gamma"],
        eta=numbers(group).lr,
        regularizer=method.regularizer,
        row_weight=layer.row_weight(of_each),
        # A row's problem has the gradient of the row's own loss, not of its share in the mean.
        g=_scaled(layer.gradients(), of_row) if "g" in target.needs else None,
        v=_scaled(_post_gradients(layer, x), of_row) if "v" in target.needs else None,
        recorded=partial(_recorded, layer, of_row),
        fisher=fisher,
        before=None if relative else _before(layer, group_of),
        base=base,
        products=group["local_products"],
        exchange=exchange,
        number=local_problems_before(group),
    )


def asks_for_output(layer: ServedLayer, group: Group, components: Components) -> bool:
    """Whether a step can make use of what the layer returned: pre-activations that are bent.

    As long as the transfer is not known they may be; else the first step after a resumption differs.
    """
    if not components.variant(group).loss.uses_transfer:
        return False
    method = planned_method(layer, group, components)
    known, loss = layer.decided or layer.explicit, method.variant.loss
    straight = known and loss.is_quadratic(layer.transfer or Linear())
    return loss.uses_transfer and not straight and method.local_steps > 1


def may_have_kernels(layer: ServedLayer, group: Group, components: Components) -> bool:
    """Whether a layer's problem is one that our kernels take, as far as can be told beforehand."""
    method = planned_method(layer, group, components)
    parts = (method.variant.loss, method.variant.target, method.regularizer)
    transfer = transfer_in(layer.kind, *parts, layer.transfer or Linear())
    weight = layer.tensors["weight"].detach()
    fits = transfer in local_iterations.TRANSFERS and availability.takes([weight])
    return fits and method.solver.name == "rmsprop" and group["max_rows"] is None


def _before(layer: ServedLayer, group_of: dict[nn.Parameter, Group]) -> Before | None:
    """What the forward pass knows of the start, where it was kept."""
    a, weight = layer.outputs(), layer.with_gradient.get("weight")
    if a is None or weight is None:
        return None
    return Before(a, group_of[weight]["lr"], group_of[weight]["weight_decay"])


def check_still_served(layer: ServedLayer, group: Group, components: Components) -> None:
    """Raise if settings changed after the backward pass to such as need what was not recorded."""
    if not layer.calls:
        return
    needs = planned_method(layer, group, components).variant.target.needs & {"g", "v"}
    if not needs <= layer.needs:
        raise _changed(layer, "gradients of its outputs, which were not kept")
    _check_rows(layer, layer.inputs())


def _check_rows(layer: ServedLayer, x: Any) -> None:
    """Likewise, of the rows."""
    if not isinstance(x, Gram) or layer.use_of_rows is None:
        return
    use = layer.use_of_rows(layer, layer.with_gradient)
    if not x.serves(use, layer.tensors["weight"]):
        raise _changed(layer, "its inputs, of which only a summary was kept")


def _changed(layer: ServedLayer, needed: str) -> RuntimeError:
    return RuntimeError(
        f"The settings of layer {layer.name!r} were changed between backward() and step(), or before a "
        f"forward pass of its parts or of a compiled model, to some that need {needed}. Call "
        "zero_grad() and run forward and backward again: from now on it is kept."
    )


def use_of_rows(
    group: Group,
    components: Components,
    states: Mapping[Tensor, Tensors],
    diagnosed: bool,
    layer: ServedLayer,
    moved: Collection[str],
) -> Use | None:
    """What the next step, which moves these tensors, makes of a layer's rows; None: it may need all.

    As long as a layer's transfer is not known, only one iteration is known to need none.
    """
    asked, method = components.variant(group), planned_method(layer, group, components)
    variant, exact = method.variant, _is_exact(method)
    targets = (asked.target, variant.target)
    first_known = all(target.knows_first_gradient for target in targets)
    if method.regularizer.needs or not first_known or not layer.is_intact:  # which step() will tell
        return None
    weight = layer.kind.matrix("weight", layer.tensors["weight"])
    columns = ("weight" in moved) * weight.shape[-1] + ("bias" in moved)
    owner = layer.tensors["weight" if "weight" in moved else "bias"]
    number = local_problems_before(group)
    kept = group["state_of"] in (None, group["solver"])  # step() will forget another solver's
    state = states.get(owner, {}) if kept else {}
    use = method.solver.use_of_rows(method.local_steps, number, state, columns)
    # To measure takes what there is: it must not change what the iterations go by.
    if use is not None and (group["gate"] or (diagnosed and not use.is_any)):
        use = use._replace(gradients=use.gradients + 1)
    settled = layer.decided or layer.explicit or not asked.loss.uses_transfer
    bent = exact and (variant.loss.uses_transfer or not settled)  # and a closed form asks how much
    if use is None or not (use.is_any or bent):
        return use
    if bent or not settled:
        return None
    return use if variant.loss.is_quadratic(layer.transfer or Linear()) else None


def _post_gradients(layer: ServedLayer, x: Any) -> Tensor | None:
    """∂L/∂y: as recorded behind the transfer, or pulled back from ∂L/∂a through one in the loss."""
    recorded = layer.post_gradients()
    if recorded is not None or isinstance(x, Gram):
        return recorded
    tensors = {name: layer.kind.matrix(name, p) for name, p in layer.tensors.items()}
    return layer.pulled_back(layer.kind.forward(x, **tensors))


def running_fisher(layer: ServedLayer, method: Method, running: Tensor | None) -> Tensor | None:
    """The Fisher matrix of the pre-activations, averaged over steps, where anything asks for it."""
    asking = asks_for_fisher(method)
    sampled = layer.sampled()
    if asking is None or sampled is None:
        return running if asking else None
    moment = averaged(second_moment(sampled), layer.together)
    return running_average(running, moment, asking.decay)


def asks_for_fisher(method: Method) -> Any:
    """The target or regularizer that needs a Fisher matrix, if one does."""
    for component in (method.variant.target, method.regularizer):
        if "fisher" in component.needs:
            return component
    return None


def loss_terms(layers: list[ServedLayer]) -> int | None:
    """How many terms a loss that sums has: rows, times features unless it is a softmax.

    None if no layer's output is the model's, or several are: their losses may be one or many.
    """
    terms = []
    for layer in layers:
        if layer.calls and layer.is_output:
            classes = layer.transfer is not None and not layer.transfer.elementwise
            terms.append((1 if classes else layer.width) * layer.row_count)
    return terms[0] if len(terms) == 1 else None


def _recorded(layer: ServedLayer, of_row: float) -> Tensor | None:
    """∂L/∂a over ``row_weight``, where it was recorded and all of the layer's gradient is of it."""
    if layer.obstacle:
        return None
    layer.follow_gradients()
    return _scaled(layer.weighted_gradients(), of_row)


def _scaled(rows: Tensor | None, scale: float) -> Tensor | None:
    return rows if rows is None or scale == 1 else scale * rows
