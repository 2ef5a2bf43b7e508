"""LocoProp as a ``torch.optim.Optimizer``: after each backward pass, every layer solves its problem.

:meth:`LocoProp.step` follows the paper's algorithm box. What its stages do lives in ``recording/``
(inputs and gradients), ``stepping/`` (local problems, iterations) and ``paper/`` (formulas).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack, overload

import torch
from torch import distributed, nn
from torch._compile import _disable_dynamo

from torch_locoprop.config.arguments import check_arguments, with_settings
from torch_locoprop.config.components import Components
from torch_locoprop.config.groups import (
    BOOKKEEPING,
    forget_other_solvers,
    restricted,
    warn_of_ignored,
)
from torch_locoprop.config.presets import Given, PresetName, resolved, warn_of_unused
from torch_locoprop.config.settings import Guards, Settings, with_guards
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording.loss_inspection import OutputTransfer, given_loss, warn_of_unusual
from torch_locoprop.recording.loss_terms import watched
from torch_locoprop.recording.model_scan import check_any_served, layer_patterns, scan
from torch_locoprop.recording.transfer_assignment import give_transfers
from torch_locoprop.reporting.diagnostics import Diagnostics, diagnostics_of
from torch_locoprop.reporting.summary import summary_of
from torch_locoprop.stepping.fallback_optimizer import FallbackFactory, check_recorded
from torch_locoprop.stepping.graph_work import Directions, Trained
from torch_locoprop.stepping.local_steps import LocalSteps
from torch_locoprop.stepping.messages import Notices
from torch_locoprop.stepping.outer_optimizer import Apply, OuterFactory, make_outer
from torch_locoprop.stepping.param_groups import WithParamGroups
from torch_locoprop.stepping.several_processes.agreement import agree


@with_settings
class LocoProp(WithParamGroups):
    """Trains each layer by its own local problem, and all other parameters by ``fallback``.

    The loop is the ordinary one: ``loss.backward(); opt.step(); opt.zero_grad()``. Without settings,
    every layer takes the spectral step, which needs no tuning; ``preset="paper-m"`` is the paper's
    LocoProp-M. One local step with ``solver="sgd"`` is SGD with learning rate ``lr · gamma``.

    Example::

        opt = LocoProp(model, loss_fn=criterion)
        for x, y in batches:
            criterion(model(x), y).backward()
            opt.step()
            opt.zero_grad()

    Args:
        model: the model, called as a whole or by its parts.
        preset: a named row of settings; settings that are given come before it. None is ``general``, or
            ``paper-m`` if a setting of iterative solvers is given, such as ``variant`` or ``gamma``.
            {presets}
        transfers: the transfer behind a layer, by module name, where it should not be detected.
        output_transfer: the transfer inside the loss: ``sigmoid``, ``softmax`` or ``linear``. It goes
            to every layer whose own output the model returns; a transfer in the model is detected
            automatically. For a model with several heads, name their transfers in ``transfers``.
        loss_fn: the loss, whose transfer and reduction are read. A loss of your own is called once,
            with zeros.
        layers: which layers have local problems, as patterns such as ``encoder.*``; the others go to
            the fallback. None: all layers that can have one.
        guards: :class:`~torch_locoprop.Guards` on the solutions: ``cap``, ``cap_by`` and ``gate``.
        diagnose: measure what each step does in each layer, for :meth:`diagnostics`. Costs time, and
            the memory of ∂L/∂a of every layer until the step. With several processes, set it in all
            or none.
        cuda_graph: on a GPU, replay steps that repeat the work of earlier ones as a CUDA graph: equal
            to rounding and much faster, at the cost of memory, some of it for copies of inputs.
        apply: ``replace`` writes the local solution into the weights; ``gradient`` hands the
            displacement as a gradient to the optimizer ``outer``; ``nothing``, for control runs,
            solves everything and applies nothing: weights stay, or ``outer`` steps with the plain
            gradient.
        outer: the optimizer for ``apply="gradient"``, a list of several, or a function that makes
            them of the parameters of layers with a local problem. An optimizer of all parameters
            trains the others too, and needs no ``fallback``. Schedules of this optimizer's
            lr scale the learning rates of ``outer``; the local problem keeps the lr given here. If
            schedules of two groups differ, ``outer`` needs two groups as well.
        fallback: makes the optimizer of parameters without a local problem. Without this argument
            they get AdamW, with a warning, at a third of lr with the spectral step, else at 1e-3. Its
            groups follow the local ones in ``param_groups``.
        param_groups: as in ``torch.optim``: a part of the model, or other settings for some layers.
            Every setting below may be given in a group.
        {settings}
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        preset: PresetName | None = None,
        transfers: Mapping[str, str | Transfer] | None = None,
        output_transfer: OutputTransfer | Transfer | None = None,
        loss_fn: Callable[..., Any] | None = None,
        layers: Iterable[str] | None = None,
        guards: Guards | None = None,
        diagnose: bool = False,
        cuda_graph: bool = True,
        apply: Apply = "replace",
        outer: OuterFactory | None = None,
        fallback: FallbackFactory | None = None,
        param_groups: Iterable[Mapping[str, Any]] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        check_arguments(model, transfers, diagnose, cuda_graph, settings)
        model = getattr(model, "_orig_mod", model)  # the model inside torch.compile's wrapper
        self._model, self._apply, self._replays = model, apply, cuda_graph
        self._components, self._notices = Components(), Notices()
        self._given_transfers = dict(transfers or {})
        self._loss = given_loss(output_transfer, loss_fn)
        self._terms = watched(loss_fn, self._loss.facts)
        self._fallback, self._fallback_factory = None, fallback
        self._measurements = {} if diagnose else None
        self._fisher_missing = self._attached = False
        self._counted = {}
        given = with_guards({**settings, "guards": guards} | ({} if lr is None else {"lr": lr}))
        if outer is not None and preset is None and "solver" not in given:
            preset = "paper-m"  # the outer optimizer makes the step, not the solver
        self._given = Given(given, preset)
        defaults = self._components.check(resolved(given, preset) | BOOKKEEPING)
        solver = self._components.solver(defaults)
        warn_of_unused(given, solver, defaults["solver"])
        self._plan_fallback(solver, defaults)
        groups = [{"params": list(model.parameters())}] if param_groups is None else [*param_groups]
        checked = [self._checked(BOOKKEEPING | self._given.group(group)) for group in groups]
        wanted = {p for group in checked for p in group["params"]}
        self._patterns = None if layers is None else layer_patterns(layers, model)
        served, unserved = scan(model, wanted, patterns=self._patterns)
        give_transfers(served, self._given_transfers)
        check_any_served(served, unserved)
        local = {p for layer in served for p in layer.tensors.values()} & wanted
        super().__init__(restricted(checked, local), defaults)
        warn_of_unusual(output_transfer)
        self._attach()
        rest = [p for group in checked for p in group["params"] if p not in local]
        self._outer = make_outer(apply, outer, self._local_groups(), rest)
        if self._outer is not None and self._outer.trains_rest:
            self._add_to_outer(checked, rest)
        else:
            warn_of_ignored(groups, checked, local)
            self._add_to_fallback(rest, fallback)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    @_disable_dynamo  # torch.compile(opt.step) would take a minute, and make nothing faster
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the paper's Algorithms 1 to 4.

        Forward and backward pass have run, and the hooks have recorded each layer's inputs. For
        each layer its target is set and T local iterations move its weights; then the outer
        optimizer and the fallback step.

        Args:
            closure: computes the gradients and returns the loss.

        Returns:
            What the closure returned; None without one.

        Raises:
            RuntimeError: If no layer has recorded a backward pass, or if the step needs what was
                not recorded.
        """
        loss = self._forward_and_backward(closure)
        trained = self._layers_with_gradient()
        if self._has_no_problems(trained, skipped=closure is not None and loss is None):
            self._step_without_problems(trained)
            self._step_others()
            return loss
        if not any(layer.calls for layer in trained) and not self._hooks.averaging.has_joined:
            check_recorded(trained)
        with self._layers[0].in_own_precision():
            steps = self._pose_problems(trained)
            factors = self._outer_factors()
            directions = self._iterate_locally(steps, trained)
            self._step_outer(trained, directions, factors)
            self._finish(steps, trained)
        return loss

    # ---- the stages of a step ------------------------------------------------------------------

    def _forward_and_backward(self, closure: Callable[[], Any] | None) -> Any:
        """Run the closure, if there is one, and look for the output's transfer inside its loss."""
        if closure is None:
            return None
        with torch.enable_grad():
            loss = closure()
        self._hooks.search.from_loss(loss)
        return loss

    def _pose_problems(self, trained: Trained) -> LocalSteps:
        """Check what the passes have recorded, plan the step, and return its local problems.

        The target of a layer is computed where its problem is solved: ``LocalProblem.target_rows``.
        """
        groups, is_planned = self._local_groups(), self._is_planned()
        self._drop_overwritten(trained)
        self._detect_transfers()
        if not is_planned:
            self._plan_again(trained)
        if any("v" in layer.needs for layer in trained):
            self._notices.hooked(trained)
        if any(group["state_of"] != group["solver"] for group in groups):
            forget_other_solvers(groups, self.state)
        if self._hooks.averaging.processes is not None or self._is_sharded:
            terms = agree(self._hooks.averaging, self._layers, trained, self._loss_terms)
        else:
            terms = self._loss_terms()
        if distributed.is_available() and distributed.is_initialized() and self._drifts():
            self._notices.drifting()
        return LocalSteps(
            plan=self._plan,
            components=self._components,
            state=self.state,
            apply=self._apply,
            has_outer=self._outer is not None,
            terms=terms,
            measurements=self._measurements,
            notices=self._notices,
            draws_labels=self._hooks.labels.seed is not None,
        )

    def _iterate_locally(self, steps: LocalSteps, trained: Trained) -> Directions:
        """Run the local iterations of all layers; on a GPU, by replaying a CUDA graph if possible."""
        if not self._replays:
            return steps.solve_all(trained)
        directions = steps.solve_or_replay(trained, self._graphs, self._local_groups())
        if self._graphs.failure is not None:
            self._notices.not_recorded(self._graphs.failure)
        return directions

    def _finish(self, steps: LocalSteps, trained: Trained) -> None:
        """Drop what was recorded, step the fallback, and plan the next step."""
        self._hooks.clear()
        self._note_absent(trained)
        self._fisher_missing = steps.fisher_missing
        self._count_step()
        self._step_others()
        self._require_next()
        self._warn_of_skipped()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop what the layers have recorded."""
        super().zero_grad(set_to_none)
        for layer in self._layers:  # a retained autograd graph may have another backward pass
            layer.clear()

    def count_replayed_step(self) -> None:
        """Account for a step that a CUDA graph of the whole training step has replayed."""
        self._count_step()
        self._warn_of_skipped()

    # ---- reports and state ---------------------------------------------------------------------

    def summary(self) -> str:
        """Return a table of all modules with parameters: what serves them, or why nothing does."""
        self._follow_groups()
        trained_by = "–" if self._fallback is None else type(self._fallback).__name__
        if self._outer is not None and self._outer.trains_rest:
            trained_by = self._outer.name
        known, told = set(self._parameters()), self._told_unused()
        plan = self._plan.with_parameters_of(self._local_groups())
        return summary_of(self._model, self._layers, self._unserved, plan, known, trained_by, told)

    def diagnostics(self) -> Diagnostics:
        """Return what the last step did in each layer; needs ``diagnose=True``."""
        return diagnostics_of(self._layers, self._measurements)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this optimizer, of its fallback and of its outer optimizer."""
        own = {"counts": self._counts(), "structure": self._structure()}
        with self._states_in_groups():
            return self._with_outer({**super().state_dict(), **own})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; raises before anything changes if it is that of another optimizer."""
        self._check_loadable(state_dict)
        self._follow_groups()
        own, of_outer = self._without_outer(state_dict)
        super().load_state_dict(own)
        self._graphs.forget()  # CUDA graphs read the old state
        self._load_outer(of_outer)
        self._counted = dict(state_dict.get("counts", {}))
        for layer in self._layers:
            layer.count_from(self._counted.get(layer.name, {}))
            layer.first_step = None  # of the run before
        self._link_fallback()
        self._require()
