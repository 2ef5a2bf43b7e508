"""``nn.Linear``: ``a = X Wᵀ + b`` with X ``[..., rows, n]``, W ``[..., d, n]``, b ``[..., d]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_locoprop.paper.gram import Gram, saves_work

UNCALLED = "nn.MultiheadAttention does not call its projections"


class LinearLayer:
    """The local problem's view of ``nn.Linear``; leading dimensions are free."""

    kind = "Linear"
    features = -1

    def refuses(self, module: nn.Module) -> str | None:
        if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
            return f"{type(module).__name__} has a forward of its own"
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            return UNCALLED
        return refuses_tensors(module)

    def matrix(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def restored(self, name: str, matrix: Tensor, like: Tensor) -> Tensor:
        return matrix

    def collect(self, inputs: Sequence[Tensor], outputs: Sequence[Any], like: Tensor) -> Tensor:
        rows = [self.rows(x).to(like.dtype) for x in inputs]
        if not rows:
            return like.new_empty(0, like.shape[1])
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def count(self, x: Tensor) -> int:
        return x.shape[-2]

    def rows(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        return tensor.reshape(-1, tensor.shape[-1])

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return x @ weight.mT
        if weight.dim() == 2:
            return torch.addmm(bias, x, weight.mT)
        if weight.dim() == 3 and x.dim() == 3:
            return torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)
        return x @ weight.mT + bias.unsqueeze(-2)

    def weight_grad(self, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
        return {"weight": delta.mT @ x, "bias": delta.sum(-2)}

    def inputs(self, x: Tensor, weight: bool, bias: bool) -> Tensor:
        return with_ones(x, weight, bias)

    def take(self, tensor: Tensor, samples: Tensor) -> Tensor:
        return self.rows(tensor)[samples]

    def positions(self, output: Sequence[int]) -> int:
        return 1

    def products(self, x: Tensor, dtype: torch.dtype) -> Gram:
        return Gram.of(x.to(dtype), apart=True)

    def gram(self, x: Tensor, d: int, gradients: int, weight: Tensor | None = None) -> Gram | None:
        rows, n = x.shape[-2:]
        return Gram.of(x, weight) if saves_work(rows, d, n, gradients) else None


def refuses_tensors(module: nn.Module) -> str | None:
    """Why a local problem over weight and bias would not be all there is to this module's tensors."""
    own = module._parameters
    weight = own.get("weight")
    if weight is None:
        return "its weight is computed (parametrized), not a parameter"
    if "bias" not in own:
        return "its bias is computed (parametrized), not a parameter"
    if weight.is_complex():
        return "local problems are real, and its weight is complex"
    if is_traceable_wrapper_subclass(weight):
        return f"its weight is a {type(weight).__name__}, sharded or quantized, not a plain tensor"
    more = [name for name, p in own.items() if p is not None and name not in ("weight", "bias")]
    return f"it has more parameters than weight and bias: {', '.join(more)}" if more else None


def with_ones(x: Tensor, weight: bool, bias: bool) -> Tensor:
    """The columns of x, if the weight is trained, then a constant one, if the bias is."""
    columns = [x] if weight else []
    columns += [torch.ones_like(x[..., :1])] if bias else []
    return torch.cat(columns, dim=-1)
