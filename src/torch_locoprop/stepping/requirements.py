"""What the next step will need of each layer: told to the layers and their hooks beforehand.

A plan is made after every step, and anew before a forward pass if what it depends on has been changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from torch_locoprop.config.groups import Group
from torch_locoprop.config.settings import Components
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.recording.hooks import Capture
from torch_locoprop.recording.layer_record import Orders, ServedLayer
from torch_locoprop.recording.transfer_assignment import effective_variant
from torch_locoprop.stepping.build_problem import asks_for_output, use_of_rows

_ASKED = ("variant", "solver", "regularizer", "local_steps", "every", "max_rows", "gate")


def asked(groups: Iterable[Group]) -> list[object]:
    """What a plan depends on, of all that a user may change."""
    return [group[name] for group in groups for name in _ASKED]


def plan(
    layers: Sequence[ServedLayer],
    capture: Capture,
    group_of: Mapping[nn.Parameter, Group],
    components: Components,
    states: Mapping[Tensor, Tensors],
    *,
    steps: int,
    diagnosed: bool,
    fisher_missing: bool,
) -> None:
    """Tell layers and hooks what the step after ``steps`` others will need."""
    draw, searching = fisher_missing, False
    orders: Orders = {}
    for layer in layers:
        group = group_of[layer.given[0]]
        variant, _ = effective_variant(components.variant(group), layer)
        needs = variant.target.needs | components.regularizer(group).needs
        searching |= bool(layer.trained) and (not layer.decided or bool(needs))
        layer.needs = needs | {"g"} if diagnosed else needs
        of_asked = components.variant(group).target.needs  # whatever becomes of it
        layer.may_come_aside = not (of_asked | layer.needs)
        layer.keeps_output = asks_for_output(layer, group, components)
        layer.max_rows, layer.row_seed, layer.orders = group["max_rows"], 1000 * steps, orders
        layer.use_of_rows = partial(use_of_rows, group, components, states, diagnosed)
        if "fisher" in layer.needs:
            draw |= steps % getattr(variant.target, "every", 1) == 0
    capture.draw_labels(steps if draw else None)
    capture.tracing = searching
    active = [layer for layer in layers if layer.trained]
    capture.record_post_gradients = any("v" in layer.needs for layer in active)
