"""The record of a layer with a local problem: which layer it is, and what its calls left behind.

How calls get here is the business of ``hooks.py``, what is kept of their rows that of
``row_reduction.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.distributed.ddp import LayerFacts, Together
from torch_locoprop.fast import dispatch
from torch_locoprop.layers import LayerKind
from torch_locoprop.paper.gram import RowUse
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording import row_reduction, transfer_detection
from torch_locoprop.recording.call import Call
from torch_locoprop.recording.transfer_detection import Finding

_NAMES = ("weight", "bias")

Orders = dict[tuple[int, int, torch.device], Tensor]  # by seed, number and device
UseOfRows = Callable[["LayerRecord", Collection[str]], RowUse | None]


@dataclass(eq=False)
class LayerRecord:
    """A layer with a local problem: its module, kind and transfer, and its recorded calls."""

    name: str
    module: nn.Module
    kind: LayerKind
    given: list[nn.Parameter]  # those of its parameters that the optimizer trains
    # What is known of the layer's place in the model.
    transfer: Transfer | None = None
    explicit: bool = False  # the transfer, or that there is none, was given by the user
    decided: bool = False  # transfer and place were read from the recorded calls
    note: str = ""  # why there is no transfer
    obstacle: str = ""  # why the layer takes BackProp steps
    is_output: bool = False
    compiled: bool = False  # its calls are inside compiled graphs
    # What the next step needs, see stepping/requirements.py.
    needs: frozenset[str] = frozenset()  # what to record besides the input: "g", "v", "fisher"
    max_rows: int | None = None  # rows to keep of each call
    row_seed: int = 0  # seed of the draw of these rows
    orders: Orders = field(default_factory=dict)  # draws that all layers share in a step
    use_of_rows: UseOfRows | None = None  # what the step needs of the rows, by the tensors it moves
    keeps_output: bool = False  # keep the layer's output where the hooks can
    overlap_allowed: bool = False  # weight gradients may be computed beside the backward pass
    # What was recorded since the last step.
    calls: list[Call] = field(default_factory=list)
    copies: bool = False  # inputs are overwritten after backward passes: keep copies of them
    outputs_overlapped: int = (
        0  # calls whose weight gradients are computed beside the backward pass
    )
    ready: torch.cuda.Event | None = None  # after which the gradients exist
    together: Together | None = None  # what all processes know of the layer
    counts: dict[str, int | Tensor] = field(default_factory=dict)  # skipped, gated, capped steps
    _pending: dict[int, list[Call]] = field(default_factory=dict)  # by backward pass
    _replacing: set[int] = field(default_factory=set)  # passes that found no gradient to add to
    # The gradients after the last commit with their versions, and their lengths.
    _versions: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)
    _lengths: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, nn.Parameter]:
        """The layer's parameters by name, "weight" and "bias"."""
        own = self.module._parameters  # read in every step: attributes take longer
        return {name: p for name in _NAMES if (p := own.get(name)) is not None}

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that the optimizer trains and that are not frozen."""
        return [p for p in self.given if p.requires_grad]

    @property
    def with_gradient(self) -> dict[str, nn.Parameter]:
        """The parameters that this step will move, by name."""
        own, given = self.module._parameters, self.given
        return {n: p for n in _NAMES for p in given if p is own.get(n) and p.grad is not None}

    @property
    def role(self) -> tuple[object, ...]:
        """What decides which method serves the layer."""
        known = (self.decided, self.explicit, bool(self.note), self.obstacle)
        return self.transfer, self.is_output, *known

    @property
    def may_overlap(self) -> bool:
        """True if no gradients of rows are needed, whose scale follows the weight gradients."""
        return self.overlap_allowed and not self.obstacle

    @property
    def facts(self) -> LayerFacts:
        """What other processes must know of the layer before its problem is solved."""
        name = None if self.transfer is None else self.transfer.name
        return LayerFacts(self.row_count, self.has_rows, self.has_gram, f"{name} {self.is_output}")

    @property
    def width(self) -> int:
        """The number of output features d."""
        return int(getattr(self.kind, "d", self.tensors["weight"].shape[0]))

    @property
    def last_width(self) -> int:
        """The last dimension of the output if that holds the features; otherwise 0."""
        return self.width if self.kind.features == -1 else 0

    def record(self, call: Call, backward_pass: int) -> None:
        """Record a call that a backward pass went through; it counts once gradients accumulate.

        Args:
            call: the call.
            backward_pass: the id of the pass.
        """
        dispatch.streams.leave_gradient_stream()  # until the layer's own backward says otherwise
        if backward_pass not in self._pending:
            self._pending[backward_pass] = []
            at_the_end = torch.autograd.Variable._execution_engine.queue_callback
            at_the_end(partial(self._forget, backward_pass))
            if self.starts_afresh():
                self._replacing.add(backward_pass)
            else:
                self.follow_gradients()
        self._pending[backward_pass].append(call)

    def commit(self, backward_pass: int) -> None:
        """Make the calls of a pass part of the next problem: it has added to a parameter's gradient.

        A pass that computes other gradients only (``autograd.grad`` for a penalty) never gets here, and
        one that starts from no gradient replaces what was recorded before.
        """
        if backward_pass in self._replacing:
            self._replacing.clear()
            self.calls.clear()
        pending = self._pending.pop(backward_pass, ())
        places = {call.identity: i for i, call in enumerate(self.calls)} if pending else {}
        for call in pending:
            place = places.setdefault(call.identity, len(self.calls))
            if place == len(self.calls):
                with dispatch.streams.on_gradient_stream(call.x):
                    kept = row_reduction.condensed(self, call)
                self.calls.append(kept.copied() if self.copies else kept)
                continue
            first = self.calls[place]
            same = call if first.kept is None else call.thinned(self.kind, first.kept)
            self.calls[place] = first.with_more(same)
        if len(self.calls) > 1:
            self.drop_outputs()
        gradients = [p.grad for p in self.trained if p.grad is not None]
        self._versions = [(weakref.ref(g), g._version) for g in gradients]
        self._lengths = self._gradient_lengths()
        self.ready = dispatch.streams.ready_event()

    def _forget(self, backward_pass: int) -> None:
        """Drop what a finished pass recorded without adding to a gradient."""
        self._pending.pop(backward_pass, None)
        self._replacing.discard(backward_pass)

    def drop_overwritten(self) -> bool:
        """Drop all calls if an input was written to since the forward pass; return whether it was."""
        if not any(call.is_overwritten for call in self.calls):
            return False
        self.copies = True  # from now on
        self.calls.clear()
        return True

    def drop_outputs(self) -> None:
        """Drop the recorded outputs; no later step needs them."""
        if any(call.a is not None for call in self.calls):
            self.calls[:] = [call._replace(a=None) for call in self.calls]

    def measure_again(self) -> None:
        """Take the lengths of the gradients anew, after DDP has averaged them."""
        self._lengths = self._gradient_lengths()

    def condense(self) -> None:
        """Reduce the rows of calls that were recorded before the layer's transfer was known."""
        self.calls[:] = [
            call if call.gram is not None else row_reduction.condensed(self, call)
            for call in self.calls
        ]

    def rows_of(self, call: Call) -> int:
        """Return how many rows a call had."""
        return call.shape.numel() // max(self.width, 1)

    @property
    def row_count(self) -> int:
        """How many rows all calls had together."""
        return sum(map(self.rows_of, self.calls))

    def samples_of(self, call: Call) -> int:
        """Return how many samples a call had: rows, or images."""
        return self.rows_of(call) // max(self.kind.positions(call.shape), 1)

    def follow_gradients(self) -> None:
        """Scale the gradients of rows as the parameters' gradients were scaled since the last pass.

        Unscaling and clipping multiply ``p.grad`` by a factor, which the change of its length shows.
        (The version of ``p.grad`` does not show it: a ``GradScaler`` leaves it unchanged.)
        """
        then, now = self._lengths, self._gradient_lengths()
        both = [p for p in now if p in then]
        if both:
            # Norms over the tensors that still have a gradient, without a host sync.
            before, after = (torch.stack([of[p] for p in both]).norm() for of in (then, now))
            factor = torch.where(before > 0, after / before, torch.ones_like(after))
            self.calls[:] = [call.times(factor) for call in self.calls]
        self._lengths = now

    def _gradient_lengths(self) -> dict[nn.Parameter, Tensor]:
        """Return the norms of the layer's gradients, if gradients of rows have to follow them."""
        if self.needs.isdisjoint({"g", "v"}):
            return {}
        return {
            p: torch.linalg.vector_norm(
                p.grad, dtype=torch.promote_types(p.grad.dtype, torch.float32)
            )
            for p in self.trained
            if p.grad is not None
        }

    def starts_afresh(self) -> bool:
        """Return True if gradients are None, or were set to zero since the last pass."""
        gradients = [p.grad for p in self.trained if p.grad is not None]
        if not gradients or not self.calls:
            return True
        known = [(ref(), version) for ref, version in self._versions]
        now = [(g, g._version) for g in gradients]
        if len(now) == len(known) and all(
            g is before and version == then
            for (g, version), (before, then) in zip(now, known, strict=True)
        ):
            return False
        return not any(bool(g.any()) for g in gradients)

    @property
    def is_intact(self) -> bool:
        """True if the module still has the parameters that the optimizer was given."""
        own = self.module._parameters
        weight, bias = own.get("weight"), own.get("bias")
        for p in self.given:
            if p is not weight and p is not bias:
                return False
        return weight is not None

    def count(self, what: str, happened: Tensor | None) -> None:
        """Add one to a count where ``happened`` is true, on its device, without a host sync."""
        if happened is None:
            return
        known = self.counts.get(what, 0)
        if not isinstance(known, Tensor) or known.device != happened.device:
            known = torch.full((), int(known), device=happened.device)
        known += happened
        self.counts[what] = known

    def counted(self) -> dict[str, int]:
        """Return the counts as numbers, for which the host waits."""
        return {what: int(count) for what, count in self.counts.items()}

    def count_from(self, counts: Mapping[str, int]) -> None:
        """Set the counts, in place where a recorded CUDA graph adds to them."""
        for what in {*self.counts, *counts}:
            known, count = self.counts.get(what), counts.get(what, 0)
            self.counts[what] = known.fill_(count) if isinstance(known, Tensor) else count

    def clear(self) -> None:
        """Drop everything that was recorded since the last step."""
        self.outputs_overlapped = 0
        self.calls.clear()
        self._pending.clear()
        self._replacing.clear()

    @property
    def has_gram(self) -> bool:
        """True if XᵀX was kept instead of the rows of a call."""
        return any(call.gram is not None and call.gram.is_known for call in self.calls)

    @property
    def has_rows(self) -> bool:
        """True if the rows for a local problem were recorded, and not only a gradient."""
        rows = any(call.x.numel() > 0 or call.gram is not None for call in self.calls)
        return rows and not self.obstacle

    def findings(self) -> list[Finding]:
        """Return what the autograd graph shows behind each recorded call."""
        return [transfer_detection.resolve(call.mark, self.last_width) for call in self.calls]

    def inputs(self) -> Any:
        """Return the inputs of all calls as the linear map takes them, or XᵀX if some were reduced."""
        calls = self.calls
        grams = [call.gram for call in calls if call.gram is not None]
        if grams:
            first, *others = grams
            rest = [call for call in calls if call.gram is None]
            others += [row_reduction.products(self, call, first.square.dtype) for call in rest]
            return sum(others, first)
        return self.collected(calls)

    def collected(self, calls: Sequence[Call]) -> Any:
        """Return the inputs of some calls in the form that the layer's linear map takes."""
        inputs, outputs = [call.x for call in calls], [call.shape for call in calls]
        return self.kind.collect(inputs, outputs, self.tensors["weight"])

    def outputs(self) -> Tensor | None:
        """Return the pre-activations ``[rows, d]`` of the forward pass, if they were kept."""
        return self.calls[0].output if len(self.calls) == 1 else None

    def gradients(self) -> Tensor | None:
        """Return ∂L/∂a ``[rows, d]``, if it was recorded for all calls."""
        return self._joined([call.g for call in self.calls])

    def weighted_gradients(self) -> Tensor | None:
        """Return ∂L/∂a ``[rows, d]`` scaled so that sums of squares count every row of a thinned XᵀX.

        With rows at hand, ``row_weight`` counts them, and this is :meth:`gradients`.
        """
        if all(call.gram is None for call in self.calls):
            return self.gradients()
        times = [row_reduction.stands_for(self, call) ** 0.5 for call in self.calls]
        pairs = zip(times, (call.g for call in self.calls), strict=True)
        return self._joined([None if g is None else time * g for time, g in pairs])

    def has_v(self, call: Call) -> bool:
        """Return True if ∂L/∂y of a call was recorded behind the layer's own transfer."""
        return call.v is not None and call.behind == self.transfer

    def post_gradients(self) -> Tensor | None:
        """Return ∂L/∂y ``[rows, d]`` from behind the transfer; None if a call's was not recorded."""
        return self._joined([call.v if self.has_v(call) else None for call in self.calls])

    def pulled_back(self, a: Tensor) -> Tensor | None:
        """Return ∂L/∂y ``[rows, d]``, pulled back from ∂L/∂a for calls where it was not recorded.

        Args:
            a: the pre-activations ``[rows, d]``.
        """
        recorded = [call.v if self.has_v(call) else call.g for call in self.calls]
        rows = self._joined(recorded)
        if rows is None or self.transfer is None:
            return None
        v = self.transfer.pull_back(a, rows)
        sizes = [self.kind.rows(t).shape[-2] for t in recorded if t is not None]
        parts = zip(
            self.calls, torch.split(v, sizes, -2), torch.split(rows, sizes, -2), strict=True
        )
        for call, pulled, own in parts:
            if self.has_v(call):
                pulled.copy_(own)
        return v

    def sampled(self) -> Tensor | None:
        """Return ∂L/∂a ``[rows, d]`` for sampled labels, if they were drawn."""
        return self._joined([call.sampled for call in self.calls])

    def _joined(self, tensors: list[Tensor | None]) -> Tensor | None:
        dtype = self.tensors["weight"].dtype
        rows = [self.kind.rows(t).to(dtype) for t in tensors if t is not None]
        if not rows or len(rows) < len(tensors):
            return None
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-2)


def check_intact(layers: Iterable[LayerRecord]) -> None:
    """Raise if a module has other parameters than the optimizer was given."""
    for layer in layers:
        if not layer.is_intact:
            raise RuntimeError(
                f"The parameters of layer {layer.name!r} are not those this optimizer was made with: "
                "they were replaced or parametrized since. Make a new optimizer."
            )
