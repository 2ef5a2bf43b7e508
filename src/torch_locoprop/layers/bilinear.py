"""``nn.Bilinear``: ``a[row, k] = x₁ᵀ A[k] x₂ + b[k]``, which is linear in the products ``x₁ ⊗ x₂``.

A row X of the local problem is ``x₁ ⊗ x₂``, flattened to n = n₁·n₂ numbers, and the weight A
``[d, n₁, n₂]`` is the matrix ``[d, n]``. What is kept of a row is ``[x₁ x₂]``, n₁ + n₂ numbers.
``X Wᵀ`` and ``δᵀX`` are computed from x₁ and x₂ directly. The products ``x₁ ⊗ x₂`` are formed for
``XᵀX``, some rows at a time, and for closed forms that need all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_locoprop.layers.base import own_forward, serves, unusual_tensors
from torch_locoprop.layers.linear import LinearLayer
from torch_locoprop.paper.linear_map import with_ones
from torch_locoprop.paper.tensors import Tensors, at_least_float32

AT_ONCE = 2**22  # numbers in the largest intermediate product


@dataclass(frozen=True)
class BilinearMap:
    """The linear map of a bilinear layer; ``x`` has the rows ``[x₁ x₂]``, ``[..., rows, n₁ + n₂]``."""

    n1: int  # features of the first input
    n2: int  # features of the second input
    holds_rows: ClassVar[bool] = False

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        kernel = weight.reshape(*weight.shape[:-1], self.n1, self.n2)
        blocks = torch.split(x, self._rows_at_once(x, weight.shape[-2]), dim=-2)
        parts = [
            torch.einsum("...ri,...kij,...rj->...rk", x1, kernel, x2)
            for x1, x2 in map(self._both, blocks)
        ]
        a = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        return a if bias is None else a + bias.unsqueeze(-2)

    def weight_grad(self, x: Tensor, delta: Tensor) -> Tensors:
        rows = self._rows_at_once(x, delta.shape[-1])
        pairs = zip(torch.split(delta, rows, -2), torch.split(x, rows, -2), strict=True)
        first, *rest = (
            torch.einsum("...rk,...ri,...rj->...kij", some, *self._both(block))
            for some, block in pairs
        )
        return {"weight": sum(rest, first).flatten(-2), "bias": delta.sum(-2)}

    def inputs(self, x: Tensor, weight: bool, bias: bool) -> Tensor:
        """Return the rows ``x₁ ⊗ x₂``, ``[..., rows, n]``."""
        return with_ones(self._products(x) if weight else x, weight, bias)

    def row_blocks(self, x: Tensor) -> Iterator[Tensor]:
        """Yield ``x₁ ⊗ x₂`` of some rows at a time, in float32 for inputs in half precision."""
        for some in torch.split(x, self._rows_at_once(x, 1), dim=-2):
            yield self._products(at_least_float32(some))

    def _products(self, x: Tensor) -> Tensor:
        x1, x2 = self._both(x)
        return (x1.unsqueeze(-1) * x2.unsqueeze(-2)).flatten(-2)

    def _both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., : self.n1], x[..., self.n1 :]

    def _rows_at_once(self, x: Tensor, d: int) -> int:
        """Return how many rows fit: products of two of n₁, n₂ and d numbers of each are formed."""
        of_row = max(self.n1 * self.n2, d * self.n1, d * self.n2) * x.shape[:-2].numel()
        return max(AT_ONCE // max(of_row, 1), 1)


@dataclass(frozen=True)
class BilinearLayer(LinearLayer):
    """The adapter of ``nn.Bilinear``; its two inputs are recorded side by side."""

    linear_map: BilinearMap
    kind = "Bilinear"
    arguments = ("input1", "input2")

    def refuses(self, module: nn.Module) -> str | None:
        return own_forward(module, nn.Bilinear.forward) or unusual_tensors(module)

    def matrix(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.flatten(1) if name == "weight" else tensor

    def restored(self, name: str, matrix: Tensor, like: Tensor) -> Tensor:
        return matrix.reshape(like.shape)

    def collect(self, inputs: Sequence[Tensor], outputs: Sequence[Any], like: Tensor) -> Tensor:
        no_rows = like.new_empty(0, self.linear_map.n1 + self.linear_map.n2)
        return super().collect(inputs, outputs, no_rows)


@serves(nn.Bilinear)
def bilinear(module: nn.Bilinear) -> BilinearLayer:
    """Return the layer kind of ``nn.Bilinear``."""
    return BilinearLayer(BilinearMap(module.in1_features, module.in2_features))
