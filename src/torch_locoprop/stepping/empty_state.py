"""States without content, into which checkpoint tools load saved states.

Such tools let an optimizer step with zero gradients at learning rate zero, and expect that its state
has all entries afterwards. The first step that moves weights drops these entries, unless a state was
loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from torch_locoprop.distributed.fully_shard import local
from torch_locoprop.paper.gram import FULL
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.solvers.base import Solver
from torch_locoprop.stepping.method import Method
from torch_locoprop.stepping.several_processes.layer_part import part_of


def empty_states(
    layer: LayerRecord, trained: Mapping[str, nn.Parameter], method: Method
) -> dict[nn.Parameter, Tensors]:
    """Return a state for each of a layer's tensors, with the entries and shapes that steps will leave.

    Args:
        layer: the record of the layer.
        trained: the layer's tensors that are trained.
        method: how its problem is solved.
    """
    part, kind = part_of(layer, method), layer.kind
    tensors: dict[str, Tensor] = {name: p.detach() for name, p in trained.items()}
    if part is not None and part.separable:
        rows = part.shards.own_count
        kind = layer.kind.with_outputs(rows)  # type: ignore[attr-defined]
        tensors = {name: local(p).new_zeros(rows, *p.shape[1:]) for name, p in trained.items()}
    elif part is not None:
        tensors = {name: local(p).new_zeros(p.shape) for name, p in trained.items()}
    start = {name: kind.matrix(name, tensor) for name, tensor in tensors.items()}
    use = layer.row_use(trained)
    given = {} if use is None or use.structure == FULL else {"structure": use.structure}
    states = method.solver.empty_states(start, method.variant.loss.uses_transfer, **given)
    if method.needs_fisher is not None:
        owner = next(iter(trained))
        d = start[owner].shape[-2 if owner == "weight" else -1]
        states[owner]["fisher"] = start[owner].new_zeros(*_leading(start, owner), d, d)
    stored = states if part is None else {name: part.stored(own) for name, own in states.items()}
    return {trained[name]: own for name, own in stored.items()}


def hides_state(solver: Solver) -> bool:
    """Return True if a solver does not say which entries its states have, and may have some."""
    return type(solver).empty_states is Solver.empty_states and not solver.stateless


def _leading(start: Tensors, owner: str) -> tuple[int, ...]:
    """Return the leading dimensions of a layer's matrices: the groups of a convolution."""
    return tuple(start[owner].shape[: -2 if owner == "weight" else -1])
