"""Few local iterations of LocoProp-M: gradients divided by the curvature that all outputs share.

An iteration moves along ``−diag(h)⁻¹ ∇D (C + λI)⁻¹``, where D is the layer's own local loss, not a
quadratic model of it, h the mean slope of the transfer over the rows of each output, and
``C = [X 1]ᵀ[X 1]``. Nesterov's momentum carries over from one iteration to the next. A check, for each
output by itself, finds how far along the step the loss falls, and restarts the momentum where that is
less than the full step. The formulas, and the proof that the loss never rises, are in
``paper/preconditioning.py``.

Pre-activations change linearly with the weights. So an iteration has two products with the inputs, one
for the gradient and one for the change of the pre-activations, and the check has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from torch_locoprop.paper.gram import FULL, RowUse, Structure, full_products
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import LocalLoss
from torch_locoprop.paper.preconditioning import (
    Fraction,
    descending_fraction,
    mean_slopes,
    preconditioned,
    regularized_inverse,
)
from torch_locoprop.paper.tensors import (
    Inverse,
    Product,
    Tensors,
    at_least_float32,
    join,
    split,
    spread,
)
from torch_locoprop.solvers.base import Numbers, Solver, States

SLOPES = ("mean", "bound")
FLOOR = 0.4  # the smallest slope of an output, relative to the transfer's largest
OF_BOUND = 0.5  # the slope of softmax, relative to its bound
ROUNDING = 8  # rounding error of a slope, in units of the last place of its larger term
CHECKS = 3  # lengths of a step that each iteration tries
WITHOUT_ROWS = 0.01  # step of a layer without rows, relative to the norm of its tensors, at lr = 1


@dataclass(frozen=True)
class Preconditioned(Solver):
    """Take preconditioned steps that never raise the local loss, as ``solver="preconditioned"``.

    Three or four iterations come closer to the solution of a LocoProp-M problem than ten of RMSProp.
    This solver serves all variants with a convex local loss: LocoProp-S and -M, natural LocoProp-S
    and ProxProp.

    The learning rate is the part of the way from the weights to the local solution that a step takes:
    1 takes all of it, and schedules lower it from there. How far away the solution is depends on
    ``gamma`` alone. ``momentum``, ``decay``, ``eps`` and ``local_decay`` have no effect. Without a
    regularizer, the local loss never rises, up to rounding.

    Args:
        damping: λ relative to the mean diagonal of C. λ is a number of the preconditioner, not of
            the problem: a larger λ makes iterations slower along inputs that vary little.
        slope: ``"mean"`` divides by the mean slope of the transfer over the rows. ``"bound"`` divides
            by its largest slope, with which every full step without momentum provably lowers the loss.
            It needs a transfer whose slope is bounded.
    """

    damping: float = 1e-2
    slope: str = "mean"
    name = "preconditioned"
    stateless = True
    defaults = MappingProxyType(
        {"lr": 1.0, "gamma": 0.05, "local_steps": 3, "local_reduction": "mean"}
    )
    ignores = frozenset({"momentum", "decay", "eps", "local_decay"})

    def __post_init__(self) -> None:
        if not self.damping > 0:
            raise ValueError(f"Invalid damping={self.damping}. Must be > 0.")
        if self.slope not in SLOPES:
            raise ValueError(f"Invalid slope={self.slope!r}. Must be one of {', '.join(SLOPES)}.")

    def solve(
        self,
        problem: LocalProblem,
        states: States,
        numbers: dict[str, Numbers],
        local_steps: int,
        local_decay: str,
    ) -> tuple[Tensors, States]:
        return self.solved(problem, numbers, local_steps), states

    def solved(
        self,
        problem: LocalProblem,
        numbers: dict[str, Numbers],
        local_steps: int,
        product: Product = torch.matmul,
        inverse_of: Inverse = torch.cholesky_inverse,
    ) -> Tensors:
        """Return the new tensors.

        Args:
            problem: the layer's local problem.
            numbers: learning rate and other numbers of each trained tensor.
            local_steps: number of local iterations.
            product: computes the products with the inverse.
            inverse_of: computes the inverse from a Cholesky factor.
        """
        inverse = self.inverse(self.square(problem), inverse_of)
        displacement = self.displacement(problem, inverse, local_steps, product)
        new: Tensors = {}
        for name, moved in split(displacement, problem.start).items():
            start = problem.start[name]
            new[name] = start + (spread(numbers[name].lr, moved) * moved).to(start.dtype)
        return new

    def inverse(self, square: Tensor, inverse_of: Inverse = torch.cholesky_inverse) -> Tensor:
        """Return ``(C + λI)⁻¹`` of C, ``[..., n, n]``."""
        with full_products(square):
            return regularized_inverse(square, self.damping, inverse_of)

    def displacement(
        self,
        problem: LocalProblem,
        inverse: Tensor,
        local_steps: int,
        product: Product = torch.matmul,
    ) -> Tensor:
        """Return how far local iterations go from the weights: ``[..., d, n]`` of ``[W b]``.

        Args:
            problem: the layer's local problem.
            inverse: ``(C + λI)⁻¹``, ``[..., n, n]``.
            local_steps: number of local iterations.
            product: computes the products with the inverse.
        """
        iterate = _Iterate(problem, self._slopes(problem), product)
        for t in range(local_steps):
            iterate.advance(inverse, last=t + 1 == local_steps)
        return iterate.moved

    @staticmethod
    def square(problem: LocalProblem) -> Tensor:
        """Return C of all rows of a problem, with all digits of float32 or wider."""
        like = at_least_float32(join(problem.start))
        with full_products(like):
            return problem.square(like.dtype)

    def _slopes(self, problem: LocalProblem) -> Tensor | float:
        """Return the slope h by which each output's gradient is divided: ``[..., d]`` or a number."""
        if self.slope == "mean":
            return slopes(problem)
        most = problem.loss.max_slope(problem.transfer)
        if most == torch.inf:
            raise ValueError(
                f'Preconditioned(slope="bound") needs a transfer whose slope is bounded; that of '
                f'{problem.transfer!r} is not, or its max_slope is not given. Use slope="mean".'
            )
        return most

    def serves(self, loss: LocalLoss) -> bool:
        return loss.convex

    def without_rows(self) -> Solver:
        return _WithoutRows()

    def is_fixed_work(self, number: int, weight: Tensor, bent: bool) -> bool:
        return True


def slopes(problem: LocalProblem) -> Tensor | float:
    """Return the mean slope h of each output over the rows: ``[..., d]``, or one number for all."""
    loss, transfer = problem.loss, problem.transfer
    most = loss.max_slope(transfer)
    if _is_coupled(problem):
        return OF_BOUND * (most if most < torch.inf else 1.0)
    mean = loss.curvature(at_least_float32(problem.a0), transfer)
    return 1.0 if mean is None else mean_slopes(problem.averaged(mean), most, FLOOR)


class _Iterate:
    """The displacement after the iterations so far, and the pre-activations of all rows there.

    Half precision is computed in float32, except for the products with the inputs.
    """

    def __init__(self, problem: LocalProblem, h: Tensor | float, product: Product) -> None:
        self._problem, self._h, self._product = problem, h, product
        first = join(problem.first_gradient)
        self.dtype = first.dtype  # dtype of the layer's tensors
        self._first = at_least_float32(first)
        self._a0 = at_least_float32(problem.a0)
        self._target = problem.target_rows.to(self._a0.dtype)
        # A target relative to the start has no residual there, except for its rounding.
        is_zero = problem.delta0 is None and self._a0.dtype == problem.a0.dtype
        self._residual0 = None if is_zero else self._residual_at(self._a0)
        self._is_one = _is_coupled(problem)
        self.moved = torch.zeros_like(self._first)
        self._change = torch.zeros_like(self._a0)  # change of the pre-activations since the start
        self._residual = torch.zeros_like(self._a0)  # change of the residual since the start
        self._velocity: tuple[Tensor, Tensor] | None = None  # velocities of displacement and rows
        *leading, d, _ = self._first.shape
        outputs = (*leading, min(d, 1) if self._is_one else d)
        self._count = self._scale = self._first.new_ones(outputs)
        self._momentum = self._first.new_zeros(outputs)

    def advance(self, inverse: Tensor, *, last: bool) -> None:
        """Take one iteration.

        Args:
            inverse: ``(C + λI)⁻¹``, ``[..., n, n]``.
            last: True if no other iteration follows.
        """
        gradient = self._gradient_ahead()
        with full_products(gradient):  # small eigenvalues of C need all digits of float32
            found = preconditioned(gradient, inverse, self._h, self._product)
        step = -self._scale.unsqueeze(-1) * found
        rows = self._problem.row_change(split(step.to(self.dtype), self._problem.start))
        rows = rows.to(self._a0.dtype)
        if self._velocity is not None:
            step, rows = self._velocity[0] + step, self._velocity[1] + rows
        part = self._descending(step, rows)
        self.moved = self.moved + part.t.unsqueeze(-1) * step
        self._change = self._change + part.t.unsqueeze(-2) * rows
        self._residual = part.residual
        if last:
            return
        goes_on = part.t >= 1  # the step was not too long; momentum takes it at its own length
        count = 0.5 + (0.25 + self._count.square()).sqrt()
        momentum = torch.where(goes_on, (self._count - 1) / count, 0.0)
        self._count = torch.where(goes_on, count, 1.0)
        # A step that was too long without any momentum is too long in the next iteration as well.
        self._scale = self._scale * torch.where(
            (part.t > 0) | (self._momentum > 0), 1.0, part.untried
        )
        self._momentum = momentum
        self._velocity = momentum.unsqueeze(-1) * step, momentum.unsqueeze(-2) * rows

    def _gradient_ahead(self) -> Tensor:
        """Return the gradient of the local loss at the displacement plus its momentum (Nesterov)."""
        if self._velocity is None:
            return self._first
        residual = self._residual_change(self._change + self._velocity[1])
        return join(self._problem.gradient_after(residual.to(self.dtype))).to(self._first.dtype)

    def _descending(self, step: Tensor, rows: Tensor) -> Fraction:
        """Return how far along a step the local loss falls, for each output."""

        def slope(t: Tensor) -> tuple[Tensor, Tensor]:
            residual = self._residual_change(self._change + t.unsqueeze(-2) * rows)
            return self._slope(step, rows, residual), residual

        at_zero = self._slope(step, rows, self._residual), self._residual
        return descending_fraction(slope, at_zero, CHECKS)

    def _slope(self, step: Tensor, rows: Tensor, residual: Tensor) -> Tensor:
        """Return the slope of the local loss along a step, where the residuals have changed so far.

        The slope includes a margin for the rounding of its two terms, which cancel at the minimum.
        """
        at_start = (self._first * step).sum(-1)
        since = self._problem.sum_of_rows(residual * rows)
        if self._is_one:
            at_start, since = at_start.sum(-1, keepdim=True), since.sum(-1, keepdim=True)
        return at_start + since + ROUNDING * torch.finfo(at_start.dtype).eps * at_start.abs()

    def _residual_change(self, change: Tensor) -> Tensor:
        residual = self._residual_at(self._a0 + change)
        return residual if self._residual0 is None else residual - self._residual0

    def _residual_at(self, a: Tensor) -> Tensor:
        return self._problem.loss.residual(a, self._target, self._problem.transfer)


def _is_coupled(problem: LocalProblem) -> bool:
    """Return True if softmax couples the outputs; otherwise each output is a problem of its own."""
    return problem.loss.uses_transfer and not problem.transfer.elementwise


class _WithoutRows(Solver):
    """The step of a layer whose rows are not known: along the gradient, by 1 % of the layer's norm.

    Without rows it is not known how long a step along the gradient may be.
    """

    name = "preconditioned"
    stateless = True

    def solve(
        self,
        problem: LocalProblem,
        states: States,
        numbers: dict[str, Numbers],
        local_steps: int,
        local_decay: str,
    ) -> tuple[Tensors, States]:
        new: Tensors = {}
        for name, tensor in problem.start.items():
            gradient = at_least_float32(problem.first_gradient[name])
            present = at_least_float32((problem.base or problem.start)[name])
            length = problem.norm([gradient]).clamp_min(torch.finfo(gradient.dtype).tiny)
            scale = WITHOUT_ROWS * problem.norm([present]) / length
            step = spread(numbers[name].lr, gradient) * scale * gradient
            new[name] = tensor - step.to(tensor.dtype)
        return new, states

    def use_of_rows(
        self,
        local_steps: int,
        number: int,
        state: Tensors,
        columns: int,
        *,
        structure: Structure = FULL,
    ) -> RowUse | None:
        return RowUse()
