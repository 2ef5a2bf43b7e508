"""LocoProp as a ``torch.optim.Optimizer``: after each backward pass, every layer solves its problem."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn

from torch_locoprop.config.groups import (
    Group,
    check_agreement,
    check_division,
    check_predictive,
    checked_group,
    merged,
    numbers,
    restricted,
    warn_of_ignored,
)
from torch_locoprop.config.settings import Components
from torch_locoprop.distributed.ddp import DRIFT, agree, drift_apart
from torch_locoprop.fast import cuda_graph as graphs
from torch_locoprop.fast.cuda_streams import FEW, LANES, current, lanes
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.regularizers import Regularizer
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.paper.transfers import Transfer, get
from torch_locoprop.paper.variants import Variant
from torch_locoprop.recording import transfer_detection
from torch_locoprop.recording.hooks import Capture
from torch_locoprop.recording.layer_record import ServedLayer, check_intact, full_precision
from torch_locoprop.recording.model_scan import check_any_served, newcomers, patterns_of, survey
from torch_locoprop.recording.transfer_assignment import (
    NOT_CALLED,
    compiled_in_parts,
    decide,
    give_transfers,
)
from torch_locoprop.reporting import messages
from torch_locoprop.reporting.diagnostics import Diagnostics, LayerDiagnostics, measured, timed
from torch_locoprop.reporting.summary import footer, layer_row, table, unserved_row
from torch_locoprop.solvers import FirstOrder, Solver
from torch_locoprop.stepping import requirements, write_back
from torch_locoprop.stepping.build_problem import (
    Method,
    asks_for_fisher,
    asks_for_output,
    backprop_step,
    check_still_served,
    is_backprop,
    local_problem,
    loss_terms,
    may_have_kernels,
    method_for,
    running_fisher,
)
from torch_locoprop.stepping.fallback_optimizer import FallbackFactory, WithFallback, check_recorded
from torch_locoprop.stepping.guards import all_finite, come_to_rest, guarded, is_finite, write_if
from torch_locoprop.stepping.outer_optimizer import (
    OuterFactory,
    as_gradients,
    capped_step,
    caps_outer,
    make_outer,
)

_LOOK_EVERY = 100  # steps between looks at an accelerator's skip counters: each is a host sync


class LocoProp(WithFallback):
    """Trains each layer by its own local problem, and everything else by ``fallback``.

    The loop is the ordinary one: ``loss.backward(); opt.step(); opt.zero_grad()``. One local step
    with ``solver="sgd"`` is SGD with learning rate ``lr · gamma``.

    Args:
        model: the model, called as a whole or by its parts.
        lr: step of the local solver; ``lr · gamma`` is what BackProp would call its learning rate.
        variant: ``locoprop-s``, ``locoprop-m``, ``pocoprop-s``, ``pocoprop-m``, ``natural-s``,
            ``proxprop``, or a :class:`~torch_locoprop.paper.variants.Variant` of your own.
        gamma: how far the target lies from the present activation.
        local_steps: local iterations in each step.
        solver: ``sgd``, ``momentum``, ``nesterov``, ``adagrad``, ``rmsprop``, ``adam`` (as in
            TensorFlow), ``exact``, or a :class:`~torch_locoprop.solvers.Solver` of your own.
        momentum, decay, eps: the solver's, tuned for rmsprop: set them for another one (adam takes
            them for β₁, β₂ and ε). ``eps`` is the start of adagrad's accumulator.
        weight_decay: weights, not biases, shrink by ``1 − lr · weight_decay`` once a step, before
            the local iterations.
        local_decay: ``linear``, the rate of iteration t is ``lr · max(1 − t/T, 1/4)``; ``constant``.
        local_reduction: ``sum`` over rows, as in the paper; ``mean``, which makes the settings
            independent of the batch size and of the loss's reduction. A loss that sums has to be told
            by ``loss_fn``, or be one of PyTorch's, as it stands, that a closure returns.
        local_products: ``full``, matrix products of local iterations are as exact as torch's (in
            float32 on a GPU to a factor of two: the kernels take three in TF32); ``bf16``,
            they may be of numbers rounded to bfloat16, where that is faster: on a GPU, where the
            kernels for linear layers serve. Weights and the solver's state stay as they are, and
            the first iteration, which is BackProp, has no product.
        regularizer: None, ``l2``, ``l1``, ``fisher``, or a
            :class:`~torch_locoprop.paper.regularizers.Regularizer` of your own.
        maximize: maximize the loss; the fallback has an option of its own for that.
        transfers: the transfer behind a layer, by module name, where detection should not decide.
        output_transfer: the transfer inside the loss: ``sigmoid``, ``softmax`` or ``linear``. It goes
            to every layer whose own output the model returns; a transfer in the model is found by
            itself. Name the others of a model with several heads in ``transfers``.
        loss_fn: the loss itself, from which ``output_transfer`` and the reduction are read.
        every: solve the local problems in every k-th step; the others are BackProp: one iteration of
            the solver, with its state (of ``exact``: of ``sgd``).
        max_rows: keep at most so many rows of each call of a layer, drawn at random; each stands for
            several. Every position of a convolution's output is a row, and images are kept whole:
            as many as have no more rows together, but always one. The first local iteration has the
            gradient of all rows. None: keep all.
        cap: longest displacement of a layer, weight and bias together, relative to the norm that
            ``cap_by`` names. None: no cap. A norm of zero caps nothing.
        cap_by: ``weight``, the norm of the layer's weight: with ``apply="gradient"`` this bounds the
            step that ``outer`` takes, whatever that makes of a gradient, its weight decay included.
            ``backprop``, that of the step ``lr · gamma · G``: with ``apply="gradient"`` this bounds
            what ``outer`` is given, relative to the gradient it would have been given. So it bounds
            the step relative to the outer step where that grows with the gradient, as SGD's does;
            AdamW and Muon take no notice.
        gate: a layer whose local loss has risen, or whose solution is not finite, takes the BackProp
            step instead, and loses its momentum. Costs one more product with all rows and, where a
            transfer is in the loss, its integral in float64: on a CPU more time than the product.
        layers: which layers have local problems, as patterns such as ``encoder.*``; the others fall
            back. None: all that can.
        diagnose: measure what each step does in each layer, for :meth:`diagnostics`; costs time, and
            the memory of ∂L/∂a of every layer until the step. Of several processes, in all or in none:
            they exchange what they measure.
        cuda_graph: on a GPU, replay steps that are the same work as those before as a CUDA graph: the
            same to rounding, far sooner, for copies of the layers' inputs and memory of its own. False:
            never.
        apply: ``replace`` writes the local solution into the weights; ``gradient`` hands the
            displacement, as a gradient, to the optimizer that ``outer`` makes; ``nothing``, for control
            runs, solves everything and applies nothing: weights stay, or get the plain gradient's
            step of ``outer``.
        outer: that optimizer, or a list of several, or a function that makes them of the parameters
            it is given: those of the layers with a local problem. An optimizer of all parameters will
            do, the one you have already: it trains the others too, and needs no ``fallback``.
            Schedules of this optimizer's lr act on it, beside any of its own: during a step its
            learning rates are multiplied by lr over the lr given here, while the local problem keeps
            the latter. Groups whose schedules differ need groups of their own in it.
        fallback: makes the optimizer of the parameters that have no local problem. Without it they
            get ``AdamW(lr=1e-3)`` and you get a warning. Its groups stand after the local ones in
            ``param_groups``: schedulers that take one number for each group take one for it too.
        param_groups: as in ``torch.optim``: a part of the model, or other settings for some layers.
            Any number or name above may stand in a group.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-5,  # η
        *,
        variant: str | Variant = "locoprop-m",
        gamma: float = 10.0,  # γ
        local_steps: int = 10,  # T
        solver: str | Solver = "rmsprop",
        momentum: float = 0.999,  # μ or β₁
        decay: float = 0.9,  # ρ or β₂
        eps: float = 1e-5,  # ε
        weight_decay: float = 0.0,
        local_decay: str = "linear",
        local_reduction: str = "sum",
        local_products: str = "full",
        regularizer: str | Regularizer | None = None,
        maximize: bool = False,
        transfers: Mapping[str, str | Transfer] | None = None,
        output_transfer: str | Transfer | None = None,
        loss_fn: Callable[..., Any] | None = None,
        every: int = 1,
        max_rows: int | None = None,
        cap: float | None = None,
        cap_by: str = "weight",
        gate: bool = False,
        layers: Iterable[str] | None = None,
        diagnose: bool = False,
        cuda_graph: bool = True,
        apply: str = "replace",
        outer: OuterFactory | None = None,
        fallback: FallbackFactory | None = None,
        param_groups: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"LocoProp takes the model itself, not {type(model).__name__}: the local problems "
                "need the layers. Pass the nn.Module, and param_groups= to train a part of it."
            )
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        self._model = model
        self._components = Components()
        if transfers is not None and not isinstance(transfers, Mapping):
            raise TypeError(
                "transfers= takes a dictionary from the names of modules to transfers, not "
                f"{type(transfers).__name__}."
            )
        for name, switch in (("diagnose", diagnose), ("cuda_graph", cuda_graph)):
            if not isinstance(switch, bool):
                raise TypeError(f"{name}= is True or False, not {switch!r}.")
        self._given_transfers = dict(transfers or {})
        self._output_transfer = None if output_transfer is None else get(output_transfer)
        self._loss_transfer = (
            None if loss_fn is None else transfer_detection.transfer_inside(loss_fn)
        )
        self._loss_sums = None if loss_fn is None else getattr(loss_fn, "reduction", "") == "sum"
        self._fallback = None
        self._fallback_factory = fallback
        self._notices = messages.Notices()
        self._diagnosed: dict[str, dict[str, Tensor | float]] | None = {} if diagnose else None
        self._replays = cuda_graph
        self._fisher_missing = False
        self._counted: dict[str, dict[str, int]] = {}  # at a resumption or a change of groups
        self._attached = False
        defaults = {
            "lr": lr,
            "gamma": gamma,
            "local_steps": local_steps,
            "momentum": momentum,
            "decay": decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "variant": variant,
            "solver": solver,
            "regularizer": regularizer,
            "local_decay": local_decay,
            "local_reduction": local_reduction,
            "local_products": local_products,
            "maximize": maximize,
            "every": every,
            "max_rows": max_rows,
            "cap": cap,
            "cap_by": cap_by,
            "gate": gate,
            "local_lr": None,  # that of the local problem, where it is not lr
            "fallback": False,  # whose group it is
            "steps": 0,  # taken so far
            "state_of": None,  # the solver whose state there is
        }
        defaults = self._components.check(defaults)
        groups = [{"params": list(model.parameters())}] if param_groups is None else [*param_groups]
        checked = [self._checked(merged(defaults, group)) for group in groups]
        given = {p for group in checked for p in group["params"]}
        self._patterns = None if layers is None else patterns_of(layers, model)
        served, unserved = survey(model, given, patterns=self._patterns)
        give_transfers(served, self._given_transfers)
        check_any_served(served, unserved)
        local = {p for layer in served for p in layer.tensors.values()} & given
        super().__init__(restricted(checked, local), defaults)
        self._attach()
        self._apply = apply
        rest = [p for group in checked for p in group["params"] if p not in local]
        self._outer = make_outer(apply, outer, self._local_groups(), rest)
        if self._outer is None or not self._outer.trains_rest:
            warn_of_ignored(groups, checked, local)
            self._add_to_fallback(rest, fallback)
            return
        if fallback is not None or any(group["maximize"] for group in checked):
            raise ValueError(
                "outer= trains all parameters, those without a local problem too. Leave fallback= and "
                "maximize= out, or give outer= the parameters of the layers alone."
            )
        for group in restricted(checked, set(rest)):  # with the schedule of outer=
            rate = {"lr": group["lr"], "local_lr": float(group["lr"])}
            self.param_groups.append({"params": group["params"], **rate, "fallback": True})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Solve every layer's local problem and write the solutions; then step the fallback."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._capture.trace_loss(loss)
        check_intact(self._layers)
        if self._diagnosed is not None:
            self._diagnosed.clear()
        trained = {layer: own for layer in self._layers if (own := layer.with_gradient)}
        if self._leaves_layers_alone(trained, closure is not None and loss is None):
            if self._outer is not None and self._outer.trains_rest:
                self._outer.step({}, self._outer.factors(self._groups_with_rates()))
            self._step_others()
            return loss
        check_recorded(trained)
        with full_precision(self._layers):
            self._advance(trained)
        return loss

    def _leaves_layers_alone(self, trained: graphs.Trained, skipped: bool) -> bool:
        """Whether this step has no local problems for a good reason.

        All layers with one are frozen and others are not; the closure gave no loss, which is how a
        batch is skipped; or gradients and rates are zero, which is how a state is asked for.
        """
        if any(layer.calls for layer in trained):
            return False
        if trained:
            gradients = [p.grad for own in trained.values() for p in own.values()]
            still = all(float(group["lr"]) == 0 for group in self._local_groups())
            return still and not any(bool(g.any()) for g in gradients if g is not None)
        others = [group for group in self.param_groups if group["fallback"]]
        return skipped or any(p.grad is not None for group in others for p in group["params"])

    def _advance(self, trained: graphs.Trained) -> None:
        """One step, from what was recorded."""
        overwritten = [layer.name for layer in trained if layer.let_go_of_overwritten()]
        if overwritten:
            self._notices.once("overwritten", messages.overwritten(overwritten))
        undecided = [layer for layer in self._layers if layer.calls and not layer.decided]
        group_of = self._group_of()
        in_parts = bool(undecided) and compiled_in_parts(self._layers, self._capture.graphs)
        for layer in undecided:
            found = (in_parts, self._capture.leaves)
            decide(layer, self._output_transfer, self._loss_transfer, *found)
            layer.condense()  # as it will be from now on, and is after a resumption
            if not asks_for_output(layer, group_of[layer.given[0]], self._components):
                layer.let_go_of_outputs()
        if not self._is_planned:
            try:
                for layer in trained:
                    check_still_served(layer, group_of[layer.given[0]], self._components)
            except RuntimeError:
                self._plan_capture()  # the next pass, of a compiled model too, will serve
                raise
        hooked = [
            layer.name
            for layer, own in trained.items()
            if "v" in layer.needs and any(p._backward_hooks for p in own.values())
        ]
        if hooked:
            self._notices.once("hooked", messages.hooked(hooked))
        self._forget_other_solvers()
        terms = self._loss_terms()
        if self._capture.processes is not None:
            terms = agree(self._capture.processes, list(trained), terms)
        if drift_apart(self._capture.processes, self._local_groups(), self._components):
            self._notices.once("processes", DRIFT)
        factors = {} if self._outer is None else self._outer.factors(self._groups_with_rates())
        directions = self._solve_all(trained, group_of, terms)
        if self._outer is not None:
            with capped_step(self._apply, trained, group_of):
                self._outer.step(directions, factors)
        self._capture.clear()
        for group in self._local_groups():
            group["steps"] += 1
        self._step_others()
        self._plan_capture()
        self._report_skips()

    def _loss_terms(self) -> float:
        """How many terms the loss sums, where averages are asked for; otherwise 1."""
        sums = self._capture.sums if self._loss_sums is None else self._loss_sums
        if not sums:
            return 1.0
        terms = loss_terms(self._layers)
        if terms is None and any(g["local_reduction"] == "mean" for g in self._local_groups()):
            self._notices.once("terms", messages.TERMS)
        return float(terms or 1)

    def _forget_other_solvers(self) -> None:
        """A solver that stands where another did begins anew: a state means something to one only."""
        for group in self._local_groups():
            if group["state_of"] not in (None, group["solver"]):
                for p in group["params"]:
                    kept = self.state[p].get("fisher")
                    self.state[p] = {} if kept is None else {"fisher": kept}
            group["state_of"] = group["solver"]

    def _step_others(self) -> None:
        """Step the fallback, but in a control run in which all weights stay."""
        if self._apply != "nothing" or self._outer is not None:
            self._step_fallback()

    def _solve_all(
        self, trained: graphs.Trained, group_of: dict[nn.Parameter, Group], terms: float
    ) -> dict[nn.Parameter, Tensor]:
        """Solve every layer's local problem; on a GPU, by the replay of a graph where that is right."""
        device, *others = {layer.given[0].device for layer in trained}

        def solve() -> dict[nn.Parameter, Tensor]:
            directions: dict[nn.Parameter, Tensor] = {}
            groups = {layer: group_of[layer.given[0]] for layer in trained}
            by_kernels = all(may_have_kernels(*own, self._components) for own in groups.items())
            with lanes(LANES if by_kernels else FEW) as lane:
                for layer in reversed(trained):  # the last one's gradient is the first to be there
                    own = layer.given[0].device
                    with current(own), lane(layer.ready), timed(self._diagnosed, layer.name, own):
                        directions |= self._solve(layer, group_of, terms)
            return directions

        with current(device):
            alone = self._capture.processes is None
            if not self._replays or others or not alone or not graphs.can_record(device):
                return solve()
            groups = self._local_groups()
            with self._graphs.rates_on_device(groups, device):
                known = (trained, groups, self._components, self.state, terms)
                work = None if self._diagnosed is not None else graphs.work_of(*known)
                directions = self._graphs.take(work, solve)
        if work is not None and self._apply == "replace":
            torch.autograd.graph.increment_version(work.moving)  # autograd saw nothing of a replay
        if self._graphs.failure is not None:
            self._notices.once("graph", messages.not_recorded(self._graphs.failure))
        return directions

    def _solve(
        self, layer: ServedLayer, group_of: dict[nn.Parameter, Group], terms: float
    ) -> dict[nn.Parameter, Tensor]:
        """Solve one layer's local problem and write the solution, or return it as a gradient."""
        trained = layer.with_gradient
        owner, parameter = next(iter(trained.items()))
        group = group_of[layer.given[0]]
        method = method_for(layer, group, self._components)
        unrecorded = not (layer.calls or layer.copies or layer.obstacle)
        if unrecorded and layer.together is None:
            gradients = {p: p.grad for p in trained.values() if p.grad is not None}
            if not any(bool(g.any()) for g in gradients.values()):
                return {} if self._outer is None else gradients
            layer.note = layer.note or NOT_CALLED
            self._notices.once(layer.name, messages.not_called(layer.name))
        elif layer.note == NOT_CALLED:
            layer.note = ""
        state = write_back.like(parameter, self.state[parameter])
        fisher = running_fisher(layer, method, state.get("fisher"))
        if fisher is None and asks_for_fisher(method):
            method = self._without_fisher(layer, method)
        problem = local_problem(layer, method, group_of, fisher, terms, self._outer is not None)
        new, states = method.solver.solve(
            problem,
            {n: write_back.like(p, self.state[p], without="fisher") for n, p in trained.items()},
            {name: numbers(group_of[p]) for name, p in trained.items()},
            method.local_steps,
            group["local_decay"],
        )
        if fisher is not None:
            states[owner]["fisher"] = fisher
        return self._take(layer, problem, new, states, group_of, is_backprop(method))

    def _take(
        self,
        layer: ServedLayer,
        problem: LocalProblem,
        new: Tensors,
        states: dict[str, Tensors],
        group_of: dict[nn.Parameter, Group],
        plain: bool,
    ) -> dict[nn.Parameter, Tensor]:
        """Apply a solution as far as it is finite and the guards allow; return it as gradients."""
        group = group_of[layer.given[0]]
        settled = is_finite(new, states)
        kept = [
            pair
            for name, state in states.items()
            for pair in write_back.places(self.state[layer.tensors[name]], state, settled)
        ]
        cap = None if caps_outer(self._apply, group) else group["cap"]
        found = guarded(problem, new, gate=group["gate"], cap=cap, cap_by=group["cap_by"])
        ok = all_finite(list(found.new.values())) if group["gate"] else settled
        layer.count("skipped", ~ok)
        layer.count("gated", found.gated)
        layer.count("capped", found.capped)
        if self._diagnosed is not None:
            self._diagnosed[layer.name] = measured(problem, found.new)
        solution = {
            layer.tensors[name]: layer.kind.restored(name, t, layer.tensors[name])
            for name, t in found.new.items()
        }
        applied = [(value, p) for p, value in solution.items()] if self._apply == "replace" else []
        if group["gate"]:
            write_if(settled, kept)
            come_to_rest([self.state[layer.tensors[name]] for name in states], found.gated)
            write_if(ok, applied)
        else:
            write_if(ok, [*kept, *applied])
        if self._apply == "nothing":
            return {p: p.grad for p in solution if p.grad is not None}
        if self._outer is not None:
            return as_gradients(layer, problem, found, ok, plain, group_of)
        return {}

    def _without_fisher(self, layer: ServedLayer, method: Method) -> Method:
        """A layer first used between two samplings takes a BackProp step, and the next is sampled."""
        if self._capture.draws_labels:
            raise RuntimeError(
                f"No Fisher matrix was sampled for layer {layer.name!r}. Call the model itself, "
                "model(x), so that labels can be drawn from its output, and checkpoint its parts with "
                "use_reentrant=False."
            )
        self._fisher_missing = True
        return backprop_step(method)

    def diagnostics(self) -> Diagnostics:
        """What the last step did in each layer; needs ``diagnose=True``."""
        if self._diagnosed is None:
            raise RuntimeError("Nothing was measured. Make the optimizer with diagnose=True.")
        known = [layer for layer in self._layers if layer.name in self._diagnosed]
        return Diagnostics(
            [
                LayerDiagnostics.of(layer.name, self._diagnosed[layer.name], layer.counts)
                for layer in known
            ]
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for layer in self._layers:  # a graph that was retained may be gone through once more
            layer.clear()

    def summary(self) -> str:
        """A table of all modules with parameters: what serves them, or why they fall back."""
        group_of, present = self._group_of(), set(self._model.modules())
        rows = []
        for layer in self._layers:
            group, in_model = group_of[layer.given[0]], layer.module in present
            rows.append(layer_row(layer, self._components.variant(group), group["steps"], in_model))
        known = {p for group in self.param_groups for p in group["params"]}
        for module in self._unserved:
            trained = not known.isdisjoint(module.parameters)
            rows.append(unserved_row(module, self._name_of_others() if trained else "–"))
        for module in newcomers(self._model, self._layers, self._unserved):
            rows.append(unserved_row(module, "–"))
        skipped = sum(self.skipped_updates.values())
        still_there = [layer for layer in self._layers if layer.module in present]
        return table(rows, footer(len(rows), still_there, self._model, skipped))

    @property
    def skipped_updates(self) -> dict[str, int]:
        """How often each layer's local solution was not finite and so was not written."""
        return {layer.name: int(layer.counts.get("skipped", 0)) for layer in self._layers}

    @property
    def capturable(self) -> bool:
        """Whether a step, once taken, is a fixed sequence of device operations: a CUDA graph."""
        groups = self._local_groups()
        solvers = [self._components.solver(group) for group in groups]
        return (
            all(group["every"] == 1 and group["max_rows"] is None for group in groups)
            and self._fallback is None
            and self._outer is None
            and self._diagnosed is None
            and all(isinstance(solver, FirstOrder) for solver in solvers)
            and not any("fisher" in layer.needs for layer in self._layers)
        )

    # ---- torch.optim's contract ----------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; parameters of it that have no local problem go to the fallback."""
        if not self._attached:  # called by the constructor, which has checked and divided them
            super().add_param_group(param_group)
            return
        if self._outer is not None:
            raise ValueError(
                "The outer optimizer trains the parameters it was made for. To add some, make a new "
                "LocoProp."
            )
        if any(layer.calls for layer in self._layers):
            raise RuntimeError(
                "A group was added between backward() and step(): what the layers recorded would be "
                "lost. Call step() or zero_grad() first."
            )
        group = self._checked(merged(self.defaults, param_group))
        known = {p for own in self.param_groups for p in own["params"]}
        if known & set(group["params"]):
            raise ValueError("some parameters appear in more than one parameter group")
        served, _ = survey(self._model, known | set(group["params"]), patterns=self._patterns)
        local = {p for layer in served for p in layer.tensors.values()}
        check_agreement(served, self._group_of() | dict.fromkeys(group["params"], group))
        warn_of_ignored([param_group], [group], local)
        for part in restricted([group], local):
            super().add_param_group(part)
        self._attach()
        rest = [p for p in group["params"] if p not in local]
        self._add_to_fallback(rest, self._fallback_factory)

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), "counts": self._counts()}
        return state if self._outer is None else {**state, "outer": self._outer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if ("outer" in state_dict) != (self._outer is not None):
            raise ValueError(
                "The state dict and this optimizer differ in apply=: one has an outer optimizer. Tools "
                "that keep nothing but state and param_groups, as torch.distributed.checkpoint does, "
                "lose its state: save opt.state_dict() itself."
            )
        for group in state_dict["param_groups"]:
            if "fallback" not in group:
                raise ValueError("This is not the state dict of a LocoProp optimizer.")
            if not group["fallback"]:
                self._check_loaded(group)
        check_division(state_dict["param_groups"], self.param_groups)
        if self._outer is not None:
            self._outer.check_loadable(state_dict["outer"])
        super().load_state_dict(state_dict)
        self._graphs.forget()  # they hold the state before
        if self._outer is not None:
            self._outer.load_state_dict(state_dict["outer"])
        self._counted = dict(state_dict.get("counts", {}))
        for layer in self._layers:
            layer.count_from(self._counted.get(layer.name, {}))
        self._link_fallback()
        self._plan_capture()

    def _check_loaded(self, group: Group) -> None:
        whole = {**self.defaults, **group}
        try:
            self._components.check(whole)
            check_predictive(whole, self._components, self._output_transfer or self._loss_transfer)
        except ValueError as error:
            raise ValueError(
                f"The state dict does not fit: {error} Make this optimizer with the same "
                "components as the one that was saved."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            "_model _components _given_transfers _output_transfer _loss_transfer _loss_sums "
            "_fallback _outer _apply _patterns _diagnosed _replays _notices _fisher_missing"
        )
        own = {name: getattr(self, name) for name in kept.split()}
        own |= {"_fallback_factory": None, "_attached": False}
        return {**super().__getstate__(), **own, "_counted": self._counts()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # which torch puts there, and no group knows
        for group in self._local_groups():  # of a version that knew fewer settings
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        if "_model" in state:
            self._attach()
            self._link_fallback()

    # ---- plumbing ------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Find the layers of the model and put the hooks on them."""
        if self._attached:
            self._counted = self._counts()
        given = {p for group in self.param_groups for p in group["params"]}
        self._layers, self._unserved = survey(self._model, given, patterns=self._patterns)
        for layer in self._layers:
            layer.count_from(self._counted.get(layer.name, {}))
        give_transfers(self._layers, self._given_transfers)
        check_agreement(self._layers, self._group_of())
        output_transfer = self._output_transfer or self._loss_transfer
        self._capture = Capture(self._model, self._layers, output_transfer)
        self._capture.plan = weakref.WeakMethod(self._plan_anew)
        self._graphs = graphs.StepGraphs()
        self._attached = True
        self._plan_capture()

    def _plan_capture(self) -> None:
        """Tell the hooks what the next step will need of each layer."""
        groups = self._local_groups()
        asked = requirements.asked(groups)
        requirements.plan(
            self._layers,
            self._capture,
            self._group_of(),
            self._components,
            self.state,
            steps=groups[0]["steps"],
            diagnosed=self._diagnosed is not None,
            fisher_missing=self._fisher_missing,
        )
        self._fisher_missing, self._planned = False, asked

    @property
    def _is_planned(self) -> bool:
        """Whether settings are those that the last plan was made for."""
        return self._planned == requirements.asked(self._local_groups())

    def _plan_anew(self) -> None:
        """Before a forward pass: settings may have been changed since the last step."""
        if not self._is_planned and all(layer.starts_afresh() for layer in self._layers):
            self._plan_capture()

    def _groups_with_rates(self) -> list[Group]:
        """Those whose schedule moves the rates of the outer optimizer."""
        return [group for group in self.param_groups if group.get("local_lr") is not None]

    def _name_of_others(self) -> str:
        """Of who trains the parameters that have no local problem."""
        if self._outer is not None and self._outer.trains_rest:
            return self._outer.name
        return "–" if self._fallback is None else type(self._fallback).__name__

    def _counts(self) -> dict[str, dict[str, int]]:
        """How often each layer's solutions were skipped, gated and capped."""
        return {layer.name: layer.counted() for layer in self._layers}

    def _group_of(self) -> dict[nn.Parameter, Group]:
        return {p: group for group in self._local_groups() for p in group["params"]}

    def _checked(self, group: Mapping[str, Any]) -> Group:
        output = self._output_transfer or self._loss_transfer
        return checked_group(group, self._model, self._components, output)

    def _report_skips(self) -> None:
        """Warn of skipped updates once; on an accelerator, look only now and then."""
        skips = {layer.name: layer.counts.get("skipped") for layer in self._layers}
        counters = {name: count for name, count in skips.items() if isinstance(count, Tensor)}
        steps = next(group["steps"] for group in self._local_groups())
        if any(count.is_cpu or steps % _LOOK_EVERY == 0 for count in counters.values()) and any(
            int(count) > self._counted.get(name, {}).get("skipped", 0)
            for name, count in counters.items()
        ):
            names = [name for name, count in self.skipped_updates.items() if count]
            self._notices.once("skipped", messages.not_finite(names))
