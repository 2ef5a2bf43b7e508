"""The only files that know kinds of ``nn.Module``; a layer kind is one file with one class."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from torch_locoprop.layers.linear import LinearLayer


class Layer(Protocol):
    """What a layer kind offers. Rows are samples × positions, features last."""

    kind: str

    def refuses(self, module: nn.Module) -> str | None:
        """Why this module has no local problem, or None if it has one."""
        ...

    def rows(self, tensor: Tensor) -> Tensor:
        """A recorded tensor ``[..., features]`` as ``[rows, features]``."""
        ...

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The pre-activations ``a`` ``[..., rows, d]``."""
        ...

    def weight_grad(self, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
        """``δᵀX`` for the weight and ``δᵀ1`` for the bias."""
        ...

    def inputs(self, x: Tensor, weight: bool, bias: bool) -> Tensor:
        """The rows that multiply the trained columns ``[W b]``: X, then a constant one."""
        ...


LAYER_KINDS: dict[type[nn.Module], Layer] = {nn.Linear: LinearLayer()}


def layer_kind(module: nn.Module) -> Layer | None:
    """The kind that serves modules of this class; None if there is none."""
    return next((kind for cls, kind in LAYER_KINDS.items() if isinstance(module, cls)), None)
