"""Shared parts of the baselines: checks of settings, and optimizers that move one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from torch_locoprop.config.groups import Group
from torch_locoprop.config.setting_kinds import check_number
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.stepping.build_problem import decayed

_BELOW = {  # upper bounds of settings, not included; the lower bound is 0
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
    """Check the settings of a parameter group.

    Args:
        group: settings by name; names that no baseline has are not checked.
        positive: names of settings that must be greater than zero.

    Raises:
        ValueError: a number is out of range, or ``every`` or ``max_size`` is not a positive integer.
    """
    for name, high in _BELOW.items():
        if name in group:
            check_number(name, group[name], 0.0, name not in positive, high)
    for name in _COUNTS:
        value = group.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Invalid {name}={value!r}. Must be an integer >= 1.")


class PerTensor(torch.optim.Optimizer):
    """Base class of optimizers that compute the step of a tensor from its own gradient alone.

    Subclasses implement :meth:`change`, or override :meth:`move`. Weight decay is decoupled: tensors
    of two or more dimensions are multiplied by ``1 − lr · weight_decay`` before the step. Biases do
    not decay.
    """

    positive: ClassVar[tuple[str, ...]] = ()  # settings that must be greater than zero
    takes_sparse: ClassVar[bool] = False  # True if gradients may be sparse tensors
    capturable: ClassVar[bool] = False  # True if a CUDA graph can replay all steps but the first

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def change(self, gradient: Tensor, state: Tensors, group: Group) -> tuple[Tensor, Tensors]:
        """Compute the step of one tensor.

        Args:
            gradient: the gradient of the loss, of any shape.
            state: the tensor's state after the last step; empty before the first.
            group: the settings of the tensor's parameter group.

        Returns:
            The tensor to subtract from the parameter, in the gradient's shape, and the new state.
        """
        raise NotImplementedError

    def check(self, group: Group) -> None:
        """Raise ``ValueError`` if a setting of the group is invalid."""
        check_settings(group, self.positive)

    def add_param_group(self, param_group: Group) -> None:
        self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if any(parameter.is_complex() for parameter in self.param_groups[-1]["params"]):
            del self.param_groups[-1]
            raise ValueError(
                f"{type(self).__name__} has no formula for complex parameters. Give it real ones, such "
                "as torch.view_as_real makes."
            )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for every parameter that has a gradient.

        Args:
            closure: computes the gradients and returns the loss, as in ``torch.optim``.

        Returns:
            The loss that the closure returned, or None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.layout != torch.strided and not self.takes_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} does not support sparse gradients. Make the layer with "
                        "sparse=False, or give its parameters to torch.optim.SparseAdam."
                    )
                self.move(parameter, parameter.grad, group)
        return loss

    def move(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Update one parameter and its state."""
        change, self.state[parameter] = self.change(gradient, self.state[parameter], group)
        parameter.copy_(self.shrunk(parameter, group) - change)

    @staticmethod
    def shrunk(parameter: nn.Parameter, group: Group) -> Tensor:
        """Return the parameter after weight decay; the parameter itself if it does not decay."""
        return decayed("weight" if parameter.dim() >= 2 else "bias", parameter, group)
