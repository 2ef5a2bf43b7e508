"""What the baselines share: the checks of their settings, and the step of one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from torch_locoprop.config.groups import Group, decayed
from torch_locoprop.config.settings import check_number
from torch_locoprop.paper.tensors import Tensors

_BELOW = {
    "lr": math.inf,
    "momentum": 1.0,
    "decay": 1.0,
    "eps": math.inf,
    "damping": math.inf,
    "clip": math.inf,
    "weight_decay": math.inf,
}
_COUNTS = ("every", "max_size")


def check_settings(group: Mapping[str, Any], positive: tuple[str, ...] = ()) -> None:
    """Raise unless the settings in a group are valid; those in ``positive`` may not be zero."""
    for name, high in _BELOW.items():
        if name in group:
            check_number(name, group[name], 0.0, name not in positive, high)
    for name in _COUNTS:
        value = group.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Invalid {name}={value!r}. Must be an integer >= 1.")


class PerTensor(torch.optim.Optimizer):
    """An optimizer in which each tensor moves by its own gradient; subclasses give ``change``.

    Weight decay is decoupled: tensors of two or more dimensions, so no biases, shrink by
    ``1 − lr · weight_decay`` before the step.
    """

    positive: ClassVar[tuple[str, ...]] = ()  # settings that may not be zero
    capturable: ClassVar[bool] = False  # a step, once taken, can be replayed as a CUDA graph

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def change(self, gradient: Tensor, state: Tensors, group: Group) -> tuple[Tensor, Tensors]:
        """Return what to subtract from the tensor, and its new state (``{}`` at first)."""
        raise NotImplementedError

    def check(self, group: Group) -> None:
        """Raise unless the settings of a group are valid."""
        check_settings(group, self.positive)

    def add_param_group(self, param_group: Group) -> None:
        self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)
        return loss

    def move(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Move one tensor and its state."""
        change, self.state[parameter] = self.change(gradient, self.state[parameter], group)
        parameter.copy_(self.shrunk(parameter, group) - change)

    @staticmethod
    def shrunk(parameter: nn.Parameter, group: Group) -> Tensor:
        """The tensor after weight decay; itself where there is none."""
        return decayed("weight" if parameter.dim() >= 2 else "bias", parameter, group)
