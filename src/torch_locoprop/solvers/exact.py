"""Closed forms of the local problem with the proximal term ``‖W̃ − W‖²/2η``.

With ``C = XᵀX`` and ``γG`` the gradient at the start (``γ D⁻¹ G`` for the natural target, which makes
this the K-FAC update), the squared loss gives the implicit-gradient update

    Δ (I + η C) = −η γ G ,

and the matching loss, linearised as in Proposition 3 with the Hessian H of F, the Sylvester equation

    Δ + η H Δ C = −η γ G .

H belongs to one row. For a batch its mean over the rows is used: an approximation, exact for one row
and for transfers of constant slope.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_locoprop.paper.fisher import (
    at_least_float32,
    cholesky,
    cholesky_solve,
    damped,
    is_well_posed,
    running_average,
)
from torch_locoprop.paper.gram import Gram, Use, full_products
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Number, Tensors, join, split, spread
from torch_locoprop.solvers.base import Numbers, Solver


@dataclass(frozen=True)
class Exact(Solver):
    """The exact solution, optionally on a running average of ``C`` refactored every k steps.

    Plain ``Exact()`` solves each batch's own problem, in the system of inputs or of rows, whichever
    is smaller. With ``decay``, C is a running average over steps. With ``every=k`` the factorisation
    is renewed every k steps; one that is not finite waits for the next. With ``damping`` the proximal
    weight 1/η is replaced by ``damping`` times the mean diagonal of C, and lr becomes the length of
    the step: ``Δ = −lr γ G (C + λI)⁻¹``.
    """

    decay: float = 0.0
    every: int = 1
    damping: float | None = None
    name = "exact"

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
        owner = "weight" if "weight" in problem.start else "bias"
        gradient, state = join(problem.first_gradient), states[owner]
        eta = spread(numbers[owner].lr, gradient)
        bent = problem.loss.uses_transfer
        h = problem.loss.curvature(problem.a0, problem.transfer) if bent else None
        h = None if h is None else problem.averaged(h)
        with full_products(gradient):
            if self._is_plain:
                found = _of_one_batch(problem, gradient, h, eta)
            else:
                found, state = self._on_running_gram(problem, gradient, h, state, eta)
        moved = split(found, problem.start)
        new = {name: tensor + moved[name] for name, tensor in problem.start.items()}
        return new, {**states, owner: state}

    def _on_running_gram(
        self, problem: LocalProblem, gradient: Tensor, h: Tensor | None, state: Tensors, eta: Number
    ) -> tuple[Tensor, Tensors]:
        """The solution with C and its factorisation kept in the state."""
        known = [state[name] for name in ("gram", "inverse", "eigenvectors") if name in state]
        if any(each.shape[-1] != gradient.shape[-1] for each in known):  # a bias frozen or thawed
            state = {}
        renew = self._renews(problem.number) or _factors(h) not in state
        gram = state.get("gram")
        if renew or self.decay > 0:
            gram = running_average(gram, problem.square(gradient.dtype), self.decay)
        kept: Tensors = {}
        if gram is not None and self.decay > 0:
            kept["gram"] = gram
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

    def is_fixed_work(self, number: int, weight: Tensor, bent: bool) -> bool:
        posed = not bent and self._is_well_posed(weight.shape[-1] + 1, weight.dtype)
        return posed or not self._renews(number)

    def phase(self, number: int) -> int:
        return int(self._renews(number))

    def use_of_rows(
        self, local_steps: int, number: int, state: Tensors, columns: int
    ) -> Use | None:
        if type(self).solve is not Exact.solve:
            return None
        if self._is_plain:
            return Use(square=True, precise=True)
        inverse = state.get(_factors(None))
        renew = self._renews(number) or inverse is None or inverse.shape[-1] != columns
        return Use(square=renew or self.decay > 0)

    @property
    def _is_plain(self) -> bool:
        """Whether each batch's own problem is solved."""
        return self.every == 1 and self.decay == 0 and self.damping is None

    def _renews(self, number: int) -> bool:
        return number % self.every == 0

    def _is_well_posed(self, size: int, dtype: torch.dtype) -> bool:
        return self.damping is not None and is_well_posed(size, self.damping, dtype)

    def _system(self, gram: Tensor, eta: Number) -> Tensor:
        if self.damping is not None:
            return damped(gram, self.damping)
        return torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) + eta * gram


def _factors(h: Tensor | None) -> str:
    """What the state has of C once it is factored."""
    return "inverse" if h is None else "eigenvectors"


def _of_one_batch(problem: LocalProblem, gradient: Tensor, h: Tensor | None, eta: Number) -> Tensor:
    """Δ of the problem as it stands: by the rows, where all of them are here."""
    if problem.exchange is not None or isinstance(problem.x, Gram):
        return _on_gram(problem, gradient, h, eta)
    x = problem.inputs * problem.row_weight**0.5
    return implicit_step(gradient, x, eta) if h is None else sylvester(gradient, x, eta, h)


def _on_gram(problem: LocalProblem, gradient: Tensor, h: Tensor | None, eta: Number) -> Tensor:
    """Δ as below where C is all there is of the rows, or of those of other processes; in float64."""
    dtype, gradient, gram = gradient.dtype, gradient.double(), problem.square(torch.float64)
    if h is None:
        system = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) + eta * gram
        return (-eta * cholesky_solve(cholesky(system), gradient.mT).mT).to(dtype)
    values, basis = eigh(gram)
    found = _sylvester_in_basis(gradient, values, basis, 1.0, h.double(), eta)
    return (-eta * found).to(dtype)


def implicit_step(gradient: Tensor, x: Tensor, eta: Number) -> Tensor:
    """Δ of ``Δ (I + η XᵀX) = −η G``: G ``[..., d, n]``, X ``[..., rows, n]``."""
    gradient, x, dtype = *precise_enough(gradient, x, eta), x.dtype
    rows, n = x.shape[-2:]
    if rows >= n:
        system = torch.eye(n, dtype=x.dtype, device=x.device) + eta * (x.mT @ x)
        return (-eta * cholesky_solve(cholesky(system), gradient.mT).mT).to(dtype)
    system = torch.eye(rows, dtype=x.dtype, device=x.device) + eta * (x @ x.mT)
    inner = cholesky_solve(cholesky(system), x @ gradient.mT).mT
    return (-eta * (gradient - eta * inner @ x)).to(dtype)


def precise_enough(gradient: Tensor, x: Tensor, eta: Number) -> tuple[Tensor, Tensor]:
    """Both in a dtype in which ``I + η XᵀX`` can be solved: float64 where η is large for it."""
    condition = spread(eta, x) * x.square().sum((-2, -1), keepdim=True)  # bounds it from above
    if bool((condition * torch.finfo(x.dtype).eps > 1e-3).any()):
        return gradient.double(), x.double()
    return gradient, x


def sylvester(gradient: Tensor, x: Tensor, eta: Number, h: Tensor) -> Tensor:
    """Δ of ``Δ + η H Δ XᵀX = −η G`` with H ``[..., d]`` (diagonal) or ``[..., d, d]``."""
    gradient, x, dtype = *precise_enough(gradient, x, eta), x.dtype
    h = h.to(x.dtype)
    rows, n = x.shape[-2:]
    if rows >= n:
        values, basis = eigh(x.mT @ x)
        return (-eta * _sylvester_in_basis(gradient, values, basis, 1.0, h, eta)).to(dtype)
    values, left = eigh(x @ x.mT)
    # Right singular vectors of the rows that carry anything; outside their span Δ = −η G.
    negligible = values <= values.amax(-1, keepdim=True) * rows * torch.finfo(x.dtype).eps
    basis = x.mT @ (left / values.masked_fill(negligible, torch.inf).sqrt().unsqueeze(-2))
    outside = gradient - gradient @ basis @ basis.mT
    inside = _sylvester_in_basis(gradient, values, basis, 1.0, h, eta)
    return (-eta * (outside + inside)).to(dtype)


def _sylvester_in_basis(
    gradient: Tensor, values: Tensor, basis: Tensor, shift: Number, h: Tensor, eta: Number = 1.0
) -> Tensor:
    """``Σ`` of ``shift·Σ + η H Σ C = G`` in the span of ``basis``, C = basis diag(values) basisᵀ."""
    inside = gradient @ basis
    if h.dim() < gradient.dim():
        return inside / (shift + eta * h.unsqueeze(-1) * values.unsqueeze(-2)) @ basis.mT
    slopes, frame = eigh(h)
    solved = (frame.mT @ inside) / (shift + eta * slopes.unsqueeze(-1) * values.unsqueeze(-2))
    return frame @ solved @ basis.mT


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (negative rounding removed) and vectors; NaN where a matrix is not finite."""
    finite = matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    dtype = matrix.dtype
    matrix = at_least_float32(torch.where(finite, matrix, 0.0))
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = torch.linalg.eigh(matrix.double())
    nan = torch.where(finite, 0.0, torch.nan).to(dtype)
    return values.clamp_min(0).to(dtype) + nan.squeeze(-1), vectors.to(dtype) + nan
