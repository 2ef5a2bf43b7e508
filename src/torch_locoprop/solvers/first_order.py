"""First-order solvers with TensorFlow's semantics, which differ from ``torch.optim``'s.

This is the specification: each ``step`` takes a gradient and a state and returns what to subtract
from the tensor and the new state, changing nothing in place; leading dimensions are free. Faster
ways to the same numbers live in ``fast/`` and are chosen by ``fast/dispatch.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_locoprop.paper.gram import FULL, RowProducts, RowUse, Structure
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Number, Tensors
from torch_locoprop.solvers.base import Numbers, Solver, States

LOCAL_DECAYS = ("linear", "constant")

Advance = Callable[[Tensor, Tensor, Tensors, Numbers, float], None]


class Iterate:
    """The tensors that the local iterations move, and the gradient of the local loss there."""

    def __init__(self, problem: LocalProblem, gram: RowProducts | None) -> None:
        self.problem, self._gram = problem, gram
        self.at = {name: tensor.clone() for name, tensor in problem.start.items()}

    def gradient(self) -> Tensors:
        """Return the gradient of the local loss, without the regularizer, at the present iterate."""
        return self.problem.gradient(self.at, self._gram)

    def found(self) -> Tensors:
        """Return the tensors after the iterations so far."""
        return self.at


class FirstOrder(Solver):
    """T iterations ``W ← W − step(∇D(W))``. Subclass it and define ``step``, and ``init`` if needed."""

    row_state = frozenset({"momentum", "square"})
    warns_of_ignored = False

    def init(self, tensor: Tensor, numbers: Numbers) -> Tensors:
        """Return the state before the first step.

        Args:
            tensor: the tensor that the solver will move, ``[..., d, n]`` or ``[..., d]``.
            numbers: the tensor's learning rate and other numbers.
        """
        return {}

    def step(self, gradient: Tensor, state: Tensors, numbers: Numbers) -> tuple[Tensor, Tensors]:
        """Return what to subtract from the tensor, and the new state.

        Args:
            gradient: the gradient of the local loss, in the shape of the tensor.
            state: the state before this iteration, which is not changed.
            numbers: the learning rate of this iteration, and the other numbers.
        """
        raise NotImplementedError

    def advance_(
        self, tensor: Tensor, gradient: Tensor, state: Tensors, numbers: Numbers, rate: float
    ) -> None:
        """Move a tensor and its state in place by one :meth:`step`.

        Args:
            tensor: the tensor.
            gradient: the gradient of the local loss, in the shape of the tensor.
            state: the tensor's state.
            numbers: the tensor's learning rate and other numbers.
            rate: factor of the learning rate in this iteration.
        """
        change, new = self.step(gradient, state, numbers.at(rate, tensor))
        tensor.sub_(change)
        state.update(new)

    def solve(
        self,
        problem: LocalProblem,
        states: States,
        numbers: dict[str, Numbers],
        local_steps: int,
        local_decay: str,
    ) -> tuple[Tensors, States]:
        iterate = Iterate(problem, problem.through_gram(local_steps))
        return self.iterate(iterate, states, numbers, local_steps, local_decay, self.advance_)

    def empty_states(self, start: Tensors, bent: bool, *, structure: Structure = FULL) -> States:
        return {name: self.init(tensor, Numbers(0.0)) for name, tensor in start.items()}

    def without_rows(self) -> Solver:
        return self

    def iterate(
        self,
        iterate: Iterate,
        states: States,
        numbers: dict[str, Numbers],
        local_steps: int,
        local_decay: str,
        advance_: Advance,
    ) -> tuple[Tensors, States]:
        """Run the T iterations of Algorithms 1 to 4 and return the new tensors and states.

        Args:
            iterate: where the iterations start, and their gradients.
            states: the state of each trained tensor, ``{}`` at first; copied.
            numbers: learning rate and other numbers of each trained tensor.
            local_steps: number of iterations T.
            local_decay: schedule of the learning rate over them.
            advance_: moves one tensor and its state in place, as :meth:`advance_` does.
        """
        problem, at, regularizer = iterate.problem, iterate.at, iterate.problem.regularizer
        states = {
            name: {key: entry.clone() for key, entry in states[name].items()}
            or self.init(tensor, numbers[name].at(1.0, tensor))
            for name, tensor in problem.start.items()
        }
        for t in range(local_steps):
            direction = problem.first_gradient if t == 0 else iterate.gradient()
            if regularizer.has_direction:
                direction = regularizer.direction(
                    direction, problem.displacement(at), problem.eta, problem.metric
                )
            rate = local_rate(t, local_steps, local_decay)
            for name in at:
                advance_(at[name], direction[name], states[name], numbers[name], rate)
                if regularizer.has_prox:
                    start, eta = problem.start[name], numbers[name].at(rate, at[name]).lr
                    at[name] = start + regularizer.prox(at[name] - start, eta)
        return iterate.found(), states

    def use_of_rows(
        self,
        local_steps: int,
        number: int,
        state: Tensors,
        columns: int,
        *,
        structure: Structure = FULL,
    ) -> RowUse | None:
        ours = type(self).solve is FirstOrder.solve
        return RowUse(gradients=local_steps - 1) if ours else None

    def is_fixed_work(self, number: int, weight: Tensor, bent: bool) -> bool:
        return True


class Sgd(FirstOrder):
    """``w ← w − η g``, the local iteration of Algorithms 1 to 4."""

    name = "sgd"
    stateless = True
    ignores = frozenset({"momentum", "decay", "eps"})

    def step(self, gradient: Tensor, state: Tensors, numbers: Numbers) -> tuple[Tensor, Tensors]:
        return numbers.lr * gradient, state


class Momentum(FirstOrder):
    """``m ← μ m + g``, ``w ← w − η m``."""

    name = "momentum"
    ignores = frozenset({"decay", "eps"})

    def init(self, tensor: Tensor, numbers: Numbers) -> Tensors:
        return {"momentum": torch.zeros_like(tensor)}

    def step(self, gradient: Tensor, state: Tensors, numbers: Numbers) -> tuple[Tensor, Tensors]:
        m = numbers.momentum * state["momentum"] + gradient
        return numbers.lr * m, {"momentum": m}


class Nesterov(Momentum):
    """``m ← μ m + g``, ``w ← w − η (g + μ m)``."""

    name = "nesterov"

    def step(self, gradient: Tensor, state: Tensors, numbers: Numbers) -> tuple[Tensor, Tensors]:
        m = numbers.momentum * state["momentum"] + gradient
        return numbers.lr * (gradient + numbers.momentum * m), {"momentum": m}


class Adagrad(FirstOrder):
    """``v ← v + g²`` from v₀ = ε, ``w ← w − η g / √v``."""

    name = "adagrad"
    ignores = frozenset({"momentum", "decay"})

    def init(self, tensor: Tensor, numbers: Numbers) -> Tensors:
        return {"square": torch.zeros_like(tensor) + numbers.eps}

    def step(self, gradient: Tensor, state: Tensors, numbers: Numbers) -> tuple[Tensor, Tensors]:
        v = state["square"] + gradient.square()
        return numbers.lr * gradient / v.sqrt(), {"square": v}


class RmsProp(FirstOrder):
    """``v ← ρ v + (1−ρ) g²`` from v₀ = 1, ``m ← μ m + η g / √(v + ε)``, ``w ← w − m``."""

    name = "rmsprop"

    def init(self, tensor: Tensor, numbers: Numbers) -> Tensors:
        return {"square": torch.ones_like(tensor), "momentum": torch.zeros_like(tensor)}

    def step(self, gradient: Tensor, state: Tensors, numbers: Numbers) -> tuple[Tensor, Tensors]:
        v = average(state["square"], gradient.square(), numbers.decay)
        m = numbers.momentum * state["momentum"] + numbers.lr * gradient * (v + numbers.eps).rsqrt()
        return m, {"square": v, "momentum": m}


class Adam(FirstOrder):
    """``w ← w − η √(1−β₂ᵗ)/(1−β₁ᵗ) · m / (√v + ε)``; t counts local iterations over all steps."""

    name = "adam"

    def init(self, tensor: Tensor, numbers: Numbers) -> Tensors:
        return {
            "step": torch.zeros((), dtype=_count_dtype(tensor), device=tensor.device),
            "square": torch.zeros_like(tensor),
            "momentum": torch.zeros_like(tensor),
        }

    def step(self, gradient: Tensor, state: Tensors, numbers: Numbers) -> tuple[Tensor, Tensors]:
        t = state["step"] + 1
        m = average(state["momentum"], gradient, numbers.momentum)
        v = average(state["square"], gradient.square(), numbers.decay)
        rate: Tensor = numbers.lr * (1 - numbers.decay**t) ** 0.5 / (1 - numbers.momentum**t)
        change = rate.to(m) * m / (v.sqrt() + numbers.eps)
        return change, {"step": t, "square": v, "momentum": m}


def local_rate(t: int, local_steps: int, local_decay: str) -> float:
    """Return the factor of the learning rate in a local iteration.

    Args:
        t: the iteration, from 0.
        local_steps: number of iterations T.
        local_decay: ``"linear"`` gives ``max(1 − t/T, 1/4)``, ``"constant"`` gives 1.
    """
    return max(1 - t / local_steps, 0.25) if local_decay == "linear" else 1.0


def average(old: Tensor, new: Tensor, decay: Number) -> Tensor:
    """Return ``decay · old + (1 − decay) · new``."""
    return torch.lerp(new, old, decay)


def _count_dtype(tensor: Tensor) -> torch.dtype:
    """Return a dtype that is precise enough for ``1 − β₂ᵗ``; Apple's GPUs have no float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
