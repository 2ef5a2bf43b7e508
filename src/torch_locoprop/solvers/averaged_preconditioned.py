"""One preconditioned iteration in each step, averaged over the batches, with outputs of equal size.

One iteration from the weights would move ``[W b]`` by

    Δ = −diag(h)⁻¹ G (C + λI)⁻¹ ,

with the gradient G, the mean slope h of each output's transfer, and ``C = [X 1]ᵀ[X 1]`` divided by its
mean diagonal. C and h are running averages over batches. They are renewed, and C + λI is inverted, in
some steps only; the steps between have one product with the inverse, and need no rows.

The step that is taken is the Nesterov average of Δ over the steps, with each output divided by the root
mean square of its displacements. This division makes the check of ``preconditioned.py``, whether the
local loss falls, unnecessary: the learning rate alone decides how far an output moves. It also removes
all units: the scale of the loss, γ, and constant factors of C or h change nothing. The formulas are in
``paper/preconditioning.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import MappingProxyType

import torch
from torch import Tensor

from torch_locoprop.paper.gram import FULL, RowUse, Structure, full_products
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import LocalLoss
from torch_locoprop.paper.preconditioning import (
    average_size,
    preconditioned,
    regularized_inverse,
)
from torch_locoprop.paper.spectral import longer
from torch_locoprop.paper.structured_gram import StructuredGram
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
from torch_locoprop.solvers.preconditioned import Preconditioned, slopes
from torch_locoprop.solvers.spectral import EARLY, WIDEST, average, gradient_without_gamma


@dataclass(frozen=True)
class AveragedPreconditioned(Solver):
    """Average one preconditioned iteration over batches, as ``solver="preconditioned-averaged"``.

    This solver serves all variants with a convex local loss: LocoProp-S and -M, and natural LocoProp-S.
    A step changes the entries of a weight by about 0.2 lr. The settings ``momentum`` and ``decay`` are
    those of the average displacement and of the mean squares of each output's displacements. The
    settings ``gamma``, ``eps``, ``local_decay`` and ``local_reduction`` have no effect, and
    ``local_steps`` must be 1. An output whose gradient is exactly zero stays. Layers with more than
    8192 inputs, a bias counted as one, take the step without C and h.

    Args:
        every: number of steps between two renewals of C, its inverse, and h. Each of the first ten
            steps renews them. Other steps need the gradient alone, and record nothing in the forward
            pass.
        averaging: weight of the past in the running averages of C and h, at each renewal.
        damping: λ relative to the mean diagonal of C.
    """

    every: int = 10
    averaging: float = 0.8
    damping: float = 1e-2
    name = "preconditioned-averaged"
    joint_state = True
    defaults = MappingProxyType({"lr": 0.03, "momentum": 0.9, "decay": 0.95, "local_steps": 1})
    joint_settings = ("lr", "momentum", "decay")
    ignores = frozenset({"gamma", "eps", "local_decay", "local_reduction"})
    over_fallback = 3.0  # that of the spectral step, whose entries move as far
    row_state = frozenset({"average", "size", "slopes"})

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Invalid every={self.every}. Must be an integer >= 1.")
        if not 0 <= self.averaging < 1:
            raise ValueError(f"Invalid averaging={self.averaging}. Must be in [0, 1).")
        if not self.damping > 0:
            raise ValueError(f"Invalid damping={self.damping}. Must be > 0.")

    def solve(
        self,
        problem: LocalProblem,
        states: States,
        numbers: dict[str, Numbers],
        local_steps: int,
        local_decay: str,
    ) -> tuple[Tensors, States]:
        return self.solved(problem, states, numbers)

    def solved(
        self,
        problem: LocalProblem,
        states: States,
        numbers: dict[str, Numbers],
        product: Product = torch.matmul,
        inverse_of: Inverse = torch.cholesky_inverse,
    ) -> tuple[Tensors, States]:
        """Return the new tensors and the new states.

        Args:
            problem: the layer's local problem.
            states: for each trained tensor its state.
            numbers: learning rate and other numbers of each trained tensor.
            product: computes the product with the inverse.
            inverse_of: computes the inverse from a Cholesky factor.
        """
        owner = "weight" if "weight" in problem.start else "bias"
        given, own, old = join(gradient_without_gamma(problem)), numbers[owner], states[owner]
        gradient = at_least_float32(given)
        if gradient.shape[-1] == 0:
            return problem.start, states
        if "average" in old and old["average"].shape != gradient.shape:
            old = {}  # the bias was frozen or unfrozen
        state = {key: entry.to(gradient) for key, entry in old.items()}
        if self._is_due(problem.number, state, gradient.shape[-1]):
            state |= self._renewed(problem, state, gradient, inverse_of)
        moved = _displacement(gradient, state, product)
        mu = spread(own.momentum, moved)
        decay = longer(spread(own.decay, moved), mu)
        state["average"] = average(state.get("average"), moved, mu)
        state["size"], factor = average_size(state.get("size"), moved, decay)
        step = 0.2 * spread(own.lr, factor) * factor * torch.lerp(moved, state["average"], mu)
        new = {
            name: problem.start[name] + part.to(given.dtype)
            for name, part in split(step, problem.start).items()
        }
        kept = {k: entry if k == "size" else entry.to(given.dtype) for k, entry in state.items()}
        return new, {**states, owner: kept}

    def _renewed(
        self, problem: LocalProblem, state: Tensors, gradient: Tensor, inverse_of: Inverse
    ) -> Tensors:
        """Return C and h with this batch in their averages, and the inverse."""
        square = StructuredGram.beside(gradient, Preconditioned.square(problem))
        h = slopes(problem)
        h = h.unsqueeze(-1) if isinstance(h, Tensor) else torch.full_like(gradient[..., :1], h)
        found = {"gram": square.unit_diagonal().entries, "slopes": h}
        for name in found.keys() & state.keys():
            found[name] = torch.lerp(found[name], state[name], self.averaging)
        rounding = 64 * torch.finfo(next(iter(problem.start.values())).dtype).eps
        with full_products(gradient):
            damping = max(self.damping, rounding)
            found["inverse"] = regularized_inverse(found["gram"], damping, inverse_of)
        return found

    def empty_states(self, start: Tensors, bent: bool, *, structure: Structure = FULL) -> States:
        joint = join(start)
        *leading, d, n = joint.shape
        size = at_least_float32(joint.new_zeros(*leading, d, 1))
        state = {"average": torch.zeros_like(joint), "size": size}
        if not self.omits_gram(n, structure):
            one = torch.eye(n, dtype=joint.dtype, device=joint.device)
            state |= {key: one.repeat(*leading, 1, 1) for key in ("gram", "inverse")}
            state["slopes"] = joint.new_ones(*leading, d, 1)
        owner = "weight" if "weight" in start else "bias"
        return {**{name: {} for name in start}, owner: state}

    def serves(self, loss: LocalLoss) -> bool:
        return loss.convex

    def without_rows(self) -> Solver:
        return _WithoutRows(**{f.name: getattr(self, f.name) for f in fields(self)})

    def is_fixed_work(self, number: int, weight: Tensor, bent: bool) -> bool:
        return True

    def phase(self, number: int) -> int:
        return int(self.renews(number))

    def renews(self, number: int) -> bool:
        return number < EARLY or number % self.every == 0

    @staticmethod
    def omits_gram(columns: int, structure: Structure) -> bool:
        """Return True if steps of a layer are taken without C, because C would be too large.

        Args:
            columns: how many columns of ``[W b]`` are trained.
            structure: which entries of C the solver gets; it is always all of them.
        """
        return columns > WIDEST

    def use_of_rows(
        self,
        local_steps: int,
        number: int,
        state: Tensors,
        columns: int,
        *,
        structure: Structure = FULL,
    ) -> RowUse | None:
        # A renewal takes the rows, from which h follows too, and not XᵀX of the backward pass, which
        # differs in rounding: a resumed run, which does not know all transfers yet, would do so too.
        return None if self._is_due(number, state, columns) else RowUse()

    def _is_due(self, number: int, state: Tensors, columns: int) -> bool:
        """Return True if a step renews C, its inverse and h."""
        known = FULL.fits(state.get("inverse"), columns)
        return not self.omits_gram(columns, FULL) and (self.renews(number) or not known)


class _WithoutRows(AveragedPreconditioned):
    """The step of a layer whose rows are not known: with the last inverse, or without C and h."""

    def _is_due(self, number: int, state: Tensors, columns: int) -> bool:
        return False


def _displacement(gradient: Tensor, state: Tensors, product: Product) -> Tensor:
    """Return ``−diag(h)⁻¹ G (C + λI)⁻¹``; without a fitting inverse in the state, ``−G``."""
    if not FULL.fits(state.get("inverse"), gradient.shape[-1]):
        return -gradient
    with full_products(gradient):  # small eigenvalues of C need all digits of float32
        return -preconditioned(gradient, state["inverse"], state["slopes"].squeeze(-1), product)
