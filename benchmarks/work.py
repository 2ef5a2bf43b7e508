"""The arithmetic of a step: how many floating-point operations it takes, and its matrix products alone.

A unit of a layer `[d, n]` is one product of `b` rows with its weights, `2·b·d·n` operations. BackProp
takes three: forward, input gradient and weight gradient, but the first layer needs no input gradient.
LocoProp with T iterations adds T − 1 local forward products and T − 1 weight gradients: 2T + 1 in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_locoprop.fast.cuda_streams import lanes
from torch_locoprop.paper.gram import saves_work

Layers = Sequence[tuple[int, int]]
"""`(n, d)`, inputs and outputs, of every layer."""


def backprop_flop(layers: Layers, b: int) -> int:
    """Return the operations of forward and backward."""
    (n, d), *_ = layers
    return 2 * b * (3 * sum(n * d for n, d in layers) - n * d)


def locoprop_flop(layers: Layers, b: int, T: int) -> int:
    """Return those of a step with T iterations on the rows, the first from BackProp's gradient."""
    return backprop_flop(layers, b) + 4 * (T - 1) * b * sum(n * d for n, d in layers)


def gram_flop(layers: Layers, b: int, T: int) -> int:
    """Return those of LocoProp-S, where each layer iterates through XᵀX if that is less work."""
    total = backprop_flop(layers, b)
    for n, d in layers:
        if saves_work(b, d, n, T - 1):
            total += 2 * b * n * n + 2 * (T - 1) * d * n * n
        else:
            total += 4 * (T - 1) * b * d * n
    return total


class Gemms:
    """The matrix products of a LocoProp-M step and nothing else, into memory that is there already."""

    def __init__(self, layers: Layers, b: int, T: int, device: str = "cpu") -> None:
        numbers = torch.Generator().manual_seed(0)

        def drawn(rows: int, columns: int) -> Tensor:
            """Of a size that keeps products of products far from overflow and from denormals."""
            return (torch.randn(rows, columns, generator=numbers) / columns**0.5).to(device)

        widths = [layers[0][0], *(d for _, d in layers)]
        self.T = T
        self.weights = [drawn(d, n) for n, d in layers]
        self.inputs = [drawn(b, width) for width in widths]
        self.gradients = [drawn(b, width) for width in widths]
        self.weight_gradients = [torch.empty_like(weight) for weight in self.weights]
        self.pre_activations = [torch.empty(b, d, device=device) for _, d in layers]

    def __call__(self) -> None:
        """Compute them all: forward, backward, then layer by layer, as LocoProp's step does."""
        for index, weight in enumerate(self.weights):
            torch.mm(self.inputs[index], weight.mT, out=self.inputs[index + 1])
        for index, weight in reversed(list(enumerate(self.weights))):
            self._weight_gradient(self.gradients[index + 1], index)
            if index > 0:
                torch.mm(self.gradients[index + 1], weight, out=self.gradients[index])
        with lanes() as lane:
            for index in range(len(self.weights)):
                with lane(None):
                    self._local(index)

    def _local(self, index: int) -> None:
        x, weight, a = self.inputs[index], self.weights[index], self.pre_activations[index]
        for _ in range(self.T - 1):
            torch.mm(x, weight.mT, out=a)
            self._weight_gradient(a, index)

    def _weight_gradient(self, delta: Tensor, index: int) -> None:
        torch.mm(delta.mT, self.inputs[index], out=self.weight_gradients[index])
