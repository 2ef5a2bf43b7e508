"""One forward call of a layer, before and after a backward pass has reached it.

Which calls belong to the next step is decided in ``layer_record.py``.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_locoprop.layers import LayerKind
from torch_locoprop.paper.gram import Gram
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording.node_marks import Mark


@dataclass(eq=False)
class CompiledGraph:
    """One graph that ``torch.compile`` made, and what was found in it while it was traced."""

    outputs_searched: bool = False  # the graph's outputs were searched for transfers
    returns_model_output: bool = False  # the graph's outputs are what the model returns
    layers: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # called layers
    leaves: set[int] = field(default_factory=set)  # ids of leaves used outside of layers
    tensors: weakref.WeakKeyDictionary[nn.Module, set[int]] = field(  # ids of weights and biases
        default_factory=weakref.WeakKeyDictionary
    )

    def uses_elsewhere(self, module: nn.Module) -> bool:
        """Return True if an operation outside of the layer's forward uses the layer's tensors."""
        return not self.leaves.isdisjoint(self.tensors.get(module, ()))


class CompiledCall(NamedTuple):
    """Identifies one call of a layer in a compiled graph."""

    mark: Mark
    graph: CompiledGraph
    number: int  # counts the calls of all compiled graphs
    features: int | None = None  # features of the whole output, if this process has some of them


class Call(NamedTuple):
    """One forward call of a layer that a backward pass went through."""

    x: Tensor
    mark: Mark  # mark of the call's node in the autograd graph
    shape: torch.Size  # shape of the output
    g: Tensor | None = None  # ∂L/∂a, if needed, or to compute v where v was not recorded
    g_norm: Tensor | None = None  # the norm of ∂L/∂a, in the first step
    v: Tensor | None = None  # ∂L/∂y, if needed and a transfer is in the autograd graph
    v_transfer: Transfer | None = None  # the transfer whose output v belongs to
    sampled: Tensor | None = None  # ∂L/∂a for a label drawn from the model, if needed
    searched: bool = True  # the autograd graph around the call was searched for transfers
    recomputed: bool = False  # the call was made inside a backward pass (checkpointing)
    compiled: CompiledCall | None = None
    graph_mark: Mark | None = None  # mark of the compiled graph's node, if it was searched
    kept: Tensor | None = None  # indices of the samples that were kept, if not all
    gram: Gram | None = None  # XᵀX in place of x, if the step needs no more
    version: int | None = None  # version of x in the forward pass, if other code may write to x
    samples: Tensor | None = None  # some samples of an input that is no activation, by a copy
    a: Tensor | None = None  # the output, if it was kept
    a_version: int = 0  # version of the output in the forward pass

    @property
    def is_overwritten(self) -> bool:
        """True if the input was written to after the forward pass.

        NumPy and ``.data`` leave the version of a tensor as it is. The samples show what they write.
        """
        if self.version is None or self.x.numel() == 0:
            return False
        if self.x._version != self.version:
            return True
        return self.samples is not None and not same_bits(self.samples, some_samples(self.x))

    @property
    def output(self) -> Tensor | None:
        """The output of the layer; None if it was not kept or was written to since."""
        return self.a if self.a is not None and self.a._version == self.a_version else None

    def subsampled(self, kind: LayerKind, samples: Tensor) -> Call:
        """Return the call with the given samples only.

        Args:
            kind: the kind of the layer.
            samples: indices of the samples to keep.
        """
        recorded = {"x": self.x, "g": self.g, "v": self.v, "sampled": self.sampled}
        parts: dict[str, Any] = {
            name: kind.take(t, samples) for name, t in recorded.items() if t is not None
        }
        return self._replace(kept=samples, version=None, samples=None, a=None, **parts)

    def without_rows(self, kind: LayerKind) -> Call:
        """Return the call with a batch of no samples.

        Args:
            kind: the kind of the layer.
        """
        none = torch.empty(0, dtype=torch.long, device=self.x.device)
        shape = torch.Size((0, *self.shape[1:]))
        return self.subsampled(kind, none)._replace(kept=None, shape=shape, g_norm=None)

    def without_inputs(self, like: Tensor, rows: int) -> Call:
        """Return the call with the number of its rows only, for a step that needs its gradient alone.

        Args:
            like: the weight.
            rows: how many rows the call has.
        """
        gram = Gram.unknown(like, rows)
        return self._replace(
            x=gram.total,
            gram=gram,
            version=None,
            samples=None,
            g=None,
            v=None,
            a=None,
            kept=None,
        )

    def with_own_input(self) -> Call:
        """Return the call with a copy of its input, which no other code can write to."""
        if self.version is None:
            return self
        return self._replace(x=self.x.clone(), version=None, samples=None)

    @property
    def identity(self) -> tuple[int, CompiledCall | None]:
        """A key of the forward call, equal in all backward passes through it.

        The key is valid as long as a :class:`Call` of that forward call exists.
        """
        return id(self.mark), self.compiled

    def with_gradients_of(self, other: Call) -> Call:
        """Return the call with the gradients of another backward pass through it added."""
        v = _sum(self.v, other.v) if self.v_transfer == other.v_transfer else None
        norm = _sum(self.g_norm, other.g_norm)  # a bound, which is enough for a report
        return self._replace(g=_sum(self.g, other.g), g_norm=norm, v=v)

    def scaled(self, factor: Tensor) -> Call:
        """Return the call with its gradients multiplied by a factor."""
        norm = _product(self.g_norm, factor)
        return self._replace(g=_product(self.g, factor), g_norm=norm, v=_product(self.v, factor))


class PendingCall:
    """A call that no backward pass has reached yet, held by a hook on its autograd node.

    The autograd graph owns it. It is released after the last backward pass through the graph, or
    after the step, whichever comes first.
    """

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call
        self.sampled: Tensor | None = None  # ∂L/∂a for a label drawn from the model
        self.recorded = False  # a backward pass has reached the call

    def release(self) -> None:
        """Drop the tensors of a call that was recorded; the autograd graph may live on."""
        if self.recorded:
            self.call = self.sampled = None


def some_samples(x: Tensor) -> Tensor:
    """Return a copy of the first, the middle and the last sample of an input on the host."""
    return x[[0, len(x) // 2, -1]].contiguous()  # those of channels_last are not


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two contiguous tensors of one shape are equal, also where they are NaN."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one + other


def _product(rows: Tensor | None, factor: Tensor) -> Tensor | None:
    """Multiply in the wider dtype of rows and factor: scaled gradients overflow in half precision."""
    return None if rows is None else rows.to(torch.promote_types(rows.dtype, factor.dtype)) * factor
