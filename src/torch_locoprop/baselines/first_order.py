"""First-order optimizers with TensorFlow's formulas, as the paper uses them.

``torch.optim`` has methods of the same names that differ in where ε and the learning rate enter and in
the initial state. The formulas are those of :mod:`torch_locoprop.solvers.first_order`, applied to the
gradient g of the loss. All of them are used like an optimizer of ``torch.optim``::

    optimizer = baselines.RMSProp(model.parameters(), lr=1e-3, momentum=0.9)
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()

The argument ``params`` is what ``torch.optim`` takes: parameters, or parameter groups with settings of
their own. ``weight_decay`` is decoupled: weights are multiplied by ``1 − lr · weight_decay`` before the
step, biases are not.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from torch_locoprop.baselines.base import PerTensor
from torch_locoprop.config.groups import Group
from torch_locoprop.fast import dispatch
from torch_locoprop.solvers import FirstOrder, Numbers, first_order


class _Plain(PerTensor):
    """Base class: one iteration of a first-order solver with the gradient of the loss."""

    solver: ClassVar[FirstOrder]
    capturable = True

    def move(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Update one parameter and its state in place: a CUDA graph replays on the same memory."""
        numbers = Numbers(
            **{name: group[name] for name in ("lr", "momentum", "decay", "eps") if name in group}
        )
        state = self.state[parameter]
        if not state:
            state.update(self.solver.init(parameter, numbers))
        parameter.copy_(self.shrunk(parameter, group))
        new = dict(state)
        dispatch.advance_(self.solver, parameter, gradient, new, numbers, 1.0)
        for name, entry in new.items():
            if entry is not state[name]:
                state[name].copy_(entry)


class SGD(_Plain):
    """Gradient descent: ``w ← w − η g``.

    Args:
        params: parameters or parameter groups.
        lr: learning rate η.
        weight_decay: decoupled weight decay.
    """

    solver = first_order.Sgd()
    takes_sparse = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,  # η
        *,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


class Momentum(_Plain):
    """Heavy-ball momentum: ``m ← μ m + g``, ``w ← w − η m``.

    Args:
        params: parameters or parameter groups.
        lr: learning rate η.
        momentum: factor μ.
        weight_decay: decoupled weight decay.
    """

    solver: ClassVar[FirstOrder] = first_order.Momentum()
    takes_sparse = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,  # η
        *,
        momentum: float = 0.9,  # μ
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)


class Nesterov(Momentum):
    """Nesterov's momentum: ``m ← μ m + g``, ``w ← w − η (g + μ m)``.

    Args:
        params: parameters or parameter groups.
        lr: learning rate η.
        momentum: factor μ.
        weight_decay: decoupled weight decay.
    """

    solver = first_order.Nesterov()
    takes_sparse = False


class Adagrad(_Plain):
    """Adagrad: ``v ← v + g²``, ``w ← w − η g / √v``.

    Args:
        params: parameters or parameter groups.
        lr: learning rate η.
        eps: initial value v₀ of the accumulator; must be greater than zero.
        weight_decay: decoupled weight decay.
    """

    solver = first_order.Adagrad()
    positive = ("eps",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,  # η
        *,
        eps: float = 0.1,  # v₀
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay)


class RMSProp(_Plain):
    """RMSProp with momentum: ``v ← ρ v + (1−ρ) g²``, ``m ← μ m + η g / √(v + ε)``, ``w ← w − m``.

    The accumulator starts at v₀ = 1. The momentum m contains the learning rate, so weights keep moving
    for some steps after the learning rate has dropped to zero.

    Args:
        params: parameters or parameter groups.
        lr: learning rate η.
        momentum: factor μ.
        decay: factor ρ of the running average of squared gradients.
        eps: constant ε inside the square root.
        weight_decay: decoupled weight decay.
    """

    solver = first_order.RmsProp()

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,  # η
        *,
        momentum: float = 0.0,  # μ
        decay: float = 0.9,  # ρ
        eps: float = 1e-10,  # ε
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, lr=lr, momentum=momentum, decay=decay, eps=eps, weight_decay=weight_decay
        )


class Adam(_Plain):
    """Adam: ``w ← w − η √(1−β₂ᵗ)/(1−β₁ᵗ) · m / (√v + ε)`` in step t.

    m and v are running averages, from zero, of g with factor β₁ and of g² with factor β₂.

    Args:
        params: parameters or parameter groups.
        lr: learning rate η.
        momentum: factor β₁.
        decay: factor β₂.
        eps: constant ε.
        weight_decay: decoupled weight decay.
    """

    solver = first_order.Adam()

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,  # η
        *,
        momentum: float = 0.9,  # β₁
        decay: float = 0.999,  # β₂
        eps: float = 1e-8,  # ε
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, lr=lr, momentum=momentum, decay=decay, eps=eps, weight_decay=weight_decay
        )
