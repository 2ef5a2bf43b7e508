"""The record of one layer: what the next step needs of it, and its recorded calls.

What the layer is and which role it has in the model is in ``local_layer.py``. The hooks that make the
record are in ``hooks.py``. How the rows of a call are reduced is in ``row_reduction.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.distributed.ddp import SharedFacts
from torch_locoprop.distributed.fully_shard import SharedShardFacts
from torch_locoprop.fast.dispatch import streams
from torch_locoprop.paper.gram import RowUse
from torch_locoprop.recording import row_reduction, transfer_detection
from torch_locoprop.recording.backward_pass import at_end
from torch_locoprop.recording.call import Call
from torch_locoprop.recording.gradient_changes import GradientNorms, Versions, were_zeroed
from torch_locoprop.recording.local_layer import LocalLayer
from torch_locoprop.recording.sharded_gradients import ShardedGradients
from torch_locoprop.recording.transfer_detection import Finding

# Random orders of samples, by seed, number of samples and device.
Orders = dict[tuple[int, int, torch.device], Tensor]
# Returns what the step needs of a layer's rows, given the names of the tensors that it moves.
UseOfRows = Callable[["LayerRecord", Collection[str]], RowUse | None]

# Why the gradients of a layer are of more rows than those that are recorded: ends of sentences.
MERGED = (
    "were taken out of p.grad or set to zero after a backward pass, and others were put in before "
    "step(), as PCGrad and hooks for main_grad do. They may be of several backward passes, and only "
    "the rows of the last one are known, so such a layer takes a BackProp step. Let gradients "
    "accumulate in p.grad, and scale them in place, as p.grad.mul_(factor) does."
)
LOST = (
    "come in part from a forward pass before the last step, whose inputs are not kept any more. Such a "
    "layer takes a BackProp step. Run forward and backward pass anew for each step."
)


@dataclass(eq=False)
class LayerRecord(LocalLayer):
    """The record of a layer that has a local problem; the arguments are those of the base class."""

    # What the next step needs, set by stepping/requirements.py.
    # What to record besides the input: "g", "g_norm", "v" of Call, "fisher".
    needs: frozenset[str] = frozenset()
    max_rows: int | None = None  # how many rows of each call to keep
    row_seed: int = 0  # seed of the random choice of rows
    orders: Orders = field(default_factory=dict)  # shared by all layers in a step
    use_of_rows: UseOfRows | None = None  # None: keep the rows
    keeps_output: bool = False  # keep the layer's output if the hooks can
    overlap_allowed: bool = False  # weight gradients may be computed beside the backward pass
    # What was recorded since the last step.
    calls: list[Call] = field(default_factory=list)
    passes: set[int] = field(default_factory=set)  # ids of the backward passes of `calls`
    copies: bool = False  # other code overwrites inputs after backward passes: keep copies
    has_dropped: bool = False  # a pass was recorded since the last step and replaced by a later one
    lacks_rows: str = ""  # why the gradients are of more rows than those that are recorded
    called: bool = False  # the layer was called since the last step, with or without gradients
    unrecorded: str = ""  # why a call since the last step could not be recorded
    outputs_overlapped: int = 0  # calls with weight gradients beside the backward pass
    ready: torch.cuda.Event | None = None  # the gradients exist after this event
    # What all processes know of the layer.
    shared_facts: SharedFacts | SharedShardFacts | None = None
    sharded: ShardedGradients = field(default_factory=ShardedGradients)  # used if `shards` is given
    unsharded: set[int] = field(default_factory=set)  # ids of tensors that fully_shard has put in
    division: str = ""  # how processes under DDP divided the work of the last step, for reports
    empty_call: Call | None = None  # a call without rows, for steps after the last batch
    _lost: set[int] = field(default_factory=set)  # ids of passes through calls that are not kept
    _pending: dict[int, list[Call]] = field(default_factory=dict)  # calls by the id of their pass
    # Ids of passes that found no gradient: True, or False if other processes may have found one.
    _replacing: dict[int, bool] = field(default_factory=dict)
    _left: Versions = field(default_factory=list)  # gradients as the last commit found them
    _committed: bool = False  # the running pass has added to a gradient
    _norms: GradientNorms = field(default_factory=GradientNorms)  # norms of gradients, if needed

    @property
    def needs_row_gradients(self) -> bool:
        """True if the next step needs gradients of rows, or their norm."""
        return not self.needs.isdisjoint({"g", "g_norm", "v"})

    @property
    def may_overlap(self) -> bool:
        """True if the layer's weight gradients may be computed beside the backward pass."""
        return self.overlap_allowed and not self.obstacle

    def record(self, call: Call, backward_pass: int) -> None:
        """Record a call that a backward pass went through, until :meth:`commit` makes it count.

        Args:
            call: the call.
            backward_pass: the id of the pass.
        """
        if streams.overlapping:
            streams.leave_gradient_stream()  # the layer's own backward pass may enter one
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
        if backward_pass in self._lost:
            self.lacks_rows = LOST
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
        """Drop what was recorded before a pass; set it aside if other processes may have to keep it."""
        self._replacing.clear()
        self.has_dropped |= bool(self.calls)
        self.lacks_rows = ""
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
            self.passes.clear()  # the passes of the earlier calls are not known
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
        no_rows = use is not None and not use.is_any
        if no_rows and call.sampled is None and call.x.numel() > 0:
            return call.without_inputs(self.like, self.rows_of(call))
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

    def note_lost(self, backward_pass: int) -> None:
        """Note that a pass went through a call whose inputs are not kept any more."""
        self._lost.add(backward_pass)

    def lacks_any_rows(self, *, alone: bool) -> bool:
        """Return True if the gradients are of more rows than those that are recorded.

        Other code may have put gradients together from several backward passes: it takes ``p.grad``
        away after each of them and sets it at the end, so that the record has the last pass alone.

        Args:
            alone: no other process has a part in the gradients; otherwise DDP may set ``p.grad``.
        """
        if alone and self.has_dropped and self.calls and self.shards is None:
            left = [ref() for ref, _ in self._left]
            if not all(
                any(g.untyped_storage() is each for each in left) for g in self._gradients()
            ):
                self.lacks_rows = MERGED
        return bool(self.lacks_rows)

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

        Args:
            moved: names of the tensors that the step moves.
        """
        return None if self.use_of_rows is None else self.use_of_rows(self, tuple(moved))

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
        If the layer is sharded, one process alone cannot know whether gradients were set to zero.
        """
        if not self.calls and not self.lacks_rows:
            return True
        if self.shards is not None:
            return not self.sharded.unreduced and not self._gradients()
        return were_zeroed(self._gradients(), self._left)

    def clear(self) -> None:
        """Drop everything that was recorded since the last step."""
        self.outputs_overlapped = 0
        self.has_dropped |= bool(self.calls)
        if self.shards is not None:
            self.sharded.clear()
        self.calls.clear()
        self.passes.clear()
        self._pending.clear()
        self._replacing.clear()
        self._lost.clear()
        self.lacks_rows = ""

    @property
    def has_gram(self) -> bool:
        """True if XᵀX was kept in place of the rows of a call."""
        return any(call.gram is not None and call.gram.is_known for call in self.calls)

    @property
    def has_rows(self) -> bool:
        """True if the rows, or XᵀX, of a local problem were recorded, and not only a gradient."""
        rows = self.row_count > 0
        return rows and not self.obstacle and not self.lacks_rows

    @property
    def all_have_rows(self) -> bool:
        """True if this process and all others that share the problem have rows of it."""
        return self.has_rows if self.shared_facts is None else self.shared_facts.all_have_rows

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
            use = RowUse(precise=first.square.dtype == torch.float64, structure=first.structure)
            others += [row_reduction.gram_of_call(self, call, use) for call in rest]
            return sum(others, first)
        return self.collected(calls)

    def collected(self, calls: Sequence[Call]) -> Any:
        """Return the inputs of some calls in the form that the layer's linear map takes."""
        inputs, outputs = [call.x for call in calls], [call.shape for call in calls]
        return self.kind.collect(inputs, outputs, self.like)

    def outputs(self) -> Tensor | None:
        """Return the pre-activations ``[rows, d]`` of the forward pass, if they were kept."""
        return self.calls[0].output if len(self.calls) == 1 else None


def check_reduced(layers: Iterable[LayerRecord]) -> None:
    """Raise ``RuntimeError`` if ``fully_shard`` has gradients that it has not added up yet."""
    for layer in layers:
        if layer.sharded.unreduced:
            raise RuntimeError(
                f"The gradients of layer {layer.name!r} are not added up over the processes: the last "
                "backward pass ran after set_requires_gradient_sync(False). Call "
                "set_requires_gradient_sync(True) before the last micro-batch of a step."
            )
