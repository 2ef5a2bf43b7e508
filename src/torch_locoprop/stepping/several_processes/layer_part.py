"""The part of a sharded layer that one process solves: its own outputs, or all of them.

The outputs of a layer are independent problems, unless softmax or a component of the user's couples
them, or the layer's tensors do not have the outputs as their first dimension. Then every process solves
the whole problem and keeps its own rows of the solution.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_locoprop.config.groups import Group
from torch_locoprop.distributed import communication
from torch_locoprop.distributed.exchanged_map import ExchangedMap
from torch_locoprop.distributed.fully_shard import Shards, SharedShardFacts, full, local
from torch_locoprop.layers import LayerKind
from torch_locoprop.layers.base import is_distributed
from torch_locoprop.layers.conv import ConvMap
from torch_locoprop.paper.gram import FULL, Gram, RowUse, saves_work
from torch_locoprop.paper.linear_map import Dense, LinearMap
from torch_locoprop.paper.structured_gram import ReducedGram
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.paper.transfers import Linear
from torch_locoprop.recording import row_reduction
from torch_locoprop.recording.call import Call
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.solvers import FirstOrder
from torch_locoprop.solvers.base import States
from torch_locoprop.stepping.method import Method, is_ours

WHOLE = "every process solves the whole layer, which does not separate by rows"
GATHERS_ROWS = "gathers the rows of all processes"
EXCHANGES_WEIGHTS = "exchanges weights in each iteration"


class Inputs(NamedTuple):
    """The inputs of a layer as its problem has them."""

    x: Any  # the inputs in the form that linear_map takes, or their Gram
    row_weight: float | Tensor
    linear_map: LinearMap


@dataclass(frozen=True)
class Part:
    """The part of a sharded layer that this process solves, and the exchange that it needs.

    Args:
        shards: the rows of the layer's tensors that this process has.
        kind: the kind of a layer with the outputs that are solved.
        separable: True if output feature j has row j of the layer's tensors.
        is_whole: True if all outputs are solved in every process.
        row_state: names of the entries of the solver's state that have a row for each output.
    """

    shards: Shards
    kind: LayerKind
    separable: bool
    is_whole: bool
    row_state: frozenset[str]

    @property
    def outputs(self) -> Shards | None:
        """Access to the outputs that other processes solve; None if there are none."""
        return None if self.is_whole else self.shards

    # ---- tensors and states ----------------------------------------------------------------------

    def taken(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a sharded parameter, or of its gradient, that is in the problem.

        Args:
            name: "weight" or "bias".
            tensor: the parameter or the gradient.
        """
        return full(tensor) if self.is_whole else self.shards.to_rows(name, tensor)

    def restored(self, name: str, matrix: Tensor) -> Tensor:
        """Return this process's part of a tensor of the solution, in the module's shape.

        Args:
            name: "weight" or "bias".
            matrix: the tensor, as the local problem has it.
        """
        like = self.shards.tensors[name]
        if self.is_whole:
            rows = self.shards.own(self.kind.restored(name, matrix, like))
        else:
            rows = self.kind.restored(name, matrix, local(like))
        return self.shards.from_rows(name, rows)

    def taken_states(self, states: States) -> States:
        """Return the solver's states as the problem has them."""
        return {
            name: {key: self._taken_entry(key, entry) for key, entry in state.items()}
            for name, state in states.items()
        }

    def _taken_entry(self, key: str, entry: Tensor) -> Tensor:
        by_rows = self.separable and key in self.row_state and not self.is_whole
        if by_rows and not is_distributed(entry):  # a whole entry from a checkpoint of one process
            return self.shards.own(entry)
        return full(entry) if self.is_whole else local(entry)

    def kept_states(self, states: States) -> States:
        """Return what this process keeps of the solver's new states."""
        if not (self.separable and self.is_whole):
            return states
        return {
            name: {
                key: self.shards.own(entry) if key in self.row_state else entry
                for key, entry in state.items()
            }
            for name, state in states.items()
        }

    def stored(self, state: Tensors) -> Tensors:
        """Return a state as the optimizer holds it: entries with rows of outputs as DTensors."""
        return {
            key: self.shards.wrapped(entry) if self.separable and key in self.row_state else entry
            for key, entry in state.items()
        }

    def agreed(self, condition: Tensor) -> Tensor:
        """Return a boolean scalar: True if it is True for all outputs of the layer."""
        return condition if self.is_whole else self.shards.all_true(condition)

    # ---- inputs ----------------------------------------------------------------------------------

    def inputs(
        self, layer: LayerRecord, method: Method, group: Group, x: Any, moved: Collection[str]
    ) -> Inputs:
        """Return what the problem needs of the inputs of all processes.

        If the step needs no more than XᵀX, XᵀX of all processes is added up. Otherwise the rows are
        gathered, or each process keeps its rows and weights are exchanged in each iteration.

        Args:
            layer: the record of the layer.
            method: how its problem is solved.
            group: the settings of the layer.
            x: the inputs that this process has recorded.
            moved: names of the tensors that the step moves.
        """
        mean = group["local_reduction"] == "mean"
        facts, use, linear_map = layer.shared_facts, layer.row_use(moved), self.kind.linear_map
        assert isinstance(facts, SharedShardFacts)
        if use is not None and not use.is_any:
            return Inputs(x, 1.0, linear_map)  # no solver uses these inputs
        calls = layer.calls
        if self.shards.divides_features:
            x = self.shards.all_features(x)
            rows = torch.split(x, [len(layer.kind.rows(call.x)) for call in calls])
            calls = [call._replace(x=own) for call, own in zip(calls, rows, strict=True)]
        if _goes_through_gram(layer, facts, use):
            return Inputs(self._gram(layer, calls, x, use, mean), 1.0, linear_map)
        weight = self._row_weight(layer, facts, mean)
        if self.exchanges_weights(layer, method, gate=group["gate"]):
            return Inputs(x, weight, ExchangedMap(layer.kind.linear_map, self.shards, moved))
        if isinstance(weight, Tensor):
            weight = self.shards.all_inputs(weight, facts.kept)
        if isinstance(linear_map, ConvMap):
            x = self._all_images(linear_map, x, facts.processes)
        else:
            x = self.shards.all_inputs(x, facts.kept)
        return Inputs(x, weight, linear_map)

    def exchanges_weights(self, layer: LayerRecord, method: Method, *, gate: bool) -> bool:
        """Return True if the exchange of weights in each iteration sends less than that of all rows.

        Only facts that all processes know decide, so that all decide the same. Weights are exchanged
        for dense layers and first-order solvers.

        Args:
            layer: the record of the layer.
            method: how its problem is solved.
            gate: the value of the objective is needed, for all rows.
        """
        facts, shards = layer.shared_facts, self.shards
        iterates = isinstance(method.solver, FirstOrder) and not gate
        dense = type(layer.kind.linear_map) is Dense
        if self.is_whole or shards.same_inputs or not (iterates and dense):
            return False
        assert isinstance(facts, SharedShardFacts)
        d, n = layer.kind.matrix("weight", layer.like).shape[-2:]
        size, processes = layer.like.element_size(), facts.processes
        rows = communication.by_rows(max(facts.kept), n, processes, size)
        columns = n + ("bias" in layer.tensors)
        weights = communication.by_iterations(
            d, columns, method.local_steps, shards.processes, size
        )
        return weights.sent_bytes(shards.processes) < rows.sent_bytes(processes)

    def note(self, layer: LayerRecord, method: Method, group: Group) -> str:
        """Return how rows were exchanged in the last step, for the summary; empty if none were.

        Args:
            layer: the record of the layer.
            method: how its problem is solved.
            group: the settings of the layer.
        """
        if self.is_whole:
            return WHOLE
        facts, use = (
            layer.shared_facts,
            layer.row_use([name for name, p in layer.tensors.items() if p.requires_grad]),
        )
        known = isinstance(facts, SharedShardFacts) and facts.all_have_rows
        if not known or self.shards.same_inputs or (use is not None and not use.is_any):
            return ""
        assert isinstance(facts, SharedShardFacts)
        if _goes_through_gram(layer, facts, use):
            return ""
        exchanged = self.exchanges_weights(layer, method, gate=group["gate"])
        return EXCHANGES_WEIGHTS if exchanged else GATHERS_ROWS

    def gathers_images(self, layer: LayerRecord, moved: Collection[str]) -> bool:
        """Return True if the processes exchange images, whose shapes they tell each other first.

        Args:
            layer: the record of the layer.
            moved: names of the tensors that the step moves.
        """
        facts, use = layer.shared_facts, layer.row_use(moved)
        if not isinstance(self.kind.linear_map, ConvMap) or (use is not None and not use.is_any):
            return False
        assert isinstance(facts, SharedShardFacts)
        return facts.all_have_rows and not _goes_through_gram(layer, facts, use)

    def _gram(
        self, layer: LayerRecord, calls: Sequence[Call], x: Any, use: RowUse | None, mean: bool
    ) -> Gram:
        """Return XᵀX of the rows of all processes, with their weights."""
        use = RowUse() if use is None else use
        if isinstance(x, Gram):
            own = x.to(use.dtype(layer.like))
        else:
            own = row_reduction.gram_of_calls(layer, calls, use)
        facts = layer.shared_facts
        assert isinstance(facts, SharedShardFacts)
        weight = 1 / (layer.row_count * facts.processes) if mean else 1.0
        own = own.times(weight, 1.0 if mean else float(facts.rows))
        if isinstance(own, ReducedGram):
            return replace(own, square=self.shards.sum_over_inputs(own.square))
        both = torch.cat([own.square, own.total.unsqueeze(-2)], dim=-2)
        both = self.shards.sum_over_inputs(both)
        return replace(own, square=both[..., :-1, :], total=both[..., -1, :])

    def _row_weight(
        self, layer: LayerRecord, facts: SharedShardFacts, mean: bool
    ) -> float | Tensor:
        """Return the weight of each row of this process in the local loss.

        It is a number only if all rows of all processes have the same weight.
        """
        if facts.equal_rows:
            return 1 / facts.rows if mean else 1.0
        if not mean and all(rows == kept for rows, kept in facts.of_each):
            return 1.0
        of_each = 1 / (layer.row_count * facts.processes) if mean else 1.0
        own = row_reduction.row_weight(layer, of_each)
        if not isinstance(own, Tensor):
            own = layer.like.new_full((row_reduction.kept_rows(layer), 1), own)
        return own

    def _all_images(self, linear_map: ConvMap, x: Any, processes: int) -> Any:
        """Return the images of all processes."""
        own, numbers = linear_map.packed(x)
        sizes = torch.tensor(own, device=numbers.device)
        counts = torch.tensor([[len(sizes), len(numbers)]], device=numbers.device)
        of_each = self.shards.all_inputs(counts, [1] * processes).T.tolist()
        sizes = self.shards.all_inputs(sizes, of_each[0])
        numbers = self.shards.all_inputs(numbers, of_each[1])
        return linear_map.unpacked(sizes.tolist(), numbers)


def _goes_through_gram(layer: LayerRecord, facts: SharedShardFacts, use: RowUse | None) -> bool:
    """Return True if a problem is solved with XᵀX: if XᵀX was kept, is needed, or saves work."""
    if use is None or facts.some_have_gram:
        return facts.some_have_gram
    d, n = layer.kind.matrix("weight", layer.like).shape[-2:]
    if use.structure != FULL:
        return True
    holds_rows = layer.kind.linear_map.holds_rows
    return use.square or not holds_rows or saves_work(facts.rows, d, n, use.gradients)


def part_of(layer: LayerRecord, method: Method) -> Part | None:
    """Return the part of a layer that this process solves; None if the layer is not sharded."""
    if layer.shards is None:
        return None
    with_outputs = getattr(layer.kind, "with_outputs", None)
    narrower = None if with_outputs is None else with_outputs(layer.shards.own_count)
    row_state = method.solver.row_state
    if narrower is None or couples_outputs(layer, method):
        return Part(layer.shards, layer.kind, narrower is not None, True, row_state)
    return Part(layer.shards, narrower, True, False, row_state)


def couples_outputs(layer: LayerRecord, method: Method) -> bool:
    """Return True if the problems of a layer's outputs depend on each other, or may do so."""
    loss, transfer = method.variant.loss, layer.transfer or Linear()
    parts = (loss, method.variant.target, method.regularizer, method.solver)
    if not all(map(is_ours, parts)):
        return True
    uses_transfer = loss.uses_transfer or "v" in method.variant.target.needs
    return uses_transfer and not transfer.elementwise
