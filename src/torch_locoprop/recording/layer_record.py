"""The record of one layer: what it is, what the next step needs of it, and its recorded calls.

The hooks that make the record are in ``hooks.py``. How the rows of a call are reduced is in
``row_reduction.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.distributed.ddp import LayerFacts, SharedFacts
from torch_locoprop.distributed.fully_shard import (
    NO_GRADIENT,
    ShardFacts,
    Shards,
    SharedShardFacts,
    local,
)
from torch_locoprop.fast.dispatch import streams
from torch_locoprop.layers import LayerKind
from torch_locoprop.layers.base import FORWARDS
from torch_locoprop.paper.gram import RowUse
from torch_locoprop.paper.tensors import has_values
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording import row_reduction, transfer_detection
from torch_locoprop.recording.backward_pass import at_end
from torch_locoprop.recording.call import Call
from torch_locoprop.recording.gradient_changes import GradientNorms, Versions, were_zeroed
from torch_locoprop.recording.sharded_gradients import ShardedGradients
from torch_locoprop.recording.transfer_detection import Finding

REPLACED = "its forward was replaced after the optimizer was made: it takes BackProp steps"
RESHAPED = "its geometry was changed after the optimizer was made: it takes BackProp steps"
TRANSFORMED = "called inside a transform of torch.func: it takes BackProp steps"
COMPUTED = "called with weights computed from its own: it takes BackProp steps"
_NAMES = ("weight", "bias")

# Random orders of samples, by seed, number of samples and device.
Orders = dict[tuple[int, int, torch.device], Tensor]
# Returns what the step needs of a layer's rows, given the names of the tensors that it moves.
UseOfRows = Callable[["LayerRecord", Collection[str]], RowUse | None]


@dataclass(eq=False)
class LayerRecord:
    """The record of a layer that has a local problem.

    Args:
        name: the name of the module in the model.
        module: the layer.
        kind: what this kind of module means for the mathematics.
        given: the parameters of the module that the optimizer trains.
        shards: the rows of the tensors that this process has, if ``fully_shard`` has divided them.
    """

    name: str
    module: nn.Module
    kind: LayerKind
    given: list[nn.Parameter]
    shards: Shards | None = None
    # The layer's place in the model.
    transfer: Transfer | None = None
    explicit: bool = False  # the user gave the transfer, or said that there is none
    decided: bool = False  # transfer and is_output were read from the recorded calls
    note: str = ""  # why there is no transfer
    obstacle: str = ""  # why the layer takes BackProp steps
    is_output: bool = False  # the model ends in this layer, or in its transfer
    compiled: bool = False  # the layer is called inside compiled graphs
    # What the next step needs, set by stepping/requirements.py.
    # What to record besides the input: "g", "g_norm", "v" of Call, "fisher".
    needs: frozenset[str] = frozenset()
    max_rows: int | None = None  # how many rows of each call to keep
    row_seed: int = 0  # seed of the random choice of these rows
    orders: Orders = field(default_factory=dict)  # shared by all layers in a step
    use_of_rows: UseOfRows | None = None  # None: keep the rows
    keeps_output: bool = False  # keep the layer's output if the hooks can
    overlap_allowed: bool = False  # weight gradients may be computed beside the backward pass
    # What was recorded since the last step.
    calls: list[Call] = field(default_factory=list)
    passes: set[int] = field(default_factory=set)  # ids of the backward passes of these calls
    copies: bool = False  # other code overwrites inputs after backward passes: keep copies
    called: bool = False  # since the last step, with gradients or without
    unrecorded: str = ""  # why a call since the last step could not be recorded
    outputs_overlapped: int = 0  # calls with weight gradients beside the backward pass
    ready: torch.cuda.Event | None = None  # the gradients exist after this event
    shared_facts: SharedFacts | SharedShardFacts | None = None  # what all processes know of it
    sharded: ShardedGradients = field(default_factory=ShardedGradients)  # of a layer with shards
    unsharded: set[int] = field(default_factory=set)  # ids of weights that fully_shard has put in
    division: str = ""  # how processes under DDP divided the work of the last step, for reports
    empty_call: Call | None = None  # a call without rows, for steps after the last batch
    first_step: Any = None  # what the first step did, of stepping/first_step.py
    counts: dict[str, int | Tensor] = field(default_factory=dict)  # skipped, gated, capped steps
    _forwards: tuple[Any, ...] = ()  # what the module's class computed when the record was made
    _geometry: tuple[Any, ...] = ()  # attributes of the module that say what it computes
    _row_use: tuple[object, RowUse | None] | None = None  # the last answer, and what was asked
    _pending: dict[int, list[Call]] = field(default_factory=dict)  # by id of the backward pass
    # Passes that found no gradient to add to: True, or False if other processes may have found one.
    _replacing: dict[int, bool] = field(default_factory=dict)
    _left: Versions = field(default_factory=list)  # gradients as the last commit found them
    _committed: bool = False  # the running pass has added to a gradient
    _norms: GradientNorms = field(default_factory=GradientNorms)  # of these, if needed

    def __post_init__(self) -> None:
        self._forwards, self._geometry = self._computes()

    def _computes(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return what the module computes: functions of its class, and its geometry."""
        kind, own = type(self.module), vars(self.module)
        geometry = [own.get(name) for name in getattr(self.kind, "geometry", ())]
        return (kind.forward, getattr(kind, "_conv_forward", None)), tuple(geometry)

    @property
    def tensors(self) -> dict[str, nn.Parameter]:
        """The layer's parameters by name, "weight" and "bias"."""
        if self.shards is not None:
            return dict(self.shards.tensors)  # the module may have unsharded ones at the moment
        own = self.module._parameters  # faster than attributes, and read in every step
        return {name: p for name in _NAMES if (p := own.get(name)) is not None}

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that the optimizer trains and that are not frozen."""
        return [p for p in self.given if p.requires_grad]

    @property
    def with_gradient(self) -> dict[str, nn.Parameter]:
        """The parameters that the next step moves, by name: those with a gradient."""
        given = self.given
        own = self.module._parameters if self.shards is None else self.shards.tensors
        return {n: p for n in _NAMES for p in given if p is own.get(n) and p.grad is not None}

    @property
    def role(self) -> tuple[object, ...]:
        """A key of all that decides how the layer is served, and with which note."""
        known = (self.decided, self.explicit, self.note, self.obstacle)
        return self.transfer, self.is_output, self.compiled, *known

    @property
    def needs_row_gradients(self) -> bool:
        """True if the next step needs gradients of rows, or their norm."""
        return not self.needs.isdisjoint({"g", "g_norm", "v"})

    @property
    def may_overlap(self) -> bool:
        """True if the layer's weight gradients may be computed beside the backward pass."""
        return self.overlap_allowed and not self.obstacle

    @property
    def facts(self) -> LayerFacts:
        """What this process tells the others about the layer before its problem is solved."""
        name = None if self.transfer is None else self.transfer.name
        # A process without a batch can take part where it has had batches before.
        has_rows = self.has_rows or (self.is_joined and not self.obstacle)
        role = f"{name} {self.is_output}"
        return LayerFacts(self.row_count, self.kept_rows, has_rows, self.has_gram, role)

    @property
    def kept_rows(self) -> int:
        """The number of rows of all calls that were kept."""
        return sum(
            self.rows_of(call) // max(self.samples_of(call), 1) * len(call.kept)
            if call.kept is not None
            else self.rows_of(call)
            for call in self.calls
        )

    @property
    def is_joined(self) -> bool:
        """True if this process has run out of batches and takes part without rows."""
        return self.empty_call is not None and any(c is self.empty_call for c in self.calls)

    @property
    def shard_facts(self) -> ShardFacts:
        """What this process tells the others about a sharded layer."""
        begins = self.sharded.begins if self.with_gradient else NO_GRADIENT
        rows, role = self.row_count, self.facts.role
        return ShardFacts(begins, rows, self.kept_rows, self.has_rows, self.has_gram, role)

    @property
    def like(self) -> Tensor:
        """A tensor with shape, dtype and device of the whole weight; its numbers have no meaning."""
        weight = self.tensors["weight"].detach()
        if self.shards is None:
            return weight
        return local(weight).new_zeros(()).expand(weight.shape)

    @property
    def width(self) -> int:
        """The number of output features d."""
        return int(getattr(self.kind, "d", self.tensors["weight"].shape[0]))

    @property
    def last_width(self) -> int:
        """The size of the output's last dimension if it holds the features; otherwise 0."""
        return self.width if self.kind.features == -1 else 0

    def record(self, call: Call, backward_pass: int) -> None:
        """Record a call that a backward pass went through, until :meth:`commit` makes it count.

        Args:
            call: the call.
            backward_pass: the id of the pass.
        """
        if streams.overlapping:
            streams.leave_gradient_stream()  # the layer's own backward pass may enter one again
        if backward_pass not in self._pending:
            self._pending[backward_pass] = []
            at_end(partial(self._drop_uncommitted, backward_pass))
            if self.shards is not None:
                self.sharded.begin_pass(self._gradients())
            if self.starts_afresh():
                self._replacing[backward_pass] = True
            elif self.shards is not None and self.sharded.may_be_zeroed(self._gradients()):
                self._replacing[backward_pass] = False
            else:
                self.rescale_row_gradients()
        self._pending[backward_pass].append(call)

    def commit(self, backward_pass: int) -> None:
        """Make the calls of a pass part of the next problem, once it has added to a ``.grad``.

        A pass that computes other gradients only (``autograd.grad`` for a penalty) is not committed.
        A pass that starts from no gradient replaces what was recorded before.

        Args:
            backward_pass: the id of the pass.
        """
        if self.unrecorded:  # rows that are not recorded may have a part in the gradient
            self.obstacle = self.unrecorded
        if backward_pass in self._replacing:
            self._drop_earlier(certain=self._replacing[backward_pass])
        self.passes.add(backward_pass)
        pending = self._pending.pop(backward_pass, ())
        places = {call.identity: i for i, call in enumerate(self.calls)} if pending else {}
        for call in pending:
            place = places.setdefault(call.identity, len(self.calls))
            if place == len(self.calls):
                kept = self._condensed(call)
                self.calls.append(kept.with_own_input() if self.copies else kept)
                continue
            first = self.calls[place]
            same = call if first.kept is None else call.subsampled(self.kind, first.kept)
            self.calls[place] = first.with_gradients_of(same)
        if len(self.calls) > 1:
            self.drop_outputs()
        self._committed = True
        if self.shards is None:
            self._left = self._versions()
        if self._norms.known or self.needs_row_gradients:
            self.remember_gradient_norms()
        self.ready = streams.ready_event() if streams.overlapping else None

    def _drop_earlier(self, certain: bool) -> None:
        """Drop what was recorded before a pass; if other processes may not, set it aside."""
        self._replacing.clear()
        if not certain:
            self.sharded.set_aside(self.calls)
        elif self.shards is not None:
            self.sharded.forget_calls()
        self.calls.clear()
        self.passes.clear()

    def begin_record(self, passes: int) -> None:
        """Take back the calls that were set aside, without those of the first ``passes`` passes."""
        earlier = self.sharded.taken_back(passes)
        if earlier:
            self.passes.clear()  # those of the earlier calls are not known
        self.calls[:0] = earlier
        self.drop_overwritten()

    def note_reduction(self) -> None:
        """Note, after a pass, whether ``fully_shard`` has added up the processes' gradients."""
        self.sharded.end_pass(self._gradients())

    def _versions(self) -> Versions:
        """Return memory and version of the gradients as they are now."""
        return [
            (weakref.ref(g.untyped_storage()), g._version)
            for g in self._gradients()
            if g.layout == torch.strided
        ]

    def _gradients(self) -> list[Tensor]:
        """Return the gradients of the trained parameters."""
        return [p.grad for p in self.given if p.requires_grad and p.grad is not None]

    def _condensed(self, call: Call) -> Call:
        """Return a new call with what the next step needs of it: all of it, or fewer rows."""
        tensors = self.tensors
        own = [p for p in self.given if p.requires_grad or p.grad is not None]
        use = self.row_use([name for name, p in tensors.items() if any(p is q for q in own)])
        if use is None and self.max_rows is None:
            return call
        if not streams.overlapping:
            return row_reduction.condensed(self, call, use)
        with streams.on_gradient_stream(call.x):
            return row_reduction.condensed(self, call, use)

    def _drop_uncommitted(self, backward_pass: int) -> None:
        """Drop what a finished pass recorded without adding to a gradient."""
        self._pending.pop(backward_pass, None)
        self._replacing.pop(backward_pass, None)
        if self.shards is not None and self._committed:
            at_end(self.note_reduction)  # after the callback with which fully_shard ends a pass
        self._committed = False

    def drop_overwritten(self) -> bool:
        """Drop all calls if an input was written to since the forward pass.

        From then on, copies of the inputs are kept.

        Returns:
            True if the calls were dropped.
        """
        if not any(call.is_overwritten for call in self.calls):
            return False
        self.copies = True
        self.calls.clear()
        return True

    def drop_outputs(self) -> None:
        """Drop the recorded outputs; no later step needs them."""
        if any(call.a is not None for call in self.calls):
            self.calls[:] = [call._replace(a=None) for call in self.calls]

    def remember_gradient_norms(self) -> None:
        """Remember the norms of the gradients as they are now: after a pass, or DDP's averaging."""
        self._norms.remember(self._scaling_parameters)

    def condense(self) -> None:
        """Reduce the rows of calls that were recorded before the layer's transfer was known."""
        self.calls[:] = [
            call if call.gram is not None else self._condensed(call) for call in self.calls
        ]

    def row_use(self, moved: Iterable[str]) -> RowUse | None:
        """Return what the next step needs of the rows; None: possibly all of them.

        The answer is kept until requirements are set anew, or the layer has another role.

        Args:
            moved: names of the tensors that the step moves.
        """
        if self.use_of_rows is None:
            return None
        names = tuple(moved)
        asked = self.use_of_rows, names, self.role
        if self._row_use is None or self._row_use[0] != asked:
            self._row_use = asked, self.use_of_rows(self, names)
        return self._row_use[1]

    def rows_of(self, call: Call) -> int:
        """Return the number of rows of a call, before any were dropped."""
        return call.shape.numel() // max(self.width, 1)

    @property
    def row_count(self) -> int:
        """The number of rows of all calls, before any were dropped."""
        return sum(map(self.rows_of, self.calls))

    def samples_of(self, call: Call) -> int:
        """Return the number of samples of a call: its rows or, of a convolution, its images."""
        return self.rows_of(call) // max(self.kind.positions(call.shape), 1)

    def rescale_row_gradients(self) -> None:
        """Scale the recorded gradients of rows as ``p.grad`` was scaled since the last pass."""
        factor = self._norms.factor(self._scaling_parameters)
        if factor is not None:
            self.calls[:] = [call.scaled(factor) for call in self.calls]

    @property
    def _scaling_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients set the scale of the rows' gradients, if these are needed."""
        return self.trained if self.needs_row_gradients else []

    def starts_afresh(self) -> bool:
        """Return True if the next backward pass replaces what was recorded, or nothing was.

        A pass replaces the record if the gradients are None, or were set to zero since the last pass.
        Of a sharded layer, one process alone cannot tell the latter.
        """
        if not self.calls:
            return True
        if self.shards is not None:
            return not self.sharded.unreduced and not self._gradients()
        return were_zeroed(self._gradients(), self._left)

    def notice_new_forward(self) -> bool:
        """Return True if the module computes something else since this record was made.

        The layer then takes BackProp steps: what the new forward computes is not known.
        """
        forwards, geometry = self._computes()
        if geometry != self._geometry:
            self.obstacle = RESHAPED
            return True
        if forwards != self._forwards or not FORWARDS.isdisjoint(vars(self.module)):
            self.obstacle = REPLACED
            return True
        return False

    @property
    def has_computed_weights(self) -> bool:
        """True if the module has tensors for now that may be computed from its parameters."""
        return any(
            p is not None and p.grad_fn is not None for p in self.module._parameters.values()
        )

    @property
    def is_intact(self) -> bool:
        """True if the module still has the parameters that the optimizer was given."""
        own = self.module._parameters
        weight, bias = own.get("weight"), own.get("bias")
        if self.shards is not None:
            return self.shards.are_those_of(self.module)
        for p in self.given:
            if p is not weight and p is not bias:
                return False
        return weight is not None

    def count(self, what: str, happened: Tensor) -> None:
        """Count an event of a step, on the device and without a host sync.

        Args:
            what: "skipped", "gated" or "capped".
            happened: a boolean scalar; a tensor without a value counts nothing.
        """
        plain = type(happened) is Tensor and not happened.is_meta
        if not plain and not has_values(happened):
            return
        known = self.counts.get(what, 0)
        if not isinstance(known, Tensor) or known.device != happened.device:
            known = torch.full((), int(known), device=happened.device)
        known += happened
        self.counts[what] = known

    def counted(self) -> dict[str, int]:
        """Return the counts as numbers; on an accelerator this is a host sync."""
        return {what: int(count) for what, count in self.counts.items()}

    def count_from(self, counts: Mapping[str, int]) -> None:
        """Set the counts to these numbers, in place because CUDA graphs may add to them."""
        for what in {*self.counts, *counts}:
            known, count = self.counts.get(what), counts.get(what, 0)
            self.counts[what] = known.fill_(count) if isinstance(known, Tensor) else count

    def in_own_precision(self) -> AbstractContextManager[object]:
        """Return a context that computes in the precision of the weights, even inside autocast."""
        device = self.given[0].device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return torch.autocast(device, enabled=False)
        return nullcontext()

    def clear(self) -> None:
        """Drop everything that was recorded since the last step."""
        self.outputs_overlapped = 0
        if self.shards is not None:
            self.sharded.clear()
        self.calls.clear()
        self.passes.clear()
        self._pending.clear()
        self._replacing.clear()

    @property
    def has_gram(self) -> bool:
        """True if XᵀX was kept in place of the rows of a call."""
        return any(call.gram is not None and call.gram.is_known for call in self.calls)

    @property
    def has_rows(self) -> bool:
        """True if the rows, or XᵀX, of a local problem were recorded, and not only a gradient."""
        rows = self.row_count > 0
        return rows and not self.obstacle

    def findings(self) -> list[Finding]:
        """Return what the autograd graph shows behind each recorded call."""
        return [transfer_detection.resolve(call.mark, self.last_width) for call in self.calls]

    def inputs(self) -> Any:
        """Return the inputs of all calls in the form that the layer's linear map takes.

        If XᵀX was kept of some calls, return XᵀX of all.
        """
        calls = self.calls
        grams = [call.gram for call in calls if call.gram is not None]
        if grams:
            first, *others = grams
            rest = [call for call in calls if call.gram is None]
            like = first.square.dtype, first.structure
            others += [row_reduction.gram_of_call(self, call, *like) for call in rest]
            return sum(others, first)
        return self.collected(calls)

    def collected(self, calls: Sequence[Call]) -> Any:
        """Return the inputs of some calls in the form that the layer's linear map takes."""
        inputs, outputs = [call.x for call in calls], [call.shape for call in calls]
        return self.kind.collect(inputs, outputs, self.like)

    def outputs(self) -> Tensor | None:
        """Return the pre-activations ``[rows, d]`` of the forward pass, if they were kept."""
        return self.calls[0].output if len(self.calls) == 1 else None


def check_intact(layers: Iterable[LayerRecord]) -> None:
    """Raise ``RuntimeError`` if a module no longer has the parameters the optimizer was given."""
    for layer in layers:
        if not layer.is_intact:
            raise RuntimeError(
                f"Layer {layer.name!r} no longer has the parameters this optimizer was made with: "
                "they were replaced or parametrized. Make a new optimizer."
            )


def check_reduced(layers: Iterable[LayerRecord]) -> None:
    """Raise ``RuntimeError`` if ``fully_shard`` has gradients that it has not added up yet."""
    for layer in layers:
        if layer.sharded.unreduced:
            raise RuntimeError(
                f"The gradients of layer {layer.name!r} are not added up over the processes: the last "
                "backward pass ran after set_requires_gradient_sync(False). Call "
                "set_requires_gradient_sync(True) before the last micro-batch of a step."
            )
