"""A layer that has a local problem: its module, its tensors, and its role in the model.

What forward and backward passes have recorded of the layer is in ``layer_record.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.distributed.fully_shard import Shards, local
from torch_locoprop.layers import LayerKind
from torch_locoprop.layers.base import FORWARDS
from torch_locoprop.paper.tensors import has_values
from torch_locoprop.paper.transfers import Transfer

REPLACED = "its forward was replaced after the optimizer was made: it takes BackProp steps"
RESHAPED = "its geometry was changed after the optimizer was made: it takes BackProp steps"
TRANSFORMED = "called inside a transform of torch.func or forward_ad: it takes BackProp steps"
COMPUTED = "called with weights computed from its own: it takes BackProp steps"
_NAMES = ("weight", "bias")


@dataclass(eq=False)
class LocalLayer:
    """A layer that has a local problem.

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
    first_step: Any = None  # what the first step did; see stepping/first_step.py
    counts: dict[str, int | Tensor] = field(default_factory=dict)  # skipped, gated, capped steps
    _forwards: tuple[Any, ...] = ()  # what the module's class computed when this object was made
    _geometry: tuple[Any, ...] = ()  # attributes of the module that say what it computes

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

    def notice_new_forward(self) -> bool:
        """Return True if the module computes something else since this object was made.

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
        """True if a tensor that autograd has computed stands in the place of a parameter now."""
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


def check_dense(layers: Mapping[Any, Mapping[str, nn.Parameter]]) -> None:
    """Raise ``RuntimeError`` if a gradient is sparse.

    Args:
        layers: layers with the tensors that have a gradient.
    """
    for layer, own in layers.items():
        for name, p in own.items():
            if p.grad is not None and p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"The {name} of layer {layer.name!r} has a sparse gradient, which LocoProp does "
                    "not support. Set p.grad = p.grad.to_dense() before step()."
                )


def check_intact(layers: Iterable[LocalLayer]) -> None:
    """Raise ``RuntimeError`` if a module no longer has the parameters the optimizer was given."""
    for layer in layers:
        if not layer.is_intact:
            raise RuntimeError(
                f"Layer {layer.name!r} no longer has the parameters this optimizer was made with: "
                "they were replaced or parametrized. Make a new optimizer."
            )
