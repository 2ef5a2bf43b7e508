"""``nn.Linear``: ``a = X Wᵀ + b`` with X ``[..., rows, n]``, W ``[..., d, n]``, b ``[..., d]``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LinearLayer:
    """The local problem's view of ``nn.Linear``; leading dimensions are free."""

    kind = "Linear"

    def refuses(self, module: nn.Module) -> str | None:
        if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
            return f"{type(module).__name__} has a forward of its own"
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            return "nn.MultiheadAttention does not call its projections"
        if not isinstance(module._parameters.get("weight"), nn.Parameter):
            return "its weight is computed (parametrized), not a parameter"
        return None

    def rows(self, tensor: Tensor) -> Tensor:
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
        columns = [x] if weight else []
        columns += [torch.ones_like(x[..., :1])] if bias else []
        return torch.cat(columns, dim=-1)
