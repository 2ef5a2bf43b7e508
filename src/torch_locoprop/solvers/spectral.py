"""The spectral step: the closed form of LocoProp-S on a running C, with a bounded spectral norm.

With the gradient ``G`` of ``[W b]``, its Nesterov average M, and a running average C of
``[X 1]ᵀ[X 1]`` divided by its mean diagonal, the displacement is

    Δ = −lr · 0.2 · sqrt(max(d, n)) · rows(polar(M (C + λI)⁻¹)) ,

where ``rows`` gives all output features steps of about equal length. Biases may take a step of their
own in addition. The formulas are in ``paper/spectral.py``; what they average over steps is kept here.

No number of this step has a unit: multiplying the loss by a constant, or summing it over the rows in
place of averaging it, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torch_locoprop.paper.gram import FULL, RowUse, Structure, full_products
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import LocalLoss
from torch_locoprop.paper.spectral import (
    above_rounding,
    agreement,
    equal_rows,
    growth,
    has_fast_bf16,
    length,
    longer,
    mean_size,
    polar,
    relative,
)
from torch_locoprop.paper.structured_gram import StructuredGram
from torch_locoprop.paper.targets import BackPropTarget
from torch_locoprop.paper.tensors import (
    Inverse,
    Number,
    Product,
    Tensors,
    at_least_float32,
    join,
    split,
    spread,
)
from torch_locoprop.solvers.base import Numbers, Solver, States

EARLY = 10  # each of the first steps renews C: a single batch is a poor estimate
WINDOW = 0.97  # weight of the past in the share of the signal in the gradients
LEAST = 0.15  # the smallest agreement
GROWTH = {"rate": 0.1, "least": 0.2, "most": 16.0}  # how steps that leave much of the gradient grow
_PRECISE = ("step", "bias_size")  # entries of the state that half precision would not let change
WIDEST = 8192  # columns of [W b] above which C, a matrix of this size, is left out


class Direction(NamedTuple):
    """The first half of a spectral step."""

    matrix: Tensor  # M (C + λI)⁻¹ of [W b], [..., d, n], or the rows of it that this process has
    state: Tensors  # the new state of the layer, as far as it is known
    has_gradient: Tensor  # 1 or 0, [..., 1, 1]: without a gradient the layer stays
    products: torch.dtype | None  # dtype of the products of the polar factor; None is the matrix's


@dataclass(frozen=True)
class Spectral(Solver):
    """Move along the polar factor of the closed form (Eq. 4), as ``solver="spectral"``.

    A step changes the entries of a weight by about 0.2 lr. The settings ``momentum`` and ``decay`` are
    those of the average gradient and of the mean squares of the rows; ``gamma``, ``local_steps`` and
    ``eps`` have no effect. Layers with more than 8192 inputs, a bias counted as one, take the step
    without C, unless ``gram="block"`` or ``"diagonal"`` is set.

    Args:
        every: number of steps between two renewals of C and its inverse. Each of the first ten steps
            renews them. Other steps need the gradient alone, and record nothing in the forward pass.
        averaging: weight of the past in the running average of C, at each renewal.
        damping: λ in a long run.
        fall: λ begins at 1 and falls as ``1 / (1 + t / fall)`` in step t until it is ``damping``: where
            the inputs vary little, C is known only after some steps.
        agreement: the step is multiplied by this power of the agreement of the last gradients, which is
            1 if they are equal and 0.15 if they are noise, and of the growth, which rises from 1 up to
            16 while a step leaves much of the gradient along it. 0 leaves the step as it is.
        bias_rate: biases take, in addition to their column of the displacement, a step of ``bias_rate``
            learning rates times their average gradient divided by the root of its mean square, as in
            Adam. 0 leaves this step out. Biases of layers whose weights are frozen have no such step.
    """

    every: int = 10
    averaging: float = 0.8
    damping: float = 0.02
    fall: float = 50.0
    agreement: float = 0.0
    bias_rate: float = 1.0
    name = "spectral"
    closed_form = True
    joint_state = True
    joint_settings = ("lr", "momentum", "decay")
    ignores = frozenset(
        {"gamma", "local_steps", "eps", "local_decay", "local_reduction", "regularizer"}
    )
    over_fallback = 3.0
    row_state = frozenset({"average", "moved", "rows", "bias_size"})

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Invalid every={self.every}. Must be an integer >= 1.")
        if not 0 <= self.averaging < 1:
            raise ValueError(f"Invalid averaging={self.averaging}. Must be in [0, 1).")
        for name in ("damping", "fall"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Invalid {name}={getattr(self, name)}. Must be > 0.")
        for name in ("agreement", "bias_rate"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Invalid {name}={getattr(self, name)}. Must be >= 0.")

    def solve(
        self,
        problem: LocalProblem,
        states: States,
        numbers: dict[str, Numbers],
        local_steps: int,
        local_decay: str,
    ) -> tuple[Tensors, States]:
        assert problem.outputs is None, "the polar factor needs the rows of all processes"
        found = self.direction(problem, states, numbers)
        if found is None:
            return problem.start, states
        factor = polar(found.matrix, found.products)
        return self.displaced(problem, states, numbers, found, factor)

    def direction(
        self,
        problem: LocalProblem,
        states: States,
        numbers: dict[str, Numbers],
        product: Product = torch.matmul,
        inverse_of: Inverse = torch.cholesky_inverse,
    ) -> Direction | None:
        """Return the first half of a step: the matrix whose polar factor the second half needs.

        Args:
            problem: the layer's local problem.
            states: for each trained tensor its state.
            numbers: learning rate and other numbers of each trained tensor.
            product: computes the product with the inverse.
            inverse_of: computes the inverse from a Cholesky factor.

        Returns:
            The direction; None for a layer without inputs or outputs, which does not move.
        """
        owner = "weight" if "weight" in problem.start else "bias"
        given = join(gradient_without_gamma(problem))
        d = given.shape[-2] if problem.outputs is None else problem.outputs.d
        if 0 in (*given.shape[:-2], d, given.shape[-1]):
            return None
        gradient, old = at_least_float32(given), states[owner]
        if "average" in old and old["average"].shape != gradient.shape:
            old = {}  # the bias was frozen or unfrozen
        state = {key: entry if key == "step" else entry.to(gradient) for key, entry in old.items()}
        mu = spread(numbers[owner].momentum, gradient)
        state = self._renewed(problem, state, gradient, inverse_of)
        if self.agreement > 0:
            state, size = _compared(problem, gradient, state, mu)
        else:
            size = problem.of_all_outputs(_size(gradient)[..., None, None])
        state = {**state, "average": average(state.get("average"), gradient, mu)}
        if self._moves_bias(problem.start):
            past = state.get("bias_size")
            if (
                past is None and "average" in old
            ):  # a state of before biases took a step of their own
                past = old["average"][..., -1:].to(gradient).abs()
            decay = longer(spread(numbers[owner].decay, gradient), mu)
            state["bias_size"] = mean_size(past, above_rounding(gradient), decay)
        with full_products(gradient):  # small eigenvalues of the inverse need all digits of float32
            found = torch.lerp(gradient, state["average"], mu)
            if "inverse" in state:
                inverse = StructuredGram.beside(found, state["inverse"], may_be_padded=True)
                found = inverse.times(found, product)
        bf16 = problem.products == "bf16" and has_fast_bf16(gradient)
        return Direction(found, state, (size != 0).to(gradient), torch.bfloat16 if bf16 else None)

    def displaced(
        self,
        problem: LocalProblem,
        states: States,
        numbers: dict[str, Numbers],
        found: Direction,
        factor: Tensor,
    ) -> tuple[Tensors, States]:
        """Return the second half of a step: the new tensors and the new states.

        Args:
            problem: the layer's local problem.
            states: for each trained tensor its state.
            numbers: learning rate and other numbers of each trained tensor.
            found: the direction.
            factor: the polar factor of its matrix, or the rows of it that this process has.
        """
        owner = "weight" if "weight" in problem.start else "bias"
        dtype = problem.backprop[owner].dtype
        own, state = numbers[owner], dict(found.state)
        lengths = torch.linalg.vector_norm(factor, dim=-1, keepdim=True)
        square = lengths.square() / factor.shape[-1]
        state["rows"] = average(state.get("rows"), square, spread(own.decay, factor))
        d = factor.shape[-2] if problem.outputs is None else problem.outputs.d
        width = 0.2 * max(d, factor.shape[-1]) ** 0.5
        scale = -width * spread(own.lr, factor)
        # The polar factor has no size: along the average of earlier gradients alone, however small it
        # has become, the layer would go on in steps of full length.
        scale = scale * found.has_gradient
        if self.agreement > 0:
            agreed = agreement(state["signal"], _known(state, factor), LEAST)
            scale = scale * (agreed * state["growth"]) ** self.agreement
        scales = scale * equal_rows(lengths, state["rows"], partial(_norm, problem))
        displacement = scales * factor
        if self._moves_bias(problem.start):
            bias = relative(state["average"][..., -1:], state["bias_size"])
            displacement[..., -1:] += self.bias_rate / width * scale * bias
        if self.agreement > 0:
            state["moved"] = displacement
        moved = split(displacement.to(dtype), problem.start)
        new = {name: tensor + moved[name] for name, tensor in problem.start.items()}
        kept = {key: entry if key in _PRECISE else entry.to(dtype) for key, entry in state.items()}
        return new, {**states, owner: kept}

    def _renewed(
        self, problem: LocalProblem, state: Tensors, gradient: Tensor, inverse_of: Inverse
    ) -> Tensors:
        """Return the state with the next step number and, if it is due, with new C and inverse."""
        ones = (*gradient.shape[:-2], 1, 1)
        start = torch.zeros(ones, dtype=torch.float32, device=gradient.device)
        state = {**state, "step": state.get("step", start) + 1}
        columns, structure = gradient.shape[-1], problem.structure or FULL
        if not self._has_use_of_rows(problem.number, state, columns, structure):
            return state
        entries = self._square(problem, gradient)
        square = StructuredGram.beside(gradient, entries, may_be_padded=True).unit_diagonal()
        if "gram" in state and state["gram"].shape != entries.shape:  # gram= was changed
            state = {key: entry for key, entry in state.items() if key not in ("gram", "inverse")}
        past = state.get("gram")
        gram = square if past is None else square.averaged_with(past, self.averaging)
        rounding = 64 * torch.finfo(next(iter(problem.start.values())).dtype).eps
        before = state["step"].to(gradient) - 1
        damping = (1 / (1 + before / self.fall)).clamp_min(max(self.damping, rounding))
        inverse = gram.damped_inverse(damping, state.get("inverse"), inverse_of)
        return {**state, "gram": gram.entries, "inverse": inverse}

    def _square(self, problem: LocalProblem, like: Tensor) -> Tensor:
        """Return ``[X 1]ᵀ[X 1]`` of this step, in the dtype of ``like``."""
        return problem.square(like.dtype)

    def empty_states(self, start: Tensors, bent: bool, *, structure: Structure = FULL) -> States:
        joint = join(start)
        *leading, d, n = joint.shape
        shapes: dict[str, tuple[int, ...]] = {"average": (d, n), "rows": (d, 1)}
        of_gram = structure.shape(n)
        if not self.omits_gram(n, structure):
            shapes |= {"gram": of_gram, "inverse": of_gram}
        if self._moves_bias(start):
            shapes["bias_size"] = (d, 1)
        if self.agreement > 0:
            shapes |= {"moved": (d, n), "energy": (1, 1), "signal": (1, 1), "growth": (1, 1)}
        state = {key: joint.new_zeros(*leading, *shape) for key, shape in shapes.items()}
        for key in {"gram", "inverse"} & state.keys():  # an inverse of zeros would stop the layer
            one = torch.eye(of_gram[-1], dtype=joint.dtype, device=joint.device)
            state[key] += one if len(of_gram) > 1 else one.diagonal()
        state["step"] = joint.new_zeros(*leading, 1, 1, dtype=torch.float32)
        if "bias_size" in state:
            state["bias_size"] = at_least_float32(state["bias_size"])
        owner = "weight" if "weight" in start else "bias"
        return {**{name: {} for name in start}, owner: state}

    def _moves_bias(self, start: Tensors) -> bool:
        """Return True if the bias of a layer takes a step of its own, beside its column."""
        return self.bias_rate > 0 and "weight" in start and "bias" in start

    def serves(self, loss: LocalLoss) -> bool:
        return not loss.uses_transfer

    def without_rows(self) -> Solver:
        return _WithoutRows(**{f.name: getattr(self, f.name) for f in fields(self)})

    def is_fixed_work(self, number: int, weight: Tensor, bent: bool) -> bool:
        return True

    def phase(self, number: int) -> int:
        return int(self.renews(number))

    @staticmethod
    def omits_gram(columns: int, structure: Structure) -> bool:
        """Return True if steps of a layer are taken without C, because C would be too large.

        Args:
            columns: how many columns of ``[W b]`` are trained.
            structure: which entries of C the solver gets.
        """
        return columns > WIDEST and structure == FULL

    def use_of_rows(
        self,
        local_steps: int,
        number: int,
        state: Tensors,
        columns: int,
        *,
        structure: Structure = FULL,
    ) -> RowUse | None:
        square = self._has_use_of_rows(number, state, columns, structure)
        return RowUse(square=square, coarse=square)  # λ is larger than the error of C

    def _has_use_of_rows(
        self, number: int, state: Tensors, columns: int, structure: Structure
    ) -> bool:
        """Return True if a step computes C of its rows."""
        known = structure.fits(state.get("inverse"), columns)
        return not self.omits_gram(columns, structure) and (self.renews(number) or not known)

    def renews(self, number: int) -> bool:
        return number < EARLY or number % self.every == 0


class _WithoutRows(Spectral):
    """The step of a layer whose rows are not known: with the last inverse, or without C."""

    def _has_use_of_rows(
        self, number: int, state: Tensors, columns: int, structure: Structure
    ) -> bool:
        return False


def _norm(problem: LocalProblem, matrix: Tensor) -> Tensor:
    """Return Frobenius norms ``[..., 1, 1]`` of matrices of which this process may have some rows."""
    own = length(matrix)
    return own if problem.outputs is None else problem.of_all_outputs(own.square()).sqrt()


def gradient_without_gamma(problem: LocalProblem) -> Tensors:
    """Return the gradient of the local loss at the start, up to γ, which changes no step."""
    if type(problem.target).first_gradient is BackPropTarget.first_gradient:
        return problem.backprop
    return problem.first_gradient


def _size(gradient: Tensor) -> Tensor:
    """Return a number that is zero for a gradient of zeros alone: ``[..., d, n] -> [...]``."""
    return gradient.abs().sum((-2, -1))  # squares of small entries may be zero


def _compared(
    problem: LocalProblem, gradient: Tensor, state: Tensors, mu: Number
) -> tuple[Tensors, Tensor]:
    """Return the state with the share of the signal in the last gradients, and the growth of steps.

    The second tensor that it returns, ``[..., 1, 1]``, is zero if the gradient is zero.

    Args:
        problem: the local problem.
        gradient: the gradient of this step, ``[..., d, n]``.
        state: the state, whose average gradient and displacement are those of the step before.
        mu: the decay of that average.
    """
    past, moved = state.get("average"), state.get("moved")
    nothing = torch.zeros_like(gradient)
    past = nothing if past is None else past
    moved = nothing if moved is None else moved
    pairs = ((gradient, gradient), (gradient, past), (gradient, moved), (past, moved))
    products = [torch.linalg.vecdot(a.flatten(-2), b.flatten(-2)) for a, b in pairs]
    sums = problem.of_all_outputs(torch.stack([*products, _size(gradient)], -1)[..., None, :])
    square, shared, left, ahead, size = sums.chunk(5, -1)
    before = state["step"].to(gradient) - 1
    seen = 1 - mu**before  # the weight of all gradients in their average
    shared = torch.where(before > 0, shared / seen, square)
    energy = past_shared = None
    if "signal" in state:  # energy is kept as a root, which half precision can hold
        energy = state["energy"].square()
        past_shared = state["signal"] * energy
    shared, energy = average(past_shared, shared, WINDOW), average(energy, square, WINDOW)
    tiny = torch.finfo(energy.dtype).tiny
    grown = state.get("growth", torch.ones_like(energy))
    known = _known(state, gradient)
    of_steps = {
        "energy": energy.sqrt(),
        "signal": shared / energy.clamp_min(tiny),
        "growth": growth(grown, seen * left, ahead, known, **GROWTH),
    }
    return {**state, **of_steps}, size


def _known(state: Tensors, like: Tensor) -> Tensor:
    """Return the weight of the gradients so far in the share of the signal, ``[..., 1, 1]``."""
    return 1 - WINDOW ** state["step"].to(like)


def average(past: Tensor | None, new: Tensor, decay: Number) -> Tensor:
    """Return ``decay · past + (1 − decay) · new``; the past before the first step is zero."""
    return (1 - decay) * new if past is None else torch.lerp(new, past, decay)
