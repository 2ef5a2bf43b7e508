"""The paper's first-order methods with TensorFlow's semantics, as ordinary optimizers.

They differ from ``torch.optim``'s in where ε and the learning rate stand and in how states begin; the
formulas are those of :mod:`torch_locoprop.solvers.first_order`, applied to the gradient of the loss.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from torch_locoprop.baselines.base import PerTensor
from torch_locoprop.config.groups import Group
from torch_locoprop.solvers import FirstOrder, Numbers, first_order


class _Plain(PerTensor):
    """One step of a first-order solver on the gradient of the loss."""

    solver: ClassVar[FirstOrder]
    capturable = True

    def move(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        """Move one tensor and its state in place, so that a captured step goes on from there."""
        numbers = Numbers(
            **{name: group[name] for name in ("lr", "momentum", "decay", "eps") if name in group}
        )
        state = self.state[parameter]
        if not state:
            state.update(self.solver.init(parameter, numbers))
        parameter.copy_(self.shrunk(parameter, group))
        new = dict(state)
        self.solver.advance_(parameter, gradient, new, numbers, 1.0)
        for name, entry in new.items():
            if entry is not state[name]:
                state[name].copy_(entry)


class SGD(_Plain):
    """``w ← w − η g``."""

    solver = first_order.Sgd()

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,  # η
        *,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


class Momentum(_Plain):
    """``m ← μ m + g``, ``w ← w − η m``."""

    solver: ClassVar[FirstOrder] = first_order.Momentum()

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
    """``m ← μ m + g``, ``w ← w − η (g + μ m)``."""

    solver = first_order.Nesterov()


class Adagrad(_Plain):
    """``v ← v + g²`` from v₀ = ``eps``, ``w ← w − η g / √v``."""

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
    """``v ← ρ v + (1−ρ) g²`` from v₀ = 1, ``m ← μ m + η g / √(v + ε)``, ``w ← w − m``.

    The learning rate is inside the momentum: at a rate of zero the weights keep moving for a while.
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
    """``w ← w − η √(1−β₂ᵗ)/(1−β₁ᵗ) · m / (√v + ε)``."""

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
