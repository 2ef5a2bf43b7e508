"""First-order solvers with TensorFlow's semantics, which differ from ``torch.optim``'s.

Each step takes a gradient and a state and returns what to subtract from the tensor and the new
state, changing nothing in place; leading dimensions are free. That is the specification. RMSProp, the
solver of the paper's results, also has a faster way to the same numbers in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_locoprop.fast.cpu_onednn import Joined, fits
from torch_locoprop.fast.triton import local_iterations, rmsprop
from torch_locoprop.paper.gram import Use
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Number, Tensors
from torch_locoprop.solvers.base import Numbers, Solver, local_rate


class FirstOrder(Solver):
    """T iterations ``W ← W − step(∇D(W))``; subclass and give ``init`` and ``step``."""

    def init(self, tensor: Tensor, numbers: Numbers) -> Tensors:
        """The state before the first step."""
        return {}

    def step(self, gradient: Tensor, state: Tensors, numbers: Numbers) -> tuple[Tensor, Tensors]:
        """Return what to subtract, and the new state."""
        raise NotImplementedError

    def advance_(
        self, tensor: Tensor, gradient: Tensor, state: Tensors, numbers: Numbers, rate: float
    ) -> None:
        """Move tensor and state, which are copies, by a step at ``rate`` times the learning rate."""
        change, new = self.step(gradient, state, numbers.at(rate, tensor))
        tensor.sub_(change)
        state.update(new)

    def solve(
        self,
        problem: LocalProblem,
        states: dict[str, Tensors],
        numbers: dict[str, Numbers],
        local_steps: int,
        local_decay: str,
    ) -> tuple[Tensors, dict[str, Tensors]]:
        regularizer = problem.regularizer
        gram = problem.through_gram(local_steps)
        ours = type(self).advance_ in (FirstOrder.advance_, RmsProp.advance_)
        joint = Joined(problem, gram) if local_steps > 1 and ours and fits(problem) else None
        at = {k: t.clone() for k, t in problem.start.items()} if joint is None else joint.at
        states = {
            name: {key: entry.clone() for key, entry in states[name].items()}
            or self.init(tensor, numbers[name].at(1.0, tensor))
            for name, tensor in problem.start.items()
        }
        for t in range(local_steps):
            if t == 0:
                direction = problem.first_gradient
            else:
                direction = problem.gradient(at, gram) if joint is None else joint.gradient()
            if regularizer.has_direction:
                direction = regularizer.direction(
                    direction, problem.displacement(at), problem.eta, problem.metric
                )
            rate = local_rate(t, local_steps, local_decay)
            for name in at:
                self.advance_(at[name], direction[name], states[name], numbers[name], rate)
                if regularizer.has_prox:
                    start, eta = problem.start[name], numbers[name].at(rate, at[name]).lr
                    at[name] = start + regularizer.prox(at[name] - start, eta)
        return at if joint is None else joint.found(), states

    def use_of_rows(
        self, local_steps: int, number: int, state: Tensors, columns: int
    ) -> Use | None:
        ours = type(self).solve in (FirstOrder.solve, RmsProp.solve)
        return Use(gradients=local_steps - 1) if ours else None

    def is_fixed_work(self, number: int, weight: Tensor, bent: bool) -> bool:
        return True


class Sgd(FirstOrder):
    """``w ← w − η g``, the local iteration of Algorithms 1 to 4."""

    name = "sgd"

    def step(self, gradient: Tensor, state: Tensors, numbers: Numbers) -> tuple[Tensor, Tensors]:
        return numbers.lr * gradient, state


class Momentum(FirstOrder):
    """``m ← μ m + g``, ``w ← w − η m``."""

    name = "momentum"

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

    def solve(
        self,
        problem: LocalProblem,
        states: dict[str, Tensors],
        numbers: dict[str, Numbers],
        local_steps: int,
        local_decay: str,
    ) -> tuple[Tensors, dict[str, Tensors]]:
        if not self._is_plain or not local_iterations.fits(problem, states, numbers):
            return super().solve(problem, states, numbers, local_steps, local_decay)
        states = {
            name: states[name] or self.init(tensor, numbers[name].at(1.0, tensor))
            for name, tensor in problem.start.items()
        }
        return local_iterations.solve(problem, states, numbers, local_steps, local_decay)

    def advance_(
        self, tensor: Tensor, gradient: Tensor, state: Tensors, numbers: Numbers, rate: float
    ) -> None:
        v, m = state["square"], state["momentum"]
        own = rmsprop.numbers_of(numbers)
        if not self._is_plain:
            super().advance_(tensor, gradient, state, numbers, rate)
        elif rmsprop.fits([tensor, gradient, v, m], own):
            moving = rmsprop.Moving(tensor, v, m)
            rmsprop.step(moving, moving, gradient, numbers, rate)
        elif any(isinstance(number, Tensor) for number in own):
            super().advance_(tensor, gradient, state, numbers, rate)
        else:
            eta, mu, rho, eps = map(float, own)
            v.mul_(rho).addcmul_(gradient, gradient, value=1 - rho)
            m.mul_(mu).addcmul_(gradient, (v + eps).rsqrt_(), value=eta * rate)
            tensor.sub_(m)

    @property
    def _is_plain(self) -> bool:
        """Whether this is no subclass with a rule of its own."""
        return type(self).step is RmsProp.step


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
        rate = numbers.lr * (1 - numbers.decay**t) ** 0.5 / (1 - numbers.momentum**t)
        change = torch.as_tensor(rate).to(m) * m / (v.sqrt() + numbers.eps)
        return change, {"step": t, "square": v, "momentum": m}


def average(old: Tensor, new: Tensor, decay: Number) -> Tensor:
    """``decay · old + (1 − decay) · new``."""
    return torch.lerp(new, old, decay)


def _count_dtype(tensor: Tensor) -> torch.dtype:
    """Wide enough for ``1 − β₂ᵗ``; Apple's GPUs have no float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
