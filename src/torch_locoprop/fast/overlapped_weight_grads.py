"""Weight gradients of linear layers, computed beside the backward pass.

Autograd computes a layer's weight gradient before it continues with the layer below. In a recorded step
the local problems start as soon as their gradients exist, and all layers below would wait for that
matrix product. Here the product runs on a gradient stream (``cuda_streams.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from torch_locoprop.fast import cuda_streams


class Overlapping(Protocol):
    """The part of a layer's record that is used here."""

    module: nn.Module
    outputs_overlapped: int  # number of calls since the last step that :func:`output` has changed

    @property
    def may_overlap(self) -> bool:
        """True if the layer's weight gradients may be computed beside the backward pass.

        False if the step needs gradients of rows: their scale is taken from the weight gradients.
        """
        ...

    @property
    def tensors(self) -> Mapping[str, nn.Parameter]:
        """The layer's parameters by name."""
        ...


def can_overlap(layer: Overlapping, x: Tensor, out: Tensor) -> bool:
    """Return True if the weight gradients of a call can be computed beside the backward pass.

    Args:
        layer: the record of the layer that was called.
        x: the input of the layer.
        out: the output of the layer.
    """
    if not (cuda_streams.overlapping and _is_worthwhile(x) and type(layer.module) is nn.Linear):
        return False
    weight, bias = layer.module.weight, layer.module.bias
    if bias is None or not (weight.requires_grad and bias.requires_grad):
        return False
    plain = out.grad_fn is not None and out.grad_fn.name() == "AddmmBackward0"
    same = x.dtype == out.dtype == weight.dtype == bias.dtype
    return plain and same and layer.may_overlap


def output(layer: Overlapping, x: Tensor, out: Tensor) -> Tensor:
    """Return the layer's output as an autograd node with overlapped weight gradients.

    Args:
        layer: the record of the layer that was called.
        x: the input of the layer.
        out: the output of the layer.
    """
    layer.outputs_overlapped += 1
    found: Tensor = _Output.apply(  # type: ignore[no-untyped-call]
        out.detach(), x, layer.module.weight, layer.module.bias, layer
    )
    return found


def _is_worthwhile(x: Tensor) -> bool:
    return x.is_cuda


class _Output(Function):
    """The identity of a linear layer's output; its backward computes the layer's gradients."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, layer: Overlapping
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        ctx.mark_dirty(out)  # otherwise the output is a view, which cannot be changed in place
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        below = None
        if ctx.needs_input_grad[1]:  # otherwise no layer below would wait
            if _are_assigned(ctx.layer):
                cuda_streams.enter_gradient_stream(g, x)
            else:
                cuda_streams.wait_for_gradient_streams()
            below = g @ weight
        with cuda_streams.on_gradient_stream():
            return None, below, g.mT @ x, torch.mv(g.mT, g.new_ones(len(g))), None


def _are_assigned(layer: Overlapping) -> bool:
    """Return True if autograd assigns these gradients to ``.grad`` without adding them to others.

    An addition would run on the main stream, without waiting for the gradient stream.
    """
    return layer.outputs_overlapped == 1 and all(p.grad is None for p in layer.tensors.values())
