"""The linear map of a layer, ``a = X Wᵀ + b``, as the local problem sees it.

This file has the interface and the map of a dense matrix. Maps of other layers, such as convolutions,
are beside the adapters of their modules in ``layers/``. Nothing here knows ``nn.Module``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from torch_locoprop.paper.tensors import Tensors


class LinearMap(Protocol):
    """The products that a local problem needs of a layer.

    ``x`` holds the layer's inputs in whatever form the map keeps them: for a dense layer the rows
    ``[..., rows, n]``, for a convolution the images. The weight is always a matrix ``[..., d, n]`` and
    the bias ``[..., d]``; rows are samples × positions.
    """

    @property
    def holds_rows(self) -> bool:
        """True if ``x`` is the matrix of rows ``X`` itself."""
        ...

    def forward(self, x: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the pre-activations ``a = X Wᵀ + b``, ``[..., rows, d]``."""
        ...

    def weight_grad(self, x: Any, delta: Tensor) -> Tensors:
        """Return ``δᵀX`` as "weight" and ``δᵀ1`` as "bias" for ``δ`` of shape ``[..., rows, d]``."""
        ...

    def inputs(self, x: Any, weight: bool, bias: bool) -> Tensor:
        """Return the rows that multiply the trained columns of ``[W b]``.

        Args:
            x: the layer's inputs.
            weight: include the columns of ``X``.
            bias: include a last column of ones.
        """
        ...

    def row_blocks(self, x: Any) -> Iterator[Tensor]:
        """Yield the rows ``X`` in blocks ``[..., some rows, n]`` that fit into memory."""
        ...


class Dense:
    """The map of a dense matrix; ``x`` is the rows ``[..., rows, n]``, leading dimensions are free."""

    holds_rows: ClassVar[bool] = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return x @ weight.mT
        if weight.dim() == x.dim() == 2:
            return torch.addmm(bias, x, weight.mT)
        if weight.dim() == x.dim() == 3:
            return torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)
        return x @ weight.mT + bias.unsqueeze(-2)

    def weight_grad(self, x: Tensor, delta: Tensor) -> Tensors:
        return {"weight": delta.mT @ x, "bias": delta.sum(-2)}

    def inputs(self, x: Tensor, weight: bool, bias: bool) -> Tensor:
        return with_ones(x, weight, bias)

    def row_blocks(self, x: Tensor) -> Iterator[Tensor]:
        yield x


def with_ones(x: Tensor, weight: bool, bias: bool) -> Tensor:
    """Return the columns of ``x`` if ``weight``, followed by a column of ones if ``bias``."""
    columns = [x] if weight else []
    columns += [x.new_ones(*x.shape[:-1], 1)] if bias else []
    return torch.cat(columns, dim=-1)
