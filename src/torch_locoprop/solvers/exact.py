"""Closed forms of the local problem with the proximal term ``‖W̃ − W‖²/2η``: no local iterations.

Let ``C = XᵀX``, ``Δ = W̃ − W``, and let ``γ G`` be the local gradient at the current weights. For the
squared loss, setting the derivative of Eq. 3 to zero gives the implicit-gradient update

    Δ (I + η C) = −η γ G .

With the natural-gradient target the right-hand side is ``−η γ D⁻¹ G``, and the update is that of
Eq. 15. For the matching loss, Proposition 3 replaces f by its tangent with the Hessian H of F, which
gives the Sylvester equation (Eq. 10 multiplied by H, Eq. 11)

    Δ + η H Δ C = −η γ G .

H belongs to one row. For a batch, the mean of H over the rows is used. This is exact for one row and
for transfers of constant slope, and an approximation otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_locoprop.paper.fisher import (
    cholesky,
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
    at_least_float32,
    holds,
    join,
    split,
    spread,
)
from torch_locoprop.solvers.base import Numbers, Solver, States


class Sums(NamedTuple):
    """What a closed form needs of the rows of all processes."""

    gradient: Tensor  # of [W b] at the start, [..., d, n]
    h: Tensor | None  # the mean Hessian H of F over the rows; None without a transfer in the loss
    gram: (
        Tensor | None
    )  # C of this batch or its running average; None if the rows themselves are used
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
            renews = self._renews(problem.number) or _factors(h) not in state
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
        return not self.averages or self._renews(problem.number) or factors not in state

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
                # One product in each of the next steps: triangular solves are slow on a GPU.
                kept["inverse"] = torch.cholesky_inverse(at_least_float32(factor)).to(gram.dtype)
            else:
                kept["inverse"] = state["inverse"]
            return -eta * gradient @ kept["inverse"], kept
        if gram is not None and renew:
            kept["eigenvalues"], kept["eigenvectors"] = eigh(gram)
        else:
            kept["eigenvalues"], kept["eigenvectors"] = state["eigenvalues"], state["eigenvectors"]
        values, basis = kept["eigenvalues"], kept["eigenvectors"]
        if self.damping is None:
            return -eta * _sylvester_in_basis(gradient, values, basis, 1.0, h, eta), kept
        shift = self.damping * values.mean(-1)[..., None, None]
        return -eta * _sylvester_in_basis(gradient, values, basis, shift, h), kept

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
        return posed or not self._renews(number)

    def phase(self, number: int) -> int:
        return int(self._renews(number))

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
        renew = self._renews(number) or not known
        return RowUse(square=renew or self.decay > 0)

    @property
    def averages(self) -> bool:
        """False if each batch's own problem is solved, without averages or damping."""
        return not (self.every == 1 and self.decay == 0 and self.damping is None)

    def _renews(self, number: int) -> bool:
        return number % self.every == 0

    def _is_well_posed(self, size: int, dtype: torch.dtype) -> bool:
        return self.damping is not None and is_well_posed(size, self.damping, dtype)

    def _system(self, gram: Tensor, eta: Number) -> Tensor:
        if self.damping is not None:
            return damped(gram, self.damping)
        return torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) + eta * gram


def operations(d: int, n: int, bent: bool, structure: Structure = FULL) -> int:
    """Return about how many multiplications and additions the solution of a problem takes.

    Args:
        d: outputs.
        n: columns of ``[W b]``.
        bent: the loss contains a transfer, so that the eigenvectors of C are needed.
        structure: which entries of C the solution takes.
    """
    shape = structure.shape(n)
    if len(shape) == 1:
        return d * n
    if len(shape) == 3:
        blocks, size, _ = shape
        return blocks * operations(d, size, bent)
    return 9 * n**3 + 4 * d * n**2 if bent else n**3 // 3 + 2 * d * n**2


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
    found = _sylvester_in_basis(gradient, values, basis, 1.0, h.double(), eta)
    return (-eta * found).to(dtype)


def implicit_step(gradient: Tensor, x: Tensor, eta: Number) -> Tensor:
    """Return the solution Δ of ``Δ (I + η XᵀX) = −η G``, the closed form of Eq. 4.

    Args:
        gradient: the local gradient G at the current weights, ``[..., d, n]``.
        x: the inputs X, ``[..., rows, n]``.
        eta: the learning rate η.

    Returns:
        The displacement Δ of the weights, ``[..., d, n]``.
    """
    gradient, x, dtype = *precise_enough(gradient, x, eta), x.dtype
    rows, n = x.shape[-2:]
    if rows >= n:
        system = torch.eye(n, dtype=x.dtype, device=x.device) + eta * (x.mT @ x)
        return (-eta * cholesky_solve(cholesky(system), gradient.mT).mT).to(dtype)
    system = torch.eye(rows, dtype=x.dtype, device=x.device) + eta * (x @ x.mT)
    inner = cholesky_solve(cholesky(system), x @ gradient.mT).mT
    return (-eta * (gradient - eta * inner @ x)).to(dtype)


def precise_enough(gradient: Tensor, x: Tensor, eta: Number) -> tuple[Tensor, Tensor]:
    """Return both, in float64 if ``I + η XᵀX`` may be too ill-conditioned for their dtype."""
    condition = spread(eta, x) * x.square().sum((-2, -1), keepdim=True)  # an upper bound
    if holds((condition * torch.finfo(x.dtype).eps > 1e-3).any(), unknown=False):
        return gradient.double(), x.double()
    return gradient, x


def sylvester(gradient: Tensor, x: Tensor, eta: Number, h: Tensor) -> Tensor:
    """Return the solution Δ of ``Δ + η H Δ XᵀX = −η G`` (Proposition 3).

    This is Eq. 10 multiplied by H; its vectorized form is Eq. 11. In the eigenvectors of ``XᵀX`` and H
    the solution is a division, entry by entry: H is not inverted and no Kronecker product is formed.

    Args:
        gradient: the local gradient G at the current weights, ``[..., d, n]``.
        x: the inputs X, ``[..., rows, n]``.
        eta: the learning rate η.
        h: the Hessian H of F, ``[..., d]`` if diagonal, else ``[..., d, d]``.

    Returns:
        The displacement Δ of the weights, ``[..., d, n]``.
    """
    gradient, x, dtype = *precise_enough(gradient, x, eta), x.dtype
    h = h.to(x.dtype)
    rows, n = x.shape[-2:]
    if rows >= n:
        values, basis = eigh(x.mT @ x)
        return (-eta * _sylvester_in_basis(gradient, values, basis, 1.0, h, eta)).to(dtype)
    values, left = eigh(x @ x.mT)
    # Right singular vectors of X with singular values above rounding. Outside their span, Δ = −η G.
    negligible = values <= values.amax(-1, keepdim=True) * rows * torch.finfo(x.dtype).eps
    basis = x.mT @ (left / values.masked_fill(negligible, torch.inf).sqrt().unsqueeze(-2))
    outside = gradient - gradient @ basis @ basis.mT
    inside = _sylvester_in_basis(gradient, values, basis, 1.0, h, eta)
    return (-eta * (outside + inside)).to(dtype)


def _sylvester_in_basis(
    gradient: Tensor, values: Tensor, basis: Tensor, shift: Number, h: Tensor, eta: Number = 1.0
) -> Tensor:
    """Solve ``shift · Σ + η H Σ C = G`` for Σ within the span of the eigenvectors ``basis`` of C."""
    inside = gradient @ basis
    if h.dim() < gradient.dim():
        return inside / (shift + eta * h.unsqueeze(-1) * values.unsqueeze(-2)) @ basis.mT
    slopes, frame = eigh(h)
    solved = (frame.mT @ inside) / (shift + eta * slopes.unsqueeze(-1) * values.unsqueeze(-2))
    return frame @ solved @ basis.mT


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues, clamped to >= 0, and eigenvectors; NaN if a matrix is not finite."""
    finite = matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    dtype = matrix.dtype
    matrix = at_least_float32(torch.where(finite, matrix, 0.0))
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = torch.linalg.eigh(matrix.double())
    nan = torch.where(finite, 0.0, torch.nan).to(dtype)
    return values.clamp_min(0).to(dtype) + nan.squeeze(-1), vectors.to(dtype) + nan
