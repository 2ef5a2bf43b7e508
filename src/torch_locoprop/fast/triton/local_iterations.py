"""Local iterations with RMSProp on a linear layer, in two kernels each on a GPU, or in one by XᵀX.

The plain version is ``FirstOrder.solve``. Here the iterations are on displacements: the rounding of a
product is relative to what has moved. Residuals are ``[d, rows]``: both products of an iteration then
have the layout that the matrix units of a GPU take fastest. Of what the first product gives, only by
how much it changes the transfer's value is written, with the help of notes that are taken once; what
the second one gives, for weight and bias, is not written at all, but makes the solver's step: it
reads the inputs, turned once. By XᵀX there is the second one only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_locoprop.fast.eligibility import transfer_of
from torch_locoprop.fast.triton import availability, matrix_products, rmsprop
from torch_locoprop.fast.triton.matrix_products import (
    apart,
    factors,
    members,
    own_rows,
    padded,
    turned,
    unit,
)
from torch_locoprop.fast.triton.rmsprop import Moving
from torch_locoprop.paper.gram import Gram, full_products
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Number, Tensors
from torch_locoprop.paper.transfers import Linear, ReLU, Sigmoid, Tanh
from torch_locoprop.solvers.base import Checked, Numbers, local_rate

ROUNDED = torch.bfloat16

Movings = dict[str, Moving]


class Step(NamedTuple):
    """One local iteration after the first."""

    rate: float
    ok: Tensor | None  # of the last one: where it says which members are finite


TRANSFERS: dict[type | None, int] = {Linear: 0, Tanh: 1, Sigmoid: 2, ReLU: 3}


def fits(problem: LocalProblem, states: dict[str, Tensors], numbers: dict[str, Numbers]) -> bool:
    """Whether the kernels take this problem, and do all that it asks for."""
    start = problem.start
    weight = start.get("weight")
    if weight is None or not availability.has_kernels(weight.device) or weight.dim() > 3:
        return False
    if transfer_of(problem) not in TRANSFERS or not _agree(numbers):
        return False
    x = problem.x.square if isinstance(problem.x, Gram) else problem.x
    if isinstance(problem.x, Gram) and isinstance(problem.x.rows, Tensor):
        return False
    if any(state and state.keys() != {"square", "momentum"} for state in states.values()):
        return False  # another solver was at work before
    entries = [entry for state in states.values() for entry in state.values()]
    tensors = [*start.values(), *entries, *problem.backprop.values()]
    tensors += [*problem.fixed.values(), *problem.base.values()]
    own = [number for each in numbers.values() for number in rmsprop.numbers_of(each)]
    own.append(problem.gamma)
    if problem.before is not None:
        tensors.append(problem.before.a)
        own += problem.before[1:]
    (d, n), rows = weight.shape[-2:], x.shape[-2]
    countable = matrix_products.is_countable(members(weight), d, n, rows)
    return x.dtype == torch.float32 and countable and rmsprop.fits(tensors, own)


def solve(
    problem: LocalProblem,
    states: dict[str, Tensors],
    numbers: dict[str, Numbers],
    local_steps: int,
    local_decay: str,
) -> tuple[Tensors, dict[str, Tensors]]:
    """Return the new tensors and states."""
    gram, gamma = problem.through_gram(local_steps), problem.gamma
    rates = [local_rate(t, local_steps, local_decay) for t in range(local_steps)]
    at = {}
    for name, start in problem.start.items():
        old = Moving(start, **states[name])
        at[name] = Moving(*map(torch.empty_like, old))
        gradient, moves = problem.backprop[name], local_steps > 1
        rmsprop.step(old, at[name], gradient, numbers[name], rates[0], gamma, from_zero=moves)
    if local_steps == 1:
        return _tensors(at), _states(at)
    weight = problem.start["weight"]
    ok = torch.ones(members(weight), dtype=torch.uint8, device=weight.device)
    steps = [Step(rate, None) for rate in rates[1:-1]] + [Step(rates[-1], ok)]
    if gram is not None:
        at = _by_gram(problem, gram, at, numbers["weight"], steps)
    else:
        rows = ByRows(problem, at)
        for step in steps:
            rows.residual()
            rows.step(numbers["weight"], step)
    return Checked(_tensors(at), ok.view(torch.bool)), _states(at)


def _tensors(at: Movings) -> Tensors:
    return {name: moving.tensor for name, moving in at.items()}


def _states(at: Movings) -> dict[str, Tensors]:
    return {name: {"square": m.square, "momentum": m.momentum} for name, m in at.items()}


def _by_gram(
    problem: LocalProblem, gram: Gram, at: Movings, numbers: Numbers, steps: Sequence[Step]
) -> Movings:
    """The rest of the iterations, by the products of the rows with themselves."""
    total, left = gram.total.contiguous(), at["weight"].tensor
    table = _centred(own_rows(gram.square), own_rows(gram.total.unsqueeze(-1)), float(gram.rows))
    sums = _sums(left, total, matrix_products.STEP[_precision(problem)].broad)
    table, left = (t.to(_dtype(problem)).contiguous() for t in (table, left))
    for step in steps:
        rounded = torch.empty_like(left) if _rounds(problem) else left
        by = _ByGram(total, float(gram.rows), sums, torch.empty_like(sums))
        at = _stepped(problem, left, table, at, rounded, numbers, step, by)
        left, sums = rounded if _rounds(problem) else at["weight"].tensor, by.new_sums
    return at


class _ByGram(NamedTuple):
    """What an iteration by XᵀX needs beside it."""

    total: Tensor  # Xᵀ1
    rows: float
    sums: Tensor  # W Xᵀ1 [..., parts, d] of displacements W, in parts that add up
    new_sums: Tensor  # that of the new ones, to be written


def _centred(square: Tensor, total: Tensor, rows: float) -> Tensor:
    """``XᵀX`` of the rows less their mean, which is most of it: products with it lose fewer digits."""
    return torch.addcmul(square, total, total.mT, value=-1 / rows)


def _sums(weight: Tensor, total: Tensor, broad: int) -> Tensor:
    """``W Xᵀ1`` with all digits, in as many parts as there are programs side by side."""
    *lead, d, n = weight.shape
    sums = weight.new_zeros(*lead, -(-n // broad), d)
    if lead:
        with full_products(weight):
            sums[..., :1, :] = (weight @ total.unsqueeze(-1)).mT
    else:  # not by cuBLAS, which takes memory for every stream that it is used on
        sums[0] = (weight * total).sum(-1)
    return sums


class ByRows:
    """The rest of the iterations, by the rows, in place: of each, two kernels."""

    def __init__(self, problem: LocalProblem, at: Movings) -> None:
        self._problem, self._at = problem, at
        weight = at["weight"].tensor
        x = own_rows(problem.x).contiguous()
        self._notes = _notes(problem, x)
        lead = padded(x.shape[-2])
        self._table = turned(x, lead, "bias" in at, _dtype(problem))
        self._x, self._rounded = (t.to(_dtype(problem)) for t in (x, weight))
        self._delta = self._x.new_empty(*weight.shape[:-1], lead)

    def residual(self) -> None:
        """By how much the transfer's values have changed."""
        bias, precision = self._at.get("bias"), _precision(self._problem)
        own = None if bias is None else bias.tensor
        _residual(self._problem, self._rounded, own, self._x, self._notes, self._delta, precision)

    def step(self, numbers: Numbers, step: Step) -> None:
        """The solver's, with the gradient that follows from it."""
        _stepped(self._problem, self._delta, self._table, self._at, self._rounded, numbers, step)


def _notes(problem: LocalProblem, x: Tensor) -> Tensor:
    """What has to be known of the pre-activations at the start: ``[d, rows]``."""
    transfer, before = transfer_of(problem), problem.before
    if transfer is Linear:
        return x  # a pointer that is not read
    origin = problem.fixed | problem.start
    origin |= {name: origin[name] + tensor for name, tensor in problem.base.items()}
    bias = origin["bias"].contiguous() if "bias" in origin else None
    weight, rows = origin["weight"].contiguous(), x.shape[-2]
    notes = weight.new_empty(*weight.shape[:-1], rows)
    if before is None:
        _residual(problem, weight, bias, x, notes, None, availability.precision())
        return notes
    d, tile = weight.shape[-2], matrix_products.TURNED
    availability.kernels().note_all[(-(-rows // tile), -(-d // tile), members(weight))](
        before.a, notes if bias is None else bias, notes, before.lr, before.weight_decay, rows, d,
        rmsprop.place(before.lr), rmsprop.place(before.weight_decay),
        TRANSFER=TRANSFERS[transfer], HAS_BIAS=bias is not None, TILE=tile,
    )  # fmt: skip
    return notes


def _residual(
    problem: LocalProblem,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    notes: Tensor,
    delta: Tensor | None,
    precision: str,
) -> None:
    """Write what these displacements change; or, without a place for it, notes of what these give."""
    (d, n), rows = weight.shape[-2:], x.shape[-2]
    parts = matrix_products.RESIDUAL[precision]
    *operands, in_blocks = factors(weight, x, parts)
    availability.kernels().residual[parts.grid(padded(rows), d, members(weight))](
        *operands, notes, notes if bias is None else bias, notes if delta is None else delta,
        n // unit(n), rows // unit(rows), d, apart(x),
        TRANSFER=TRANSFERS[transfer_of(problem)], HAS_BIAS=bias is not None, NOTES=delta is None,
        N_UNIT=unit(n), ROW_UNIT=unit(rows), IN_BLOCKS=in_blocks,
        **parts.options(precision),
    )  # fmt: skip


def _stepped(
    problem: LocalProblem,
    left: Tensor,
    table: Tensor,
    at: Movings,
    rounded: Tensor,
    numbers: Numbers,
    step: Step,
    by: _ByGram | None = None,
) -> Movings:
    """RMSProp's step with the gradient ``left @ tableᵀ``: in place, but for what is read.

    It is of displacements, and the last one's result is not.
    """
    first, weight, bias = problem.backprop, at["weight"], at.get("bias")
    d, n = weight.tensor.shape[-2:]
    columns, inner = table.shape[-2:]
    new = _tensors(at)
    if by is not None:
        new = {name: torch.empty_like(tensor) for name, tensor in new.items()}
    unused = weight.tensor  # a pointer that is not read
    precision = _precision(problem)
    parts = matrix_products.STEP[precision]
    *operands, in_blocks = factors(left, table, parts)
    availability.kernels().step[parts.grid(columns, d, members(weight.tensor))](
        *operands, *(by or (unused, 0.0, unused, unused)),
        first["weight"], first.get("bias", unused), problem.gamma,
        *weight, new["weight"], rounded, *(bias or (unused,) * 3), new.get("bias", unused),
        problem.start["weight"], problem.start.get("bias", unused),
        unused if step.ok is None else step.ok,
        problem.row_weight, *rmsprop.numbers_of(numbers), step.rate,
        inner // unit(inner), n // unit(n), d, apart(table),
        rmsprop.place(problem.gamma), *rmsprop.places(numbers),
        BY_GRAM=by is not None, HAS_BIAS=bias is not None,
        ROUNDS=_rounds(problem) and step.ok is None, LAST=step.ok is not None,
        UNIT=unit(inner), N_UNIT=unit(n), IN_BLOCKS=in_blocks,
        **parts.options(precision),
    )  # fmt: skip
    return {name: moving._replace(tensor=new[name]) for name, moving in at.items()}


def _rounds(problem: LocalProblem) -> bool:
    """Whether products are of numbers that have fewer digits than the weights."""
    return problem.products == "bf16" and availability.has_bf16()


def _dtype(problem: LocalProblem) -> torch.dtype:
    return ROUNDED if _rounds(problem) else torch.float32


def _precision(problem: LocalProblem) -> str:
    return "bf16" if _rounds(problem) else availability.precision()


def _agree(numbers: dict[str, Numbers]) -> bool:
    """Whether weight and bias, which one kernel moves, have the same numbers."""
    pairs = zip(*(rmsprop.numbers_of(each) for each in numbers.values()), strict=True)
    return all(len(set(map(id, pair))) == 1 or _equal_floats(pair) for pair in pairs)


def _equal_floats(numbers: Sequence[Number]) -> bool:
    return not any(isinstance(n, Tensor) for n in numbers) and len(set(numbers)) == 1
