"""The matrix products of a training step: their floating-point operations, and the products alone.

A unit of a layer `[d, n]` is one product of `b` rows with its weights: `2·b·d·n` operations. BackProp
has three units for each layer: forward pass, input gradient and weight gradient. The first layer has no
input gradient. LocoProp with T iterations adds T − 1 forward products and T − 1 weight gradients, which
makes 2T + 1 units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_locoprop.fast.cuda_streams import side_streams
from torch_locoprop.paper.gram import saves_work

Layers = Sequence[tuple[int, int]]
"""The numbers of inputs and outputs `(n, d)` of every layer."""


def backprop_flop(layers: Layers, b: int) -> int:
    """Return the operations of a forward and a backward pass on `b` rows."""
    (n, d), *_ = layers
    return 2 * b * (3 * sum(n * d for n, d in layers) - n * d)


def locoprop_flop(layers: Layers, b: int, T: int) -> int:
    """Return the operations of a LocoProp step with T iterations on `b` rows.

    The first iteration uses BackProp's gradient and needs no product.
    """
    return backprop_flop(layers, b) + 4 * (T - 1) * b * sum(n * d for n, d in layers)


def gram_flop(layers: Layers, b: int, T: int) -> int:
    """Return the operations of a LocoProp-S step; layers use XᵀX where that needs fewer."""
    total = backprop_flop(layers, b)
    for n, d in layers:
        if saves_work(b, d, n, T - 1):
            total += 2 * b * n * n + 2 * (T - 1) * d * n * n
        else:
            total += 4 * (T - 1) * b * d * n
    return total


class Gemms:
    """The matrix products of a LocoProp-M step alone, written to memory that is already allocated.

    Args:
        layers: numbers of inputs and outputs of every layer.
        b: rows.
        T: local iterations.
        device: `cpu` or `cuda`.
    """

    def __init__(self, layers: Layers, b: int, T: int, device: str = "cpu") -> None:
        numbers = torch.Generator().manual_seed(0)

        def drawn(rows: int, columns: int) -> Tensor:
            """Return random numbers whose repeated products neither overflow nor become denormal."""
            return (torch.randn(rows, columns, generator=numbers) / columns**0.5).to(device)

        widths = [layers[0][0], *(d for _, d in layers)]
        self.T = T
        self.weights = [drawn(d, n) for n, d in layers]
        self.inputs = [drawn(b, width) for width in widths]
        self.gradients = [drawn(b, width) for width in widths]
        self.weight_gradients = [torch.empty_like(weight) for weight in self.weights]
        self.pre_activations = [torch.empty(b, d, device=device) for _, d in layers]

    def __call__(self) -> None:
        """Compute all products in the order of a LocoProp step: forward, backward, local iterations."""
        for index, weight in enumerate(self.weights):
            torch.mm(self.inputs[index], weight.mT, out=self.inputs[index + 1])
        for index, weight in reversed(list(enumerate(self.weights))):
            self._weight_gradient(self.gradients[index + 1], index)
            if index > 0:
                torch.mm(self.gradients[index + 1], weight, out=self.gradients[index])
        with side_streams() as side:
            for index in range(len(self.weights)):
                with side(None):
                    self._local(index)

    def _local(self, index: int) -> None:
        x, weight, a = self.inputs[index], self.weights[index], self.pre_activations[index]
        for _ in range(self.T - 1):
            torch.mm(x, weight.mT, out=a)
            self._weight_gradient(a, index)

    def _weight_gradient(self, delta: Tensor, index: int) -> None:
        torch.mm(delta.mT, self.inputs[index], out=self.weight_gradients[index])
