"""What the updates of all methods in ``matrix_updates.py`` share: their settings, states and order.

A step has three parts, so that a CUDA graph can repeat it (``recorded_steps.py``):

1. :meth:`Update.begin` writes the numbers that differ between steps into tensors;
2. :meth:`Update.advance` moves weights and states by operations that are the same in every step. They
   write in place: a CUDA graph knows addresses only. Factorisations are renewed through
   ``graphs.outside``, which divides the CUDA graph;
3. :meth:`Update.end` counts the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torch_locoprop.paper.tensors import Tensors


@dataclass(frozen=True)
class Passes:
    """One step's forward and backward pass, layer by layer."""

    inputs: list[Tensor]  # [K, rows, n]
    gradients: list[Tensors]  # gradients of the mean loss: weight [K, d, n], bias [K, d]
    sampled: Callable[[], list[Tensor]]
    """Returns the gradients of pre-activations ``[K, rows, d]`` for labels drawn for this step."""


class Update:
    """The settings and the optimizer states of all members; subclasses define `move`.

    Args:
        numbers: the settings that are numbers, ``[K]`` each, `weight_decay` included.
        every: the number of steps between factorisations.
        layers: the number of layers.
        early: the number of first steps with a factorisation, for methods with such a setting.

    Attributes:
        now: the numbers of the present step, ``[K]`` each. They keep their addresses.
        steps: the number of steps so far.
    """

    samples: ClassVar[bool] = False
    """True for methods that need gradients for labels drawn from the model's prediction."""

    def __init__(self, numbers: Tensors, every: int, layers: int, early: int = 0) -> None:
        self.numbers, self.every, self.early = numbers, every, early
        self.states: list[Tensors] = [{} for _ in range(layers)]
        self.now: Tensors = {}
        self.steps = 0

    def step(self, layers: list[Tensors], passes: Passes, rate: float) -> None:
        """Move all weights and biases at `rate` times each member's learning rate."""
        self.begin(rate)
        self.advance(layers, passes)
        self.end()

    def begin(self, rate: float) -> None:
        """Write the numbers of the next step into `now`."""
        lr = self.numbers["lr"] * rate
        put(self.now, lr=lr, kept=1 - lr * self.numbers["weight_decay"])

    def advance(self, layers: list[Tensors], passes: Passes) -> None:
        """Move all weights and biases by operations that a CUDA graph can repeat."""
        self.prepare(passes)
        for layer, state, gradients in zip(layers, self.states, passes.gradients, strict=True):
            self.move(layer, state, gradients)

    def end(self) -> None:
        """Count the step."""
        self.steps += 1

    def prepare(self, passes: Passes) -> None:
        """Update what `move` needs of all layers."""

    def move(self, layer: Tensors, state: Tensors, gradients: Tensors) -> None:
        """Move one layer's weight and bias, and its state."""
        raise NotImplementedError

    def keep(self, index: Tensor) -> None:
        """Continue with these members alone, in new tensors."""
        self.numbers = {name: number[index] for name, number in self.numbers.items()}
        self.states = [{name: t[index] for name, t in state.items()} for state in self.states]
        self.now = {}

    def shrink(self, weight: Tensor) -> None:
        """Apply the decoupled weight decay."""
        weight.mul_(along(self.now["kept"], weight))


def put(tensors: Tensors, **new: Tensor) -> None:
    """Write tensors in place over those of the same names; those without a name so far are stored."""
    for name, tensor in new.items():
        if name in tensors:
            tensors[name].copy_(tensor)
        else:
            tensors[name] = tensor


def from_zero(state: Tensors, name: str, like: Tensor) -> Tensor:
    """Return the tensor of this name in a state, which starts with zeros."""
    if name not in state:
        state[name] = torch.zeros_like(like)
    return state[name]


def from_first(state: Tensors, name: str, first: Tensor) -> Tensor:
    """Return the tensor of this name in a state, which starts with a copy of the first value."""
    if name not in state:
        state[name] = first.clone()
    return state[name]


def average(old: Tensor, new: Tensor, decay: Tensor) -> None:
    """Write ``decay · old + (1 − decay) · new`` over ``old``, with a decay for each member ``[K]``."""
    torch.lerp(new, old, along(decay, old), out=old)


def along(number: Tensor, like: Tensor) -> Tensor:
    """Reshape ``[K]`` numbers to multiply a tensor ``[K, ...]``."""
    return number.reshape(-1, *([1] * (like.dim() - 1)))
