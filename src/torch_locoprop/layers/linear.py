"""``nn.Linear``: ``a = X Wᵀ + b`` with X ``[..., rows, n]``, W ``[..., d, n]``, b ``[..., d]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.layers.base import own_forward, serves, unusual_tensors
from torch_locoprop.paper.linear_map import Dense, LinearMap

UNCALLED = "nn.MultiheadAttention does not call its projections"


class LinearLayer:
    """The adapter of ``nn.Linear``, and the base of kinds whose tensors have their features last."""

    kind = "Linear"
    features = -1
    arguments: tuple[str, ...] = ("input",)
    linear_map: LinearMap = Dense()

    def refuses(self, module: nn.Module) -> str | None:
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            return own_forward(module, nn.Linear.forward) or UNCALLED
        return own_forward(module, nn.Linear.forward) or unusual_tensors(module)

    def matrix(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def restored(self, name: str, matrix: Tensor, like: Tensor) -> Tensor:
        return matrix

    def collect(self, inputs: Sequence[Tensor], outputs: Sequence[Any], like: Tensor) -> Tensor:
        rows = [self.rows(x).to(like.dtype) for x in inputs]
        if not rows:
            return like.new_empty(0, like.shape[1])
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def rows(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        # Not reshape(-1, n), which cannot tell the number of rows of a layer without features.
        return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)

    def take(self, tensor: Tensor, samples: Tensor) -> Tensor:
        return self.rows(tensor)[samples]

    def positions(self, output: Sequence[int]) -> int:
        return 1

    def with_outputs(self, d: int) -> LinearLayer | None:
        """Return the kind of a layer with d of the outputs."""
        return self


@serves(nn.Linear)
def linear(module: nn.Linear) -> LinearLayer:
    """Return the layer kind of ``nn.Linear``."""
    return LinearLayer()
