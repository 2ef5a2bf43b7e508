"""One call of a layer, as a backward pass has recorded it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_locoprop.layers import LayerKind
from torch_locoprop.paper.gram import Gram
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording.transfer_detection import Mark


@dataclass(eq=False)
class CompiledGraph:
    """One graph that ``torch.compile`` made."""

    complete: bool = False  # what it returns was searched for transfers
    whole: bool = False  # what it returns is what the model returns
    layers: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # called in it
    leaves: set[int] = field(default_factory=set)  # ids of leaves used outside of layers
    weights: weakref.WeakKeyDictionary[nn.Module, int] = field(  # ids of the layers' weights
        default_factory=weakref.WeakKeyDictionary
    )

    def uses(self, module: nn.Module) -> bool:
        """Return True if the weight of a layer is used outside of its forward."""
        return self.weights.get(module) in self.leaves


class CompiledCall(NamedTuple):
    """Which call of a layer in which compiled graph."""

    mark: Mark
    graph: CompiledGraph
    number: int  # counts the calls of all compiled graphs


class Call(NamedTuple):
    """One forward call of a layer that a backward pass went through."""

    x: Tensor
    mark: Mark  # of the call's node in the autograd graph
    shape: torch.Size  # of the output
    g: Tensor | None = None  # ∂L/∂a, if needed, or for v where v was not recorded
    v: Tensor | None = None  # ∂L/∂y, if needed and a transfer is in the autograd graph
    behind: Transfer | None = None  # the transfer behind which v was recorded
    sampled: Tensor | None = None  # ∂L/∂a for a label drawn from the model, if needed
    traced: bool = True  # the autograd graph around the call was searched
    recomputed: bool = False  # the call was made inside a backward pass
    compiled: CompiledCall | None = None
    beyond: Mark | None = None  # of the compiled graph itself, if what follows it was searched
    kept: Tensor | None = None  # indices of the samples that were kept, if not all
    gram: Gram | None = None  # XᵀX in place of x, if the step needs no more
    version: int | None = None  # of x in the forward pass, if others may write to it
    a: Tensor | None = None  # the output, if it was kept
    a_version: int = 0  # of the output in the forward pass

    @property
    def is_overwritten(self) -> bool:
        """True if the input was written to after the forward pass."""
        known = self.version is not None and self.x.numel() > 0
        return known and self.x._version != self.version

    @property
    def output(self) -> Tensor | None:
        """What the layer returned, if it was kept and was not written to since."""
        return self.a if self.a is not None and self.a._version == self.a_version else None

    def thinned(self, kind: LayerKind, samples: Tensor) -> Call:
        """Return the call with some of its samples only."""
        recorded = {"x": self.x, "g": self.g, "v": self.v, "sampled": self.sampled}
        parts: dict[str, Any] = {
            name: kind.take(t, samples) for name, t in recorded.items() if t is not None
        }
        return self._replace(kept=samples, version=None, a=None, **parts)

    def copied(self) -> Call:
        """Return the call with an input of its own, which nobody else can write to."""
        return self if self.version is None else self._replace(x=self.x.clone(), version=None)

    @property
    def identity(self) -> tuple[int, CompiledCall | None]:
        """Equal for two backward passes through one forward call, as long as one is held."""
        return id(self.mark), self.compiled

    def with_more(self, other: Call) -> Call:
        """Return the call after another backward pass through it: gradients add up, rows do not."""
        v = _sum(self.v, other.v) if self.behind == other.behind else None
        return self._replace(g=_sum(self.g, other.g), v=v)

    def times(self, factor: Tensor) -> Call:
        """Return the call with its gradients multiplied by a factor."""
        return self._replace(g=_product(self.g, factor), v=_product(self.v, factor))


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one + other


def _product(rows: Tensor | None, factor: Tensor) -> Tensor | None:
    """Multiply in the rows' dtype, or in the factor's for a scaled-up gradient in half precision."""
    return None if rows is None else rows.to(torch.promote_types(rows.dtype, factor.dtype)) * factor
