"""A layer with a local problem, and what was recorded of its calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_locoprop.distributed.exchange import Together
from torch_locoprop.fast import cuda_streams
from torch_locoprop.layers import Layer
from torch_locoprop.paper.gram import Gram, Use
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording import transfer_detection
from torch_locoprop.recording.transfer_detection import Finding, Mark

_NAMES = ("weight", "bias")

Orders = dict[tuple[int, int, torch.device], Tensor]  # by seed, number and device
UseOfRows = Callable[["ServedLayer", Collection[str]], Use | None]


@dataclass(eq=False)
class CompiledGraph:
    """One graph that ``torch.compile`` made."""

    complete: bool = False  # what it returns was searched for transfers
    whole: bool = False  # and is what the model returns
    layers: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # called in it
    leaves: set[int] = field(default_factory=set)  # of operations outside of layers, by id
    weights: weakref.WeakKeyDictionary[nn.Module, int] = field(  # of layers, likewise
        default_factory=weakref.WeakKeyDictionary
    )

    def uses(self, module: nn.Module) -> bool:
        """Whether the weight of a layer is used outside of its forward."""
        return self.weights.get(module) in self.leaves


class CompiledCall(NamedTuple):
    """Which call of a layer in which compiled graph."""

    mark: Mark
    graph: CompiledGraph
    number: int  # of the calls of all compiled graphs


class Call(NamedTuple):
    """One forward call of a layer, as recorded in a backward pass."""

    x: Tensor
    mark: Mark  # of the call's node in the autograd graph
    shape: torch.Size  # of the output
    g: Tensor | None = None  # ∂L/∂a, where asked for, or for v where that does not serve
    v: Tensor | None = None  # ∂L/∂y, where asked for and a transfer is in the graph
    behind: Transfer | None = None  # that transfer
    sampled: Tensor | None = None  # ∂L/∂a for a label drawn from the model, where asked for
    traced: bool = True  # the graph around the call was searched
    recomputed: bool = False  # the call was made inside a backward pass
    compiled: CompiledCall | None = None
    beyond: Mark | None = None  # of the compiled graph itself, where what follows it was searched
    kept: Tensor | None = None  # which samples these are, where not all were kept
    gram: Gram | None = None  # instead of x, where that is all that is needed
    version: int | None = None  # of x in the forward pass, where others may write to it
    a: Tensor | None = None  # the output, where it was kept
    a_version: int = 0  # likewise

    @property
    def is_overwritten(self) -> bool:
        known = self.version is not None and self.x.numel() > 0
        return known and self.x._version != self.version

    @property
    def output(self) -> Tensor | None:
        """What the layer returned, where it was kept and is still that."""
        return self.a if self.a is not None and self.a._version == self.a_version else None

    def thinned(self, kind: Layer, samples: Tensor) -> Call:
        """The same call with some of its samples only."""
        recorded = {"x": self.x, "g": self.g, "v": self.v, "sampled": self.sampled}
        parts: dict[str, Any] = {
            name: kind.take(t, samples) for name, t in recorded.items() if t is not None
        }
        return self._replace(kept=samples, version=None, a=None, **parts)

    def copied(self) -> Call:
        """The same call with an input of its own."""
        return self if self.version is None else self._replace(x=self.x.clone(), version=None)

    @property
    def identity(self) -> tuple[int, CompiledCall | None]:
        """Equal for two backward passes through one forward call, as long as one is held."""
        return id(self.mark), self.compiled

    def with_more(self, other: Call) -> Call:
        """The same call after another backward pass through it: gradients add up, rows do not."""
        v = _sum(self.v, other.v) if self.behind == other.behind else None
        return self._replace(g=_sum(self.g, other.g), v=v)

    def times(self, factor: Tensor) -> Call:
        """The call with other gradients."""
        return self._replace(g=_product(self.g, factor), v=_product(self.v, factor))


@dataclass(eq=False)
class ServedLayer:
    """A layer with a local problem: its module, its kind, its transfer, and its recorded calls."""

    name: str
    module: nn.Module
    kind: Layer
    given: list[nn.Parameter]  # those of its parameters that the optimizer trains
    needs: frozenset[str] = frozenset()  # what to record besides the input: "g", "v", "fisher"
    calls: list[Call] = field(default_factory=list)
    transfer: Transfer | None = None
    explicit: bool = False  # the transfer, or that there is none, was given by the user
    decided: bool = False  # what the recorded calls tell is settled
    note: str = ""  # why there is no transfer
    obstacle: str = ""  # why it takes BackProp steps
    is_output: bool = False
    compiled: bool = False  # its calls are inside compiled graphs
    max_rows: int | None = None  # to keep of each call, and at least one sample
    row_seed: int = 0  # of which ones
    orders: Orders = field(default_factory=dict)  # of samples, drawn once for all layers of a step
    # What the next step makes of the rows, if it moves these tensors; None: it may need them all.
    use_of_rows: UseOfRows | None = None
    may_come_aside: bool = False  # its gradients: no others are asked for that follow them
    outputs_aside: int = 0  # since the last step, whose gradients come aside
    keeps_output: bool = False  # for the step to know what the layer returned, where it can
    copies: bool = False  # inputs are overwritten after backward passes: keep copies of them
    together: Together | None = None  # with other processes
    ready: torch.cuda.Event | None = None  # since when the gradients are, if a step may know
    counts: dict[str, int | Tensor] = field(default_factory=dict)  # of skipped, gated, capped ones
    _pending: dict[int, list[Call]] = field(default_factory=dict)  # by backward pass
    _replacing: set[int] = field(default_factory=set)  # passes that found no gradient to add to
    # The gradients after the last commit, and their versions.
    _versions: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)
    _lengths: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # likewise

    @property
    def tensors(self) -> dict[str, nn.Parameter]:
        own = self.module._parameters  # asked for in every step: the attributes take longer
        return {name: p for name in _NAMES if (p := own.get(name)) is not None}

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.given if p.requires_grad]

    @property
    def with_gradient(self) -> dict[str, nn.Parameter]:
        """The tensors this step will move."""
        own, given = self.module._parameters, self.given
        return {n: p for n in _NAMES for p in given if p is own.get(n) and p.grad is not None}

    @property
    def width(self) -> int:
        """The number of features d."""
        return int(getattr(self.kind, "d", self.tensors["weight"].shape[0]))

    @property
    def last_width(self) -> int:
        """The last dimension of the output if that holds the features; otherwise 0."""
        return self.width if self.kind.features == -1 else 0

    def record(self, call: Call, backward_pass: int) -> None:
        """Note a call that a backward pass went through; it counts once gradients accumulate."""
        cuda_streams.main_alone()  # until the layer's own backward says otherwise
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
        """The pass added to a parameter's gradient: its calls are part of the next problem.

        A pass that only asks for other gradients (``autograd.grad`` for a penalty) never gets here,
        and one that starts from no gradient replaces what was recorded before.
        """
        if backward_pass in self._replacing:
            self._replacing.clear()
            self.calls.clear()
        pending = self._pending.pop(backward_pass, ())
        places = {call.identity: i for i, call in enumerate(self.calls)} if pending else {}
        for call in pending:
            place = places.setdefault(call.identity, len(self.calls))
            if place == len(self.calls):
                with cuda_streams.beside(call.x):
                    kept = self._condensed(call)
                self.calls.append(kept.copied() if self.copies else kept)
                continue
            first = self.calls[place]
            same = call if first.kept is None else call.thinned(self.kind, first.kept)
            self.calls[place] = first.with_more(same)
        if len(self.calls) > 1:
            self.let_go_of_outputs()
        gradients = [p.grad for p in self.trained if p.grad is not None]
        self._versions = [(weakref.ref(g), g._version) for g in gradients]
        self._lengths = self._gradient_lengths()
        self.ready = cuda_streams.mark()

    def _forget(self, backward_pass: int) -> None:
        """A pass is over: what it has not added to a gradient by now, it never will."""
        self._pending.pop(backward_pass, None)
        self._replacing.discard(backward_pass)

    def let_go_of_overwritten(self) -> bool:
        """Whether an input is not what it was in the forward pass: no rows are left then."""
        if not any(call.is_overwritten for call in self.calls):
            return False
        self.copies = True  # from now on
        self.calls.clear()
        return True

    def let_go_of_outputs(self) -> None:
        """Nobody will ask for them."""
        if any(call.a is not None for call in self.calls):
            self.calls[:] = [call._replace(a=None) for call in self.calls]

    def measure_again(self) -> None:
        """Gradients were averaged after the pass: from their lengths now, others follow."""
        self._lengths = self._gradient_lengths()

    def _thinned(self, call: Call) -> Call:
        """The call with samples drawn at random: ``max_rows`` rows at most, but at least one image."""
        if self.max_rows is None or call.kept is not None or call.x.layout != torch.strided:
            return call
        samples = self._samples_of(call)
        keep = max(self.max_rows // max(self.kind.positions(call.shape), 1), 1)
        if samples <= keep:
            return call
        seed, device = self.row_seed + len(self.calls), call.x.device
        order = self.orders.get((seed, samples, device))
        if order is None:
            generator = torch.Generator(device).manual_seed(seed)
            order = torch.randperm(samples, generator=generator, device=device)
            self.orders[seed, samples, device] = order
        return call.thinned(self.kind, order[:keep])

    def condense(self) -> None:
        """What the calls would have kept, had all been known that is known now."""
        self.calls[:] = [
            call if call.gram is not None else self._condensed(call) for call in self.calls
        ]

    def _condensed(self, call: Call) -> Call:
        """The call with what the next step needs: no rows, XᵀX where that is less, or rows."""
        tensors = self.tensors
        own = {id(p) for p in self.given if p.requires_grad or p.grad is not None}
        moved = [name for name, p in tensors.items() if id(p) in own]
        use = None if self.use_of_rows is None else self.use_of_rows(self, moved)
        no_rows = use is not None and not use.is_any
        if call.sampled is not None or not no_rows:
            call = self._thinned(call)
        if use is None or call.x.numel() == 0:
            return call
        like = tensors["weight"].detach()
        if no_rows:
            gram = Gram.unknown(like, self._rows_of(call))
            call = call._replace(x=gram.total, gram=gram, version=None)
            return call._replace(g=None, v=None, a=None, kept=None)
        if call.is_overwritten:
            return call
        matrix = self.kind.matrix("weight", like)
        if not use.is_better(call.x, matrix, self._rows_of(call)):
            return call
        with full_precision([self]):
            gram = self._products(call, use.dtype(like))
        return call._replace(x=call.x.new_empty(0), gram=gram, version=None, a=None)

    def _products(self, call: Call, dtype: torch.dtype) -> Gram:
        """``XᵀX`` of a call's rows; of those that were kept, as an estimate of that of all."""
        of_kept = self.kind.products(self._collected([call]), dtype)
        if call.kept is None:
            return of_kept
        times = self._stands_for(call)
        return Gram(of_kept.square * times, of_kept.total * times, self._rows_of(call))

    def _rows_of(self, call: Call) -> int:
        """How many rows a call had."""
        return call.shape.numel() // max(self.width, 1)

    @property
    def row_count(self) -> int:
        """How many rows all calls had together."""
        return sum(map(self._rows_of, self.calls))

    def _samples_of(self, call: Call) -> int:
        """How many samples a call had: rows, or images."""
        return self._rows_of(call) // max(self.kind.positions(call.shape), 1)

    def _stands_for(self, call: Call) -> float:
        """How many rows each of those stands for that were kept."""
        return 1.0 if call.kept is None else self._samples_of(call) / len(call.kept)

    def row_weight(self, of_each: float) -> float | Tensor:
        """What a row counts: ``of_each``, times the number of rows that it stands for.

        Of XᵀX every row counts ``of_each``: it has what rows stand for in it.
        """
        in_rows = all(call.gram is None for call in self.calls)
        if not in_rows or all(call.kept is None for call in self.calls):
            return of_each
        parts = []
        for call in self.calls:
            samples = self._samples_of(call)
            kept = samples if call.kept is None else len(call.kept)
            rows = self._rows_of(call) // samples * kept
            weight = self.tensors["weight"]
            parts.append(weight.new_full((rows, 1), of_each * samples / kept))
        return torch.cat(parts)

    def follow_gradients(self) -> None:
        """Do to the gradients of rows what was done to those of parameters since the last pass.

        Unscaling and clipping multiply the latter, and what they multiply them by is the change of
        their length. (Their versions do not tell: a ``GradScaler`` leaves them as they are.)
        """
        then, now = self._lengths, self._gradient_lengths()
        both = [p for p in now if p in then]
        if both:
            # Norms over the tensors that have a gradient still; on the device, without a look.
            before, after = (torch.stack([of[p] for p in both]).norm() for of in (then, now))
            factor = torch.where(before > 0, after / before, torch.ones_like(after))
            self.calls[:] = [call.times(factor) for call in self.calls]
        self._lengths = now

    def _gradient_lengths(self) -> dict[nn.Parameter, Tensor]:
        """The norms of the layer's gradients, where gradients of rows have to follow them."""
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
        """Whether gradients are None, or were set to zero since the last pass."""
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
        """Whether the module still has the parameters the optimizer was given."""
        own = self.module._parameters
        weight, bias = own.get("weight"), own.get("bias")
        for p in self.given:
            if p is not weight and p is not bias:
                return False
        return weight is not None

    def count(self, what: str, happened: Tensor | None) -> None:
        """Add one if it happened; on the device, without a look from the host."""
        if happened is None:
            return
        known = self.counts.get(what, 0)
        if not isinstance(known, Tensor) or known.device != happened.device:
            known = torch.full((), int(known), device=happened.device)
        known += happened
        self.counts[what] = known

    def counted(self) -> dict[str, int]:
        """The counts as numbers, for which the host waits."""
        return {what: int(count) for what, count in self.counts.items()}

    def count_from(self, counts: Mapping[str, int]) -> None:
        """Set the counts, in place where a step that was captured goes on to add to them."""
        for what in {*self.counts, *counts}:
            known, count = self.counts.get(what), counts.get(what, 0)
            self.counts[what] = known.fill_(count) if isinstance(known, Tensor) else count

    def clear(self) -> None:
        self.outputs_aside = 0
        self.calls.clear()
        self._pending.clear()
        self._replacing.clear()

    @property
    def has_gram(self) -> bool:
        return any(call.gram is not None and call.gram.is_known for call in self.calls)

    @property
    def has_rows(self) -> bool:
        """Whether there is a local problem, and not a gradient only."""
        rows = any(call.x.numel() > 0 or call.gram is not None for call in self.calls)
        return rows and not self.obstacle

    def findings(self) -> list[Finding]:
        return [transfer_detection.resolve(call.mark, self.last_width) for call in self.calls]

    def inputs(self) -> Any:
        """X: the inputs of all calls, as the layer kind keeps them; XᵀX where some were condensed."""
        calls = self.calls
        grams = [call.gram for call in calls if call.gram is not None]
        if grams:
            first, *others = grams
            rest = [call for call in calls if call.gram is None]
            others += [self._products(call, first.square.dtype) for call in rest]
            return sum(others, first)
        return self._collected(calls)

    def _collected(self, calls: Sequence[Call]) -> Any:
        inputs, outputs = [call.x for call in calls], [call.shape for call in calls]
        return self.kind.collect(inputs, outputs, self.tensors["weight"])

    def outputs(self) -> Tensor | None:
        """a ``[rows, d]``, where it was kept."""
        return self.calls[0].output if len(self.calls) == 1 else None

    def gradients(self) -> Tensor | None:
        """∂L/∂a ``[rows, d]``, where recorded."""
        return self._joined([call.g for call in self.calls])

    def weighted_gradients(self) -> Tensor | None:
        """Likewise, with the squares of rows as many times as ``row_weight`` does not count them."""
        if all(call.gram is None for call in self.calls):
            return self.gradients()
        times = [self._stands_for(call) ** 0.5 for call in self.calls]
        pairs = zip(times, (call.g for call in self.calls), strict=True)
        return self._joined([None if g is None else time * g for time, g in pairs])

    def has_v(self, call: Call) -> bool:
        """Whether ∂L/∂y was recorded behind the layer's own transfer."""
        return call.v is not None and call.behind == self.transfer

    def post_gradients(self) -> Tensor | None:
        """∂L/∂y ``[rows, d]`` from behind the transfer; None where a call's is not in the graph."""
        return self._joined([call.v if self.has_v(call) else None for call in self.calls])

    def pulled_back(self, a: Tensor) -> Tensor | None:
        """∂L/∂y ``[rows, d]`` from ∂L/∂a at ``a``, for the calls that have none behind the transfer."""
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
        """∂L/∂a ``[rows, d]`` for sampled labels, where drawn."""
        return self._joined([call.sampled for call in self.calls])

    def _joined(self, tensors: list[Tensor | None]) -> Tensor | None:
        dtype = self.tensors["weight"].dtype
        rows = [self.kind.rows(t).to(dtype) for t in tensors if t is not None]
        if not rows or len(rows) < len(tensors):
            return None
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-2)


def full_precision(layers: Sequence[ServedLayer]) -> AbstractContextManager[object]:
    """Local problems are solved in the precision of the weights, inside autocast too."""
    kind = layers[0].given[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def check_intact(layers: Iterable[ServedLayer]) -> None:
    """Raise if a module has other parameters than the optimizer was given."""
    for layer in layers:
        if not layer.is_intact:
            raise RuntimeError(
                f"The parameters of layer {layer.name!r} are not those this optimizer was made with: "
                "they were replaced or parametrized since. Make a new optimizer."
            )


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one + other


def _product(rows: Tensor | None, factor: Tensor) -> Tensor | None:
    """In the rows' dtype or, for a gradient in half precision that was scaled up, in the factor's."""
    return None if rows is None else rows.to(torch.promote_types(rows.dtype, factor.dtype)) * factor
