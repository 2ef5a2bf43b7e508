"""A simple implementation of LocoProp-M: autograd, and one optimizer of torch.optim for each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_locoprop.study.models.autoencoder import reconstruction_loss

MakeSolver = Callable[[list[nn.Parameter]], Optimizer]


class Stage(NamedTuple):
    """A linear layer, the module that follows it in the model, and the transfer of its local loss."""

    linear: nn.Linear
    then: nn.Module
    local: nn.Module


def stages(model: nn.Sequential) -> list[Stage]:
    """Return the layers of an autoencoder of the study.

    The code layer is linear. The output layer has a sigmoid in its local loss and none in the model.
    """
    found: list[Stage] = []
    for half in model:
        modules = [*half, nn.Identity()]
        found += [Stage(*modules[at : at + 2], modules[at + 1]) for at in range(0, len(modules), 2)]
    return [*found[:-1], found[-1]._replace(local=nn.Sigmoid())]


class PerLayerLoop:
    """LocoProp-M in a loop over layers; a training step is `backprop()`, then `update()`.

    Args:
        model: an autoencoder of the study.
        images: the batch of every step.
        make_solver: makes the optimizer of one layer's local problem.
        gamma: γ of the target `y* = f(a) − γ ∂L/∂a`.
        local_steps: local iterations T.
    """

    def __init__(
        self,
        model: nn.Sequential,
        images: Tensor,
        make_solver: MakeSolver,
        gamma: float = 10.0,
        local_steps: int = 10,
    ) -> None:
        self.stages, self.images = stages(model), images
        self.gamma, self.local_steps = gamma, local_steps
        self.solvers = [make_solver(list(stage.linear.parameters())) for stage in self.stages]
        self.rates = [solver.param_groups[0]["lr"] for solver in self.solvers]
        self.inputs: list[Tensor] = []
        self.pre_activations: list[Tensor] = []

    def backprop(self) -> None:
        """Run forward and backward; keep inputs, pre-activations a, and the gradients ∂L/∂a."""
        self.inputs, self.pre_activations = [], []
        y = self.images
        for stage in self.stages:
            self.inputs.append(y.detach())
            a = stage.linear(y)
            a.retain_grad()
            self.pre_activations.append(a)
            y = stage.then(a)
        reconstruction_loss(y, self.images).backward()

    def update(self) -> None:
        """Run the local iterations of every layer."""
        for index, stage in enumerate(self.stages):
            solver, x, before = self.solvers[index], self.inputs[index], self.pre_activations[index]
            with torch.no_grad():
                target = stage.local(before) - self.gamma * before.grad
            for t in range(self.local_steps):
                rate = max(1 - t / self.local_steps, 0.25)
                solver.param_groups[0]["lr"] = self.rates[index] * rate
                solver.zero_grad()
                a = stage.linear(x)
                # The gradient of the matching loss with respect to a.
                a.backward(stage.local(a.detach()) - target)
                solver.step()
