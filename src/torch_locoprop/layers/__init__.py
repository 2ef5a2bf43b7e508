"""The only files that know kinds of ``nn.Module``; a layer kind is one file with one class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torch_locoprop.layers.conv import ConvLayer
from torch_locoprop.layers.gpt2_conv1d import TransposedLinear
from torch_locoprop.layers.linear import LinearLayer
from torch_locoprop.paper.gram import Gram


class Layer(Protocol):
    """What a layer kind offers. Rows are samples × positions, features last.

    In a local problem the weight is a matrix ``[d, n]``, whatever its shape in the module, and x is
    what :meth:`collect` makes of the recorded inputs: only the layer kind looks into it. Groups of a
    convolution are a leading dimension of everything: weight ``[G, d/G, n]``, rows ``[G, rows, d/G]``.
    """

    @property
    def kind(self) -> str:
        """The name of the kind."""
        ...

    @property
    def features(self) -> int:
        """The dimension of recorded tensors that holds the features: -1 or 1."""
        ...

    def refuses(self, module: nn.Module) -> str | None:
        """Why this module has no local problem, or None if it has one."""
        ...

    def matrix(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or anything in its shape, as in the local problem."""
        ...

    def restored(self, name: str, matrix: Tensor, like: Tensor) -> Tensor:
        """The inverse of :meth:`matrix`."""
        ...

    def collect(self, inputs: Sequence[Tensor], outputs: Sequence[Any], like: Tensor) -> Any:
        """x: the inputs of all calls, in the dtype of ``like``; ``outputs`` are the outputs' shapes."""
        ...

    def count(self, x: Any) -> int:
        """How many rows there are."""
        ...

    def rows(self, tensor: Tensor) -> Tensor:
        """A recorded output, or its gradient, as ``[rows, features]``."""
        ...

    def forward(self, x: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The pre-activations ``a`` ``[..., rows, d]``."""
        ...

    def weight_grad(self, x: Any, delta: Tensor) -> dict[str, Tensor]:
        """``δᵀX`` for the weight and ``δᵀ1`` for the bias."""
        ...

    def inputs(self, x: Any, weight: bool, bias: bool) -> Tensor:
        """The rows that multiply the trained columns ``[W b]``: X, then a constant one."""
        ...

    def take(self, tensor: Tensor, samples: Tensor) -> Tensor:
        """Some samples of a recorded tensor: rows, or images with all their positions."""
        ...

    def positions(self, output: Sequence[int]) -> int:
        """How many rows each sample of an output of this shape has."""
        ...

    def products(self, x: Any, dtype: torch.dtype) -> Gram:
        """``XᵀX``, in another dtype if need be, apart from the solution of the problem."""
        ...

    def gram(self, x: Any, d: int, gradients: int, weight: Tensor | None = None) -> Gram | None:
        """``XᵀX``, if so many gradients of a squared loss are cheaper with it than by rows.

        With ``weight`` ``[rows, 1]``, each row counts so many times.
        """
        ...


LAYER_KINDS: dict[type[nn.Module], Callable[[Any], Layer]] = {
    nn.Linear: lambda module: LinearLayer(),
    nn.modules.conv._ConvNd: ConvLayer.of,
}


# By their full names, so that packages nobody uses are not imported.
FOREIGN_KINDS: dict[str, Callable[[Any], Layer]] = {
    "transformers.pytorch_utils.Conv1D": TransposedLinear.of,
}


def layer_kind(module: nn.Module) -> Layer | None:
    """The kind that serves modules of this class; None if there is none."""
    for cls, of in LAYER_KINDS.items():
        if isinstance(module, cls):
            return of(module)
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__)
    return next((FOREIGN_KINDS[name](module) for name in names if name in FOREIGN_KINDS), None)
