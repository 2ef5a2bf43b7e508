"""Gradients of a linear layer's weights, aside from the backward pass.

Autograd computes them before it goes on to the layer below, and in a captured step, whose local
problems start as their gradients come, all layers below wait for that. Here they are computed on
another stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from torch_locoprop.fast import cuda_streams
from torch_locoprop.recording.layer_record import ServedLayer


def takes(layer: ServedLayer, x: Tensor, out: Tensor) -> bool:
    """Whether the layer is one for this, and a step of our own is being taken.

    Not if gradients of its rows are asked for: they follow the lengths of these, which come later.
    """
    if not (
        cuda_streams.gradients_stay() and _is_worth_while(x) and type(layer.module) is nn.Linear
    ):
        return False
    weight, bias = layer.module.weight, layer.module.bias
    trained = bias is not None and weight.requires_grad and bias.requires_grad
    plain = out.grad_fn is not None and out.grad_fn.name() == "AddmmBackward0"
    alone = layer.may_come_aside and not layer.obstacle
    return trained and plain and alone and x.dtype == out.dtype == weight.dtype == bias.dtype


def _is_worth_while(x: Tensor) -> bool:
    return x.is_cuda


def output(layer: ServedLayer, x: Tensor, out: Tensor) -> Tensor:
    """The layer's output, whose gradients come in this way."""
    layer.outputs_aside += 1
    found: Tensor = _Output.apply(  # type: ignore[no-untyped-call]
        out.detach(), x, layer.module.weight, layer.module.bias, layer
    )
    return found


class _Output(Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, layer: ServedLayer
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        ctx.mark_dirty(out)  # not a view of it, which nobody could change in place
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        below = None
        if ctx.needs_input_grad[1]:  # else there is nothing below that would have to wait
            if _are_taken_over(ctx.layer):
                cuda_streams.open_beside(g, x)
            else:
                cuda_streams.join()
            below = g @ weight
        with cuda_streams.beside():
            return None, below, g.mT @ x, torch.mv(g.mT, g.new_ones(len(g))), None


def _are_taken_over(layer: ServedLayer) -> bool:
    """Whether autograd takes the gradients as they are: no sum of several, which would not wait."""
    return layer.outputs_aside == 1 and all(p.grad is None for p in layer.tensors.values())
