"""The base class of ``LocoProp``: its layers and hooks, its plan, what a step starts from, copies.

The order of a step is in ``optimizer.py``, added parameter groups are in ``param_groups.py``, and what
loading a state dict checks is in ``state_dicts.py``.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from torch_locoprop.config.groups import BOOKKEEPING, EMPTY, OF_OUTER, Group, check_agreement
from torch_locoprop.config.presets import Given, told_unused
from torch_locoprop.config.settings import OUTSIDE_PLAN
from torch_locoprop.distributed import ddp
from torch_locoprop.distributed.fully_shard import local
from torch_locoprop.fast.dispatch import graphs
from torch_locoprop.paper.tensors import holds
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording.hooks import ModelHooks
from torch_locoprop.recording.layer_record import LayerRecord, check_reduced
from torch_locoprop.recording.local_layer import COMPUTED, TRANSFORMED, check_dense, check_intact
from torch_locoprop.recording.loss_terms import LossTerms
from torch_locoprop.recording.model_scan import (
    NOT_GIVEN,
    Unserved,
    check_complete,
    newcomers,
    scan,
)
from torch_locoprop.recording.transfer_assignment import (
    contradiction,
    decide_all,
    give_transfers,
    look_again,
    seen_loss,
)
from torch_locoprop.stepping import first_step
from torch_locoprop.stepping.build_problem import count_loss_terms
from torch_locoprop.stepping.empty_state import empty_states, hides_state
from torch_locoprop.stepping.fallback_optimizer import FallbackFactory
from torch_locoprop.stepping.graph_work import Directions, Trained, is_capturable
from torch_locoprop.stepping.measurements import Measurements
from torch_locoprop.stepping.messages import Notices
from torch_locoprop.stepping.method import MISSED, Plan, number_of, parameters_of, problems_before
from torch_locoprop.stepping.outer_optimizer import Apply, capped_step
from torch_locoprop.stepping.outer_state import own_entries
from torch_locoprop.stepping.requirements import (
    check_recorded_needs,
    require,
    require_rows,
)
from torch_locoprop.stepping.several_processes.uneven_inputs import Joins
from torch_locoprop.stepping.state_dicts import WithStateDict

# Steps after which the next passes search for transfers again, as the model may have changed.
_SEARCH_AGAIN = frozenset(10**k for k in range(1, 9))
_LOOK_EVERY = 100  # steps between two reads of a GPU's skip counters, each of which is a host sync

# What a copied or pickled optimizer keeps; records, hooks and CUDA graphs are made anew.
_KEPT = (
    *("_model", "_components", "_given", "_given_transfers", "_loss", "_fallback", "_outer"),
    *("_apply", "_patterns", "_measurements", "_replays", "_notices", "_fisher_missing"),
    *("_fallback_rate", "_fallback_maximizes", "_matrix_group", "_terms"),
)


class LayerOptimizer(WithStateDict, Joins):
    """Base class of :class:`~torch_locoprop.LocoProp`: what it needs before and after its steps."""

    _model: nn.Module
    _apply: Apply
    _given: Given  # the settings and the preset of the constructor
    _given_transfers: dict[str, str | Transfer]  # the argument transfers=, by module name
    _terms: LossTerms  # counts the terms of the loss module that was given
    _notices: Notices
    _patterns: tuple[str, ...] | None  # the argument layers=; None: all layers
    _measurements: Measurements | None
    _fallback_factory: FallbackFactory | None
    _fisher_missing: bool  # a layer had no Fisher matrix in the last step
    _attached: bool
    _numbers: list[list[Any]]  # settings that are no part of the plan, as they were checked
    _counted: dict[str, dict[str, int]]  # counts at a resumption or a change of groups
    # What the scan of the model has found: layers with the parameters given for them, other modules.
    _found: tuple[list[tuple[LayerRecord, list[nn.Parameter]]], list[Unserved]]
    _followed: list[int]  # ids of the parameters in the groups, as layers know them

    def _attach(self) -> None:
        """Find the layers of the model and put hooks on them."""
        if self._attached:
            self._counted = self._counts()
        given = {p for group in self.param_groups for p in group["params"]}
        self._layers, self._unserved = scan(self._model, given, patterns=self._patterns)
        self._found = [(layer, layer.given) for layer in self._layers], self._unserved
        self._followed = parameters_of(self._local_groups())
        for layer in self._layers:
            layer.count_from(self._counted.get(layer.name, {}))
        give_transfers(self._layers, self._given_transfers)
        self._check_agreement(self._layers, self._group_of())
        Joins.__init__(self)
        self._hooks = ModelHooks(self._model, self._layers, self._loss.known_transfer)
        self._hooks.before_forward = weakref.WeakMethod(self._require_anew)
        self._graphs = graphs.StepGraphs()
        self._numbers = []
        self._attached = True
        self._require()

    @contextmanager
    def _states_in_groups(self) -> Iterator[None]:
        """Leave out, inside, the states of parameters that were taken out of their groups."""
        states, known = self.state, set(self._parameters())
        self.state = defaultdict(dict, {p: own for p, own in states.items() if p in known})
        try:
            yield
        finally:
            self.state = states

    def _follow_groups(self) -> None:
        """Train the parameters that are in the groups now: a user may take some out, and put them back.

        Raises:
            RuntimeError: if a parameter was put into a group that was in none before.
        """
        given_now = parameters_of(self._local_groups())
        if given_now == self._followed:
            return
        layers, unserved = self._found
        now = self._group_of()
        if not now.keys() <= {p for _, given in layers for p in given}:
            raise RuntimeError(
                "A parameter was put into param_groups that this optimizer was not made with. Call "
                "add_param_group, or make a new optimizer."
            )
        for layer, given in layers:
            layer.given = [p for p in given if p in now]
        removed = [layer for layer, _ in layers if not layer.given]
        for layer in removed:
            layer.clear()
        self._layers = [layer for layer, _ in layers if layer.given]
        self._unserved = unserved + [
            Unserved(layer.name, layer.kind.kind, NOT_GIVEN, tuple(layer.tensors.values()))
            for layer in removed
        ]
        self._followed = given_now

    def _require(self) -> None:
        """Plan the next step, and tell layers and hooks what it will need."""
        self._plan = Plan(self._local_groups(), self._components)
        self._terms.wanted = self._averages
        self._require_of_plan()

    def _require_of_plan(self) -> None:
        """Tell layers and hooks what the next step of the present plan will need."""
        require(
            self._plan,
            self._layers,
            self._hooks,
            self.state,
            steps=self._local_groups()[0]["steps"],
            diagnosed=self._measurements is not None,
            fisher_missing=self._fisher_missing,
        )
        self._fisher_missing = False

    def _require_next(self) -> None:
        """Plan the step after this one, unless the plan stays and the passes record for it already."""
        if not self._plan.is_current(self._local_groups()):
            self._require()
            return
        anew = self._hooks.search.is_on or self._fisher_missing
        anew |= self._local_groups()[0]["steps"] == 1  # the first step was measured
        if anew or not self._plan.is_required(self._layers):
            self._require_of_plan()
        self._hooks.search.is_on |= self._searches_again

    def _plan_again(self, trained: Trained) -> None:
        """Plan this step again, as settings have changed since the passes recorded for it.

        Raises:
            RuntimeError: if the step needs what was not recorded.
        """
        self._plan = Plan(self._local_groups(), self._components)
        require_rows(self._plan, self._layers, self.state, diagnosed=self._measurements is not None)
        try:
            check_recorded_needs(self._plan, trained)
        except RuntimeError:
            self._require()  # the next pass, of a compiled model too, will record it
            raise

    def _require_anew(self) -> None:
        """Plan again before a forward pass if settings have changed since the last step."""
        self._follow_groups()
        if not self._layers:
            return
        if not self._is_planned() and all(layer.starts_afresh() for layer in self._layers):
            self._require()

    def _is_planned(self) -> bool:
        """Return True if the plan is for the settings as they are now; check these if they changed."""
        groups = self._local_groups()
        current = self._plan.is_current(groups)
        given = [[group[name] for name in OUTSIDE_PLAN] for group in groups]
        numbers = [[each for each in own if not isinstance(each, Tensor)] for own in given]
        if not current or numbers != self._numbers:
            for group in groups:
                self._components.check(group)
            if len(groups) > 1 and self._outer is None:  # whose schedules move lr, but no local_lr
                self._check_agreement(self._layers, self._group_of(), later=True)
            self._numbers = numbers
        return current

    @property
    def skipped_updates(self) -> dict[str, int]:
        """The number of local solutions of each layer that were not finite and so were not written."""
        return {layer.name: int(layer.counts.get("skipped", 0)) for layer in self._layers}

    @property
    def capturable(self) -> bool:
        """True if all steps but the first can be replayed as a CUDA graph: none depends on the host."""
        alone = self._fallback is None and self._outer is None and self._measurements is None
        return alone and is_capturable(self._local_groups(), self._components, self._layers)

    @property
    def phase(self) -> tuple[int, ...]:
        """A key of the next step: if :attr:`capturable`, steps with equal keys do the same work."""
        group_of, solver = self._plan.group, self._components.solver
        return tuple(
            solver(group_of(layer)).phase(number_of(layer, group_of(layer)))
            for layer in self._layers
        )

    def __repr__(self) -> str:
        """Return the settings of each group: those that its solver uses, or the fallback's own."""
        lines = [f"{type(self).__name__} ("]
        for number, group in enumerate(self.param_groups):
            unused: Iterable[str] = ("fallback",)
            by = "" if self._fallback is None else f" ({type(self._fallback).__name__})"
            if not group["fallback"]:
                by = ""
                unused = {*self._components.solver(group).ignores, OF_OUTER, *BOOKKEEPING}
            lines.append(f"Parameter Group {number}{by}")
            shown = sorted(group.keys() - {"params", "initial_lr", *unused})
            lines += [f"    {name}: {group[name]}" for name in shown]
        return "\n".join([*lines, ")"])

    def _told_unused(self) -> str:
        """Return a sentence on settings that were given and have no effect; empty if there are none."""
        solver = self._components.solver(self.defaults)
        return told_unused(self._given.settings, solver, self.defaults["solver"])

    def _detect_transfers(self) -> None:
        """Read from the recorded calls which transfers follow layers that are new to the optimizer.

        In a few later steps, look whether the transfers of all layers are still the same.
        """
        if not any(layer.calls and not layer.decided for layer in self._layers):
            if self._hooks.search.is_on and self._searches_again:
                look_again(self._layers, self._hooks.search.leaves)
            return
        if self._loss.unseen is not None:
            self._loss = seen_loss(self._layers, self._loss, self._hooks.search.output_shape)
        told = contradiction(self._layers, self._loss)
        if told:
            self._notices.once("loss", told)
        for layer in decide_all(self._layers, self._hooks, self._loss, self._terms.inputs):
            layer.condense()  # later steps and resumed runs reduce rows in the pass
            if not self._plan.of(layer).needs_output:
                layer.drop_outputs()
        self._terms.inputs.clear()

    @property
    def _searches_again(self) -> bool:
        """True if the passes of the next step search for transfers once more, outside of compilers."""
        due = self._local_groups()[0]["steps"] in _SEARCH_AGAIN
        return due and not self._hooks.compiled_graphs

    def _warn_of_added(self) -> None:
        """Warn of modules with gradients that the model did not have when the optimizer was made."""
        new = [] if self._is_sharded else newcomers(self._model, self._layers, self._unserved)
        names = [each.name for each in new if any(p.grad is not None for p in each.parameters)]
        if names:
            self._notices.added(names)

    def _warn_of_first_step(self) -> None:
        """Read what the first step did in each layer, and warn if it is out of range."""
        for group in self._local_groups():
            steps = []
            for layer in self._layers:
                if layer.first_step is not None and self._plan.group(layer) is group:
                    layer.first_step = first_step.on_host(layer.first_step)
                    steps.append(layer.first_step)
            told = first_step.advice(steps, group, self._components.solver(group))
            if told and len(self._local_groups()) > 1:
                number = next(i for i, own in enumerate(self.param_groups) if own is group)
                told = f"Parameter group {number}: {told}"
            if told:
                self._notices.once(told, f"{told} print(opt.summary()) shows each layer.")

    def _warn_of_skipped(self) -> None:
        """Warn of updates that were skipped as not finite; on a GPU, look every hundred steps."""
        device = self._layers[0].given[0].device
        if device.type in graphs.DEVICE_TYPES and graphs.is_recording():
            return  # the host cannot read the counters now
        if self._local_groups()[0]["steps"] == 1:
            self._warn_of_added()
            self._warn_of_first_step()
        counters = {
            layer.name: layer.counts["skipped"]
            for layer in self._layers
            if "skipped" in layer.counts
        }
        on_host = all(isinstance(count, int) or count.is_cpu for count in counters.values())
        if not on_host and self._local_groups()[0]["steps"] % _LOOK_EVERY != 0:
            return
        before = {name: self._counted.get(name, {}).get("skipped", 0) for name in counters}
        if any(int(count) > before[name] for name, count in counters.items()):
            self._notices.not_finite([name for name, count in counters.items() if int(count)])

    def _counts(self) -> dict[str, dict[str, int]]:
        """Return how often each layer's solutions were skipped, gated and capped."""
        return {layer.name: layer.counted() for layer in self._layers}

    def _drifts(self) -> bool:
        """Return True if several processes solve their own problems and nothing averages gradients."""
        shards = [layer.shards for layer in self._layers]
        if self._hooks.averaging.processes is not None or all(s and s.data for s in shards):
            return False
        several = ddp.are_several() and self._plan.has_curvature()
        if not several or ddp.is_tensor_parallel(self._model):
            return False
        return not self._hooks.averaging.pipeline.has_all_processes

    @property
    def _is_sharded(self) -> bool:
        """True if ``fully_shard`` has divided a layer among processes."""
        return any(layer.shards is not None for layer in self._layers)

    # ---- what a step starts from, and what it steps beside the layers --------------------------

    def _layers_with_gradient(self) -> Trained:
        """Return the layers that this step moves, with their tensors."""
        self._follow_groups()
        check_intact(self._layers)
        if self._join_config.enable and not self._hooks.averaging.is_alone:
            self._share_gradients()
        unreduced = [layer for layer in self._layers if layer.sharded.unreduced]
        if unreduced and self._hooks.averaging.pipeline.is_used:
            for layer in unreduced:  # a pipeline adds up after all backward passes
                layer.note_reduction()
        check_reduced(unreduced)
        if self._measurements is not None:
            self._measurements.clear()
        trained = {layer: own for layer in self._layers if (own := layer.with_gradient)}
        check_dense(trained)
        return trained

    def _count_step(self) -> None:
        """Count a step of the local problems."""
        for group in self._local_groups():
            group["steps"] += 1

    def _note_absent(self, trained: Trained) -> None:
        """Note which layers were absent from a step that renews what their solvers keep of inputs."""
        for layer in self._layers:
            group = self._plan.group(layer)
            if group["steps"] % group["every"]:
                continue
            if layer in trained:
                layer.counts.pop(MISSED, None)
            elif self._components.solver(group).renews(problems_before(group)):
                layer.counts[MISSED] = 1

    def _drop_overwritten(self, trained: Trained) -> None:
        """Drop recorded inputs that were written to; warn of them, and of those not recorded."""
        overwritten = [layer.name for layer in trained if layer.drop_overwritten()]
        if overwritten:
            self._notices.overwritten(overwritten)
        alone = self._hooks.averaging.processes is None
        lacking = [layer for layer in trained if layer.lacks_any_rows(alone=alone)]
        if lacking:
            self._notices.lacking(lacking)
        hidden = [layer.name for layer in trained if layer.obstacle in (TRANSFORMED, COMPUTED)]
        if hidden:
            self._notices.hidden(hidden)

    def _has_no_problems(self, trained: Trained, skipped: bool) -> bool:
        """Return True if this step has no local problems, and that is not an error.

        A step without local problems is not an error in three cases: all layers with a local problem
        are frozen and other parameters are trained; the closure returned None to skip a batch; or all
        gradients and learning rates are zero, as in tools that take a step to initialize the state.

        Args:
            trained: the layers with a gradient.
            skipped: the closure returned None.
        """
        if any(layer.calls for layer in trained) or (trained and self._hooks.averaging.has_joined):
            return False
        if trained:
            gradients = [
                local(p.grad)
                for own in trained.values()
                for p in own.values()
                if p.grad is not None
            ]
            still = all(float(group["lr"]) == 0 for group in self._local_groups())
            return still and not any(holds(g.any(), unknown=True) for g in gradients)
        others = [group for group in self.param_groups if group["fallback"]]
        idle = skipped or not self._layers  # the user has taken all layers out of the groups
        return idle or any(p.grad is not None for group in others for p in group["params"])

    def _step_without_problems(self, trained: Trained) -> None:
        """Step the outer optimizer's other parameters, or make states without content.

        Args:
            trained: the layers with a gradient. Gradients and learning rate are zero.
        """
        own = [p for tensors in trained.values() for p in tensors.values()]
        if own and not any(own_entries(self.state.get(p, {})) for p in own):
            self._make_empty_states(trained)
        if self._outer is None:
            return
        factors = self._outer_factors()
        if own and all(float(group["lr"]) == 0 for group in self.param_groups):
            zeros = {p: p.grad for p in own if p.grad is not None}
            self._outer.make_empty_states(zeros, factors)
        elif self._outer.trains_rest:
            self._outer.step({}, factors)
        self._put_outer_beside()

    def _outer_factors(self) -> dict[nn.Parameter, float]:
        """Return by how much schedules scale the rates of the outer optimizer in this step."""
        return {} if self._outer is None else self._outer.factors(self._groups_with_rates())

    def _step_outer(
        self, trained: Trained, directions: Directions, factors: Mapping[nn.Parameter, float]
    ) -> None:
        """Step the outer optimizer, if there is one, with the displacements as its gradients."""
        if self._outer is not None:
            with capped_step(self._apply, trained, self._plan.group_of):
                self._outer.step(directions, factors)
            self._put_outer_beside()

    def _step_others(self) -> None:
        """Step the fallback, except in a control run in which all weights stay."""
        stays = self._apply == "nothing" and self._outer is None
        if self._fallback is not None and not stays:
            self._step_fallback()

    def _make_empty_states(self, trained: Trained) -> None:
        """Give all layers states without content, for tools that load saved states into them."""
        for layer, own in trained.items():
            method = self._plan.method(layer)
            for p, state in empty_states(layer, own, method).items():
                self.state[p] = state
            if hides_state(method.solver):
                self._notices.hidden_state(method.solver.name)
        for group in self._local_groups():
            group["state_of"] = EMPTY

    def _loss_terms(self) -> float:
        """Return the number of terms of a loss that sums, as far as it is known; otherwise 1."""
        if not self._averages:
            return 1.0
        found = self._hooks.search.loss_facts
        facts = found.completed(self._loss.facts)
        if not facts.sums:
            return 1.0
        terms = self._terms.total(self._layers)
        if terms is None and all(len(layer.passes) == 1 for layer in self._layers if layer.calls):
            terms = found.terms
        if terms is None:
            terms = count_loss_terms(self._layers, facts.by_row)
        self._terms.clear()
        if terms is None:
            self._notices.unknown_terms()
        return float(terms or 1)

    @property
    def _averages(self) -> bool:
        """True if a local problem is averaged over its rows."""
        return any(group["local_reduction"] == "mean" for group in self._local_groups())

    def _groups_with_rates(self) -> list[Group]:
        """Return the groups whose schedules move the rates of the outer optimizer."""
        return [group for group in self.param_groups if group.get("local_lr") is not None]

    def _local_groups(self) -> list[Group]:
        """Return the groups of local problems."""
        return [group for group in self.param_groups if not group["fallback"]]

    def _group_of(self) -> dict[nn.Parameter, Group]:
        return {p: group for group in self._local_groups() for p in group["params"]}

    def _check_agreement(
        self,
        layers: list[LayerRecord],
        group_of: Mapping[nn.Parameter, Group],
        *,
        later: bool = False,
    ) -> None:
        for layer in layers:
            groups = [group_of[p] for p in layer.given]
            check_agreement(layer.name, groups, self._components, later=later)

    # ---- copied optimizers -----------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _KEPT}
        own |= {"_fallback_factory": None, "_attached": False}
        return {**super().__getstate__(), **own, "_counted": self._counts()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds this key; our groups do not have it
        for group in self._local_groups():
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        if "_model" in state:
            check_complete(self._model)
            self._attach()
