"""The solver that takes the closed form of a local problem with the proximal term: no iterations.

The equations are in ``paper/closed_form.py``. C = XᵀX comes from the rows of one batch or a running
average, and may be factorized in every k-th step only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_locoprop.paper.closed_form import eigh, implicit_step, sylvester, sylvester_in_basis
from torch_locoprop.paper.fisher import (
    cholesky,
    cholesky_inverse,
    cholesky_solve,
    damped,
    is_well_posed,
    running_average,
)
from torch_locoprop.paper.gram import FULL, Gram, RowUse, Structure, full_products
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import LocalLoss
from torch_locoprop.paper.structured_gram import StructuredGram
from torch_locoprop.paper.tensors import (
    Number,
    Tensors,
    join,
    split,
    spread,
)
from torch_locoprop.solvers.base import Numbers, Solver, States


class Sums(NamedTuple):
    """The sums over the rows of all processes that a closed form needs."""

    gradient: Tensor  # gradient of [W b] at the start, [..., d, n]
    h: Tensor | None  # the mean Hessian H of F over the rows; None without a transfer in the loss
    gram: Tensor | None  # C of this batch or its running average; None: the rows are used
    renews: bool = True  # C is factorized in this step


@dataclass(frozen=True)
class Exact(Solver):
    """Solve the local problem in closed form (Eqs. 4, 10, 11 and 15), as ``solver="exact"``.

    Without arguments, each batch's own problem is solved, through the ``n × n`` system of the inputs or
    the ``rows × rows`` system, whichever is smaller.

    Args:
        decay: weight of the past in a running average of C over steps.
        every: number of steps between two factorizations of C. A factorization that is not finite is
            replaced at the next one.
        damping: if given, the proximal weight 1/η is replaced by λ, which is ``damping`` times the mean
            diagonal of C, and the learning rate scales the step: ``Δ = −lr γ G (C + λI)⁻¹``.
    """

    decay: float = 0.0
    every: int = 1
    damping: float | None = None
    name = "exact"
    closed_form = True
    joint_state = True
    joint_settings = ("lr",)
    ignores = frozenset({"momentum", "decay", "eps", "local_decay"})
    warns_of_ignored = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"Invalid decay={self.decay}. Must be in [0, 1).")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Invalid every={self.every}. Must be an integer >= 1.")
        if self.damping is not None and not self.damping > 0:
            raise ValueError(f"Invalid damping={self.damping}. Must be > 0, or None.")

    def solve(
        self,
        problem: LocalProblem,
        states: dict[str, Tensors],
        numbers: dict[str, Numbers],
        local_steps: int,
        local_decay: str,
    ) -> tuple[Tensors, dict[str, Tensors]]:
        return self.solved(problem, states, numbers, self.sums(problem, states))

    def sums(self, problem: LocalProblem, states: States) -> Sums:
        """Return what a solution needs of the rows of all processes.

        Args:
            problem: the layer's local problem.
            states: for each trained tensor its state.
        """
        owner = "weight" if "weight" in problem.start else "bias"
        gradient, state = join(problem.first_gradient), states[owner]
        bent = problem.loss.uses_transfer
        h = problem.loss.curvature(problem.a0, problem.transfer) if bent else None
        h = None if h is None else problem.averaged(h)
        with full_products(gradient):
            if not self.averages:
                by_rows = problem.others is None and not isinstance(problem.x, Gram)
                return Sums(gradient, h, None if by_rows else problem.square(torch.float64))
            state = self._fitting(problem, gradient, state)
            renews = self.renews(problem.number) or _factors(h) not in state
            gram = state.get("gram")
            if renews or self.decay > 0:
                gram = running_average(gram, problem.square(gradient.dtype), self.decay)
        return Sums(gradient, h, gram, renews)

    def solved(
        self,
        problem: LocalProblem,
        states: States,
        numbers: dict[str, Numbers],
        sums: Sums,
    ) -> tuple[Tensors, States]:
        """Return the new tensors and the new states, without other processes.

        Args:
            problem: the layer's local problem.
            states: for each trained tensor its state.
            numbers: learning rate and other numbers of each trained tensor.
            sums: what :meth:`sums` has returned.
        """
        owner = "weight" if "weight" in problem.start else "bias"
        gradient, state = sums.gradient, states[owner]
        eta = spread(numbers[owner].lr, gradient)
        with full_products(gradient):
            if not self.averages:
                found = _of_one_batch(problem, sums, eta)
            else:
                found, state = self._on_running_gram(problem, sums, state, eta)
        moved = split(found, problem.start)
        new = {name: tensor + moved[name] for name, tensor in problem.start.items()}
        return new, {**states, owner: state}

    def factorizes(self, problem: LocalProblem, states: States) -> bool:
        """Return True if this step factorizes C, and does not use an earlier factorization."""
        owner = "weight" if "weight" in problem.start else "bias"
        state = self._fitting(problem, join(problem.start), states[owner])
        factors = "eigenvectors" if problem.loss.uses_transfer else "inverse"
        return not self.averages or self.renews(problem.number) or factors not in state

    def _fitting(self, problem: LocalProblem, gradient: Tensor, state: Tensors) -> Tensors:
        """Return a state; an empty one if the bias was frozen or unfrozen, or the structure changed."""
        known = [state[name] for name in ("gram", "inverse", "eigenvectors") if name in state]
        structure = problem.structure or FULL
        return state if all(structure.fits(c, gradient.shape[-1]) for c in known) else {}

    def _on_running_gram(
        self, problem: LocalProblem, sums: Sums, state: Tensors, eta: Number
    ) -> tuple[Tensor, Tensors]:
        """Return Δ and the new state, which keeps the running C and its factorization."""
        gradient, h, gram, renew = sums
        state = self._fitting(problem, gradient, state)
        kept: Tensors = {}
        if gram is not None and self.decay > 0:
            kept["gram"] = gram
        if problem.structure is not None:
            return self._in_structure(gradient, gram if renew else None, state, kept, eta)
        if h is None:
            if gram is not None and renew:
                posed = self._is_well_posed(gram.shape[-1], gram.dtype)
                factor = cholesky(self._system(gram, eta), well_posed=posed)
                if self.every == 1:
                    return -eta * cholesky_solve(factor, gradient.mT).mT, kept
                # The next steps take one product with the inverse: triangular solves are slow on a GPU.
                kept["inverse"] = cholesky_inverse(factor)
            else:
                kept["inverse"] = state["inverse"]
            return -eta * gradient @ kept["inverse"], kept
        if gram is not None and renew:
            kept["eigenvalues"], kept["eigenvectors"] = eigh(gram)
        else:
            kept["eigenvalues"], kept["eigenvectors"] = state["eigenvalues"], state["eigenvectors"]
        values, basis = kept["eigenvalues"], kept["eigenvectors"]
        if self.damping is None:
            return -eta * sylvester_in_basis(gradient, values, basis, 1.0, h, eta), kept
        shift = self.damping * values.mean(-1)[..., None, None]
        return -eta * sylvester_in_basis(gradient, values, basis, shift, h), kept

    def _in_structure(
        self, gradient: Tensor, gram: Tensor | None, state: Tensors, kept: Tensors, eta: Number
    ) -> tuple[Tensor, Tensors]:
        """Return Δ and the new state for C in blocks or its diagonal; None keeps the last inverse."""
        if gram is None:
            kept["inverse"] = state["inverse"]
        else:
            curvature = StructuredGram.beside(gradient, gram, may_be_padded=True)
            shift, scale = gradient.new_ones(()), eta
            if self.damping is not None:
                shift, scale = curvature.damping(self.damping), 1.0
            posed = self._is_well_posed(gradient.shape[-1], gram.dtype)
            if self.every == 1:
                return -eta * curvature.solve(gradient, shift, scale, well_posed=posed), kept
            kept["inverse"] = curvature.inverse(shift, scale, well_posed=posed)
        inverse = StructuredGram.beside(gradient, kept["inverse"], may_be_padded=True)
        return -eta * inverse.times(gradient), kept

    def empty_states(self, start: Tensors, bent: bool, *, structure: Structure = FULL) -> States:
        joint = join(start)
        *leading, _, n = joint.shape
        of_gram = structure.shape(n)
        shapes: dict[str, tuple[int, ...]] = {"gram": of_gram} if self.decay > 0 else {}
        if self.averages and bent:
            shapes |= {"eigenvalues": (n,), "eigenvectors": (n, n)}
        elif self.averages and self.every > 1:
            shapes["inverse"] = of_gram
        state = {key: joint.new_zeros(*leading, *shape) for key, shape in shapes.items()}
        owner = "weight" if "weight" in start else "bias"
        return {**{name: {} for name in start}, owner: state}

    def serves(self, loss: LocalLoss) -> bool:
        return loss.closed_form

    def is_fixed_work(self, number: int, weight: Tensor, bent: bool) -> bool:
        posed = not bent and self._is_well_posed(weight.shape[-1] + 1, weight.dtype)
        return posed or not self.renews(number)

    def phase(self, number: int) -> int:
        return int(self.renews(number))

    def use_of_rows(
        self,
        local_steps: int,
        number: int,
        state: Tensors,
        columns: int,
        *,
        structure: Structure = FULL,
    ) -> RowUse | None:
        if type(self).solve is not Exact.solve:
            return None
        if not self.averages:
            return RowUse(square=True, precise=True)
        known = structure.fits(state.get(_factors(None)), columns)
        renew = self.renews(number) or not known
        return RowUse(square=renew or self.decay > 0)

    @property
    def averages(self) -> bool:
        """True if C is averaged, damped or kept over steps; False for each batch's own problem."""
        return not (self.every == 1 and self.decay == 0 and self.damping is None)

    def renews(self, number: int) -> bool:
        return number % self.every == 0

    def _is_well_posed(self, size: int, dtype: torch.dtype) -> bool:
        return self.damping is not None and is_well_posed(size, self.damping, dtype)

    def _system(self, gram: Tensor, eta: Number) -> Tensor:
        if self.damping is not None:
            return damped(gram, self.damping)
        return torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) + eta * gram


def _factors(h: Tensor | None) -> str:
    """Return the key under which the state keeps the factorization of C."""
    return "inverse" if h is None else "eigenvectors"


def _of_one_batch(problem: LocalProblem, sums: Sums, eta: Number) -> Tensor:
    """Return Δ of one batch's problem, from the rows if this process has all of them."""
    gradient, h, gram, _ = sums
    if gram is not None:
        return _on_gram(problem, gradient, gram, h, eta)
    x = problem.inputs * problem.row_weight**0.5
    return implicit_step(gradient, x, eta) if h is None else sylvester(gradient, x, eta, h)


def _on_gram(
    problem: LocalProblem, gradient: Tensor, gram: Tensor, h: Tensor | None, eta: Number
) -> Tensor:
    """Return Δ computed from C in float64, when the rows are condensed or on other processes."""
    dtype, gradient = gradient.dtype, gradient.double()
    if problem.structure is not None:
        curvature = StructuredGram.beside(gradient, gram, may_be_padded=True)
        return (-eta * curvature.solve(gradient, gradient.new_ones(()), eta)).to(dtype)
    if h is None:
        system = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) + eta * gram
        return (-eta * cholesky_solve(cholesky(system), gradient.mT).mT).to(dtype)
    values, basis = eigh(gram)
    found = sylvester_in_basis(gradient, values, basis, 1.0, h.double(), eta)
    return (-eta * found).to(dtype)
