"""The local step of every layer: build its problem, solve it, guard and apply the solution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.config.components import Components
from torch_locoprop.config.groups import OUTER_PREFIX, Group
from torch_locoprop.distributed.fully_shard import local
from torch_locoprop.fast import dispatch
from torch_locoprop.fast.dispatch import graphs, streams
from torch_locoprop.paper.tensors import Tensors, holds
from torch_locoprop.paper.transfers import Linear
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.transfer_assignment import NOT_CALLED, NOT_REACHED
from torch_locoprop.solvers import Spectral
from torch_locoprop.solvers.base import Checked, States
from torch_locoprop.stepping import first_step, stacked_steps
from torch_locoprop.stepping.build_problem import (
    Posed,
    local_problem,
    numbers,
    row_factor,
    running_fisher,
)
from torch_locoprop.stepping.graph_work import Directions, Trained, like_parameters, work_of
from torch_locoprop.stepping.guards import Guarded, drop_momentum, guarded
from torch_locoprop.stepping.measurements import Measurements, measured, timed
from torch_locoprop.stepping.messages import Notices
from torch_locoprop.stepping.method import Method, Plan, number_of
from torch_locoprop.stepping.outer_optimizer import as_gradients, caps_outer
from torch_locoprop.stepping.several_processes import (
    divided_closed_forms,
    divided_outputs,
    divided_polar,
)
from torch_locoprop.stepping.several_processes.layer_part import Part, part_of

Divided = ModuleType  # a module with is_divided(), round_size() and solved()
DIVIDED: tuple[Divided, ...] = (divided_polar, divided_closed_forms)


@dataclass
class LocalSteps:
    """One step of all layers, with the settings and states of the optimizer that takes it."""

    plan: Plan
    components: Components
    state: MutableMapping[Any, Tensors]  # solver states by parameter
    apply: str  # "replace", "gradient" or "nothing"
    has_outer: bool  # an outer optimizer takes the displacements as gradients
    terms: float  # number of terms of a loss that sums, otherwise 1
    measurements: Measurements | None
    notices: Notices
    draws_labels: bool  # labels were drawn in the forward pass of this step
    fisher_missing: bool = False  # set if a layer had no Fisher matrix yet

    def solve_all(self, layers: Trained) -> Directions:
        """Solve every layer's problem; while a CUDA graph is recorded, on streams of their own."""
        if self.measurements is None and any(layer.shared_facts for layer in layers):
            return self._solve_in_rounds(layers)
        directions: Directions = {}
        if not any(layer.given[0].device.type in graphs.DEVICE_TYPES for layer in layers):
            for alike in self._alike(layers):
                directions |= self._solve_alike(alike, layers)
            return directions
        by_kernels = all(may_have_kernels(self.plan, layer) for layer in layers)
        most = streams.MANY_STREAMS if by_kernels else streams.FEW_STREAMS
        with streams.side_streams(most) as side:
            for alike in self._alike(layers):
                with streams.on_device(alike[0].given[0].device), side(alike[0].ready):
                    directions |= self._solve_alike(alike, layers)
        return directions

    def _alike(self, layers: Trained) -> list[list[LayerRecord]]:
        """Return groups of layers: those of one shape that may be stacked, and each other layer."""
        found: dict[Hashable, list[LayerRecord]] = {}
        shapes = Counter(layer.like.shape for layer in layers)
        for layer in reversed(layers):  # the last layer's gradient exists first
            shape, device = layer.like.shape, layer.given[0].device
            alike = shapes[shape] > 1 and self._may_be_stacked(layer)
            found.setdefault((shape, device) if alike else layer, []).append(layer)
        return list(found.values())

    def _may_be_stacked(self, layer: LayerRecord) -> bool:
        """Return True if a layer's step may be part of a stack.

        On a GPU, steps that renew C are on streams of their own, and so are all steps that start while
        the backward pass still runs.
        """
        solver = self.plan.method_now(layer).solver  # of another type if the layer has no rows
        # Layers that processes share are solved in the same order by all, as these exchange numbers.
        if type(solver) is not Spectral or layer.shared_facts is not None:
            return False
        if layer.given[0].device.type in graphs.DEVICE_TYPES:
            number = number_of(layer, self.plan.group(layer))
            if streams.overlapping or solver.renews(number):
                return False
        return stacked_steps.is_small(layer.kind.matrix("weight", layer.like))

    def solve_or_replay(
        self, layers: Trained, step_graphs: graphs.StepGraphs, groups: Sequence[Group]
    ) -> Directions:
        """Solve every layer's problem, by replaying a CUDA graph if the same work was recorded.

        Args:
            layers: the layers with the tensors that the step moves.
            step_graphs: the recordings of earlier steps.
            groups: the groups of local problems.
        """
        device, *others = {layer.given[0].device for layer in layers}
        if device.type not in graphs.DEVICE_TYPES:
            return self.solve_all(layers)
        with streams.on_device(device):
            if others or not graphs.can_record(device):
                return self.solve_all(layers)
            with step_graphs.rates_on_device(groups, device):
                known = (self.plan, groups, self.components, self.state, self.terms)
                work = None if self.measurements is not None else work_of(layers, *known)

                def solve() -> Directions:
                    return {p: local(each) for p, each in self.solve_all(layers).items()}

                directions = like_parameters(step_graphs.take(work, solve), layers)
        if work is not None and self.apply == "replace":
            torch.autograd.graph.increment_version(work.moving)  # autograd does not see a replay
        return directions

    def _solve_alike(self, alike: Sequence[LayerRecord], layers: Trained) -> Directions:
        """Solve the problem of one layer, or those of a group of :meth:`_alike`, in stacks."""
        if len(alike) == 1:
            return self._solve_timed(alike[0], layers[alike[0]])
        directions: Directions = {}
        for part in stacked_steps.parts(alike):
            stacks: dict[Hashable, list[Posed]] = {}
            for layer in part:
                _forget_missing_calls(layer)
                posed = self._posed(layer, layers[layer])
                key = stacked_steps.stack_of(posed)
                if key is None:
                    directions |= self._solve_stack([posed])
                else:
                    stacks.setdefault(key, []).append(posed)
            for stack in stacks.values():
                directions |= self._solve_stack(stack)
        return directions

    def _solve_stack(self, stack: Sequence[Posed]) -> Directions:
        """Solve problems whose steps can be stacked, or a single problem of any kind."""
        names, device = [posed.layer.name for posed in stack], stack[0].layer.given[0].device
        directions: Directions = {}
        with timed(self.measurements, names, device):
            if len(stack) == 1:
                return self._solve_posed(stack[0])
            for posed, solution in zip(stack, stacked_steps.solved(stack), strict=True):
                directions |= self._apply_solution(posed, *solution)
        return directions

    def _solve_in_rounds(self, layers: Trained) -> Directions:
        """Solve layers that several processes share, some of them together."""
        directions: Directions = {}
        waiting: dict[Divided, list[Posed]] = {}
        for layer in reversed(layers):
            with streams.on_device(layer.given[0].device):
                if layer.shared_facts is None:
                    directions |= self.solve(layer, layers[layer])
                    continue
                posed = self._posed(layer, layers[layer])
                divided = next((each for each in DIVIDED if each.is_divided(posed)), None)
                if divided is None:
                    directions |= self._solve_posed(posed)
                    continue
                together = waiting.setdefault(divided, [])
                together.append(posed)
                if len(together) == divided.round_size(posed):
                    directions |= self._solve_together(divided, waiting.pop(divided))
        for divided, together in waiting.items():
            directions |= self._solve_together(divided, together)
        return directions

    def _solve_together(self, divided: Divided, layers: Sequence[Posed]) -> Directions:
        """Solve some layers whose polar factors or closed forms are divided among processes."""
        directions: Directions = {}
        for posed, (new, states) in zip(layers, divided.solved(layers), strict=True):
            directions |= self._apply_solution(posed, new, states)
        return directions

    def _solve_timed(self, layer: LayerRecord, trained: Mapping[str, nn.Parameter]) -> Directions:
        """Solve one layer's problem, and measure how long that takes if measurements are on."""
        if self.measurements is None:
            return self.solve(layer, trained)
        with timed(self.measurements, [layer.name], layer.given[0].device):
            return self.solve(layer, trained)

    def solve(self, layer: LayerRecord, trained: Mapping[str, nn.Parameter]) -> Directions:
        """Solve one layer's problem and write the solution, or return it as gradients.

        Args:
            layer: the record of the layer.
            trained: the layer's tensors that have a gradient, which the step moves.
        """
        unrecorded = not (layer.calls or layer.copies or layer.obstacle or layer.lacks_rows)
        if unrecorded and layer.shared_facts is None:
            gradients = {p: p.grad for p in trained.values() if p.grad is not None}
            if not any(holds(g.any(), unknown=True) for g in gradients.values()):
                return gradients if self.has_outer else {}
            layer.note = layer.note or (NOT_REACHED if layer.called else NOT_CALLED)
            if layer.called:
                self.notices.not_reached(layer.name)
            else:
                self.notices.not_called(layer.name)
        else:
            _forget_missing_calls(layer)
        return self._solve_posed(self._posed(layer, trained))

    def _posed(self, layer: LayerRecord, trained: Mapping[str, nn.Parameter]) -> Posed:
        """Return a layer's problem, with all that its solution needs."""
        owner = next(iter(trained))
        method, group_of = self.plan.method_now(layer), self.plan.group_of
        states = {name: _state_like(p, self.state[p]) for name, p in trained.items()}
        fisher = running_fisher(layer, method, states[owner].pop("fisher", None))
        if fisher is None and method.needs_fisher:
            method = self._without_fisher(layer, method)
        part = None if layer.shards is None else part_of(layer, method)
        if part is not None:
            states = part.taken_states(states)
        problem = local_problem(
            layer, trained, method, group_of, fisher, self.terms, self.has_outer, part
        )
        of_tensors = {name: numbers(group_of[p]) for name, p in trained.items()}
        return Posed(layer, trained, method, part, problem, states, of_tensors, fisher)

    def _solve_posed(self, posed: Posed) -> Directions:
        """Solve a problem and apply the solution."""
        solver, local_steps = posed.method.solver, posed.method.local_steps
        local_decay = self.plan.group(posed.layer)["local_decay"]
        divided = posed.problem.others is not None and divided_outputs.is_divided(posed)
        posed.layer.division = divided_outputs.DIVIDED if divided else ""
        if divided:
            new, states = divided_outputs.solved(posed, local_decay)
        else:
            given = posed.problem, posed.states, posed.numbers
            new, states = dispatch.solve(solver, *given, local_steps, local_decay)
        return self._apply_solution(posed, new, states)

    def _apply_solution(self, posed: Posed, new: Tensors, states: States) -> Directions:
        """Apply a solution as far as it is finite and the guards allow; return it as gradients."""
        layer, part, group = posed.layer, posed.part, self.plan.group(posed.layer)
        if posed.fisher is not None:
            states[next(iter(posed.trained))]["fisher"] = posed.fisher
        entries = [*new.values(), *_new_entries(states, posed.states)]
        settled = new.finite[0] if isinstance(new, Checked) else dispatch.finite(entries)
        if part is not None:
            settled, states = part.agreed(settled), part.kept_states(states)
        kept = [
            pair
            for name, state in states.items()
            for pair in _state_pairs(self.state[posed.trained[name]], state, settled, part)
        ]
        found = self._guarded(posed, new)
        ok = dispatch.finite(list(found.new.values())) if group["gate"] else settled
        if part is not None and group["gate"]:
            ok = part.agreed(ok)
        _count(layer, found, ok)
        self._measure(posed, found.new)
        applied = _pairs(posed, found.new) if self.apply == "replace" else []
        if group["gate"]:
            dispatch.write(settled, kept)
            drop_momentum(
                [
                    {key: local(entry) for key, entry in self.state[posed.trained[name]].items()}
                    for name in states
                ],
                found.gated,
            )
            dispatch.write(ok, applied)
        else:
            dispatch.write(ok, [*kept, *applied])
        return self._directions(posed, found, ok)

    def _guarded(self, posed: Posed, new: Tensors) -> Guarded:
        """Return the solution after the guards of the layer's group."""
        group = self.plan.group(posed.layer)
        cap = None if self.has_outer and caps_outer(self.apply, group) else group["cap"]
        if not group["gate"] and cap is None:
            return Guarded(new)
        return guarded(posed.problem, new, gate=group["gate"], cap=cap, cap_by=group["cap_by"])

    def _measure(self, posed: Posed, new: Tensors) -> None:
        """Measure a solution for ``diagnose=True``, and what the first step of all did."""
        layer, group = posed.layer, self.plan.group(posed.layer)
        if self.measurements is not None:
            self.measurements[layer.name] = measured(posed.problem, new)
        if group["steps"] == 0 and not self.has_outer and posed.part is None:
            layer.rescale_row_gradients()
            of_row = row_factor(layer, group, self.terms)
            solver = posed.method.solver
            layer.first_step = first_step.ratios(layer, posed.problem, new, solver, of_row)

    def _directions(self, posed: Posed, found: Guarded, ok: Tensor) -> Directions:
        """Return what an outer optimizer gets: the displacement or, in control runs, the gradient."""
        if self.apply == "nothing":
            return {p: p.grad for p in posed.trained.values() if p.grad is not None}
        if not self.has_outer:
            return {}
        layer, problem, is_backprop = posed.layer, posed.problem, posed.method.is_backprop
        return as_gradients(layer, problem, found, ok, is_backprop, self.plan.group_of, posed.part)

    def _without_fisher(self, layer: LayerRecord, method: Method) -> Method:
        """Return a BackProp step for a layer first used between two samplings of labels."""
        if self.draws_labels:
            raise RuntimeError(
                f"No Fisher matrix was sampled for layer {layer.name!r}. Call the model itself, "
                "model(x), so that labels can be drawn from its output, and checkpoint its parts with "
                "use_reentrant=False."
            )
        self.fisher_missing = True
        return method.as_backprop()


def may_have_kernels(plan: Plan, layer: LayerRecord) -> bool:
    """Return True if our own kernels will solve a layer's problem; cuBLAS takes memory per stream."""
    method, transfer = plan.method(layer), layer.transfer or Linear()
    weight = layer.like
    parts = (method.variant, method.regularizer, method.solver, transfer, weight)
    all_rows = plan.group(layer)["max_rows"] is None
    return all_rows and dispatch.may_have_kernels(layer.kind.linear_map, *parts)


def _count(layer: LayerRecord, found: Guarded, ok: Tensor) -> None:
    """Count a solution that was skipped, rejected by the gate, or shortened by the cap."""
    layer.count("skipped", ~ok)
    if found.gated is not None:
        layer.count("gated", found.gated)
    if found.capped is not None:
        layer.count("capped", found.capped)


def _pairs(posed: Posed, new: Tensors) -> list[tuple[Tensor, Tensor]]:
    """Return the new tensors of a layer in the module's shapes, each with the one to write over."""
    kind, part = posed.layer.kind, posed.part
    given = [(name, tensor, posed.trained[name]) for name, tensor in new.items()]
    if part is None:
        return [(kind.restored(name, tensor, p), p) for name, tensor, p in given]
    return [(part.restored(name, tensor), local(p)) for name, tensor, p in given]


def _forget_missing_calls(layer: LayerRecord) -> None:
    """Remove the note that earlier calls of a layer were not recorded."""
    if layer.note in (NOT_CALLED, NOT_REACHED):
        layer.note = ""


def _state_like(parameter: nn.Parameter, state: Tensors) -> Tensors:
    """Return a solver's state of a parameter in the parameter's dtype and on its device.

    Args:
        parameter: the parameter, which may have been moved since the last step.
        state: the state of the parameter, that of the solver and that of an outer optimizer.
    """
    device, dtype = parameter.device, parameter.dtype
    return {
        key: value.to(device) if key == "step" else value.to(device, dtype)
        for key, value in state.items()
        if not key.startswith(OUTER_PREFIX)
    }


def _new_entries(states: States, before: States) -> list[Tensor]:
    """Return the entries of solver states that the solver has changed."""
    return [
        entry
        for name, state in states.items()
        for key, entry in state.items()
        if entry is not before[name].get(key)
    ]


def _state_pairs(
    state: Tensors, new: Tensors, ok: Tensor, part: Part | None
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of new and old entries of a state, to be written in place.

    If an entry cannot be written in place, all entries are put into ``state`` at once (if ``ok``), and
    no pairs are returned.

    Args:
        state: the state, which may have no entries yet.
        new: the new entries.
        ok: a boolean scalar: True if the new entries may be used.
        part: the part of a sharded layer that this process solves.
    """
    pairs = []
    for key, entry in new.items():
        old = state.get(key)
        if part is not None and old is not None:
            old = local(old)
        if old is None or (old.shape, old.dtype, old.device) != (
            entry.shape,
            entry.dtype,
            entry.device,
        ):
            if holds(ok, unknown=True):
                new = {key: _with_own_memory(entry) for key, entry in new.items()}
                state.update(new if part is None else part.stored(new))
            return []
        if entry is not old:
            pairs.append((entry, old))
    return pairs


def _with_own_memory(entry: Tensor) -> Tensor:
    """Return an entry that keeps no other tensor in memory, as a view of a stack would.

    It is contiguous, for fused kernels, also where processes have sent it as columns of a matrix.
    """
    entry = entry.contiguous()
    return entry.clone() if entry.untyped_storage().nbytes() > entry.nbytes else entry
