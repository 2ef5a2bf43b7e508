"""Local iterations with RMSProp on a linear layer, on a GPU: two kernels each, or one with XᵀX.

The plain version is ``FirstOrder.solve``. The kernels, which are in ``kernels.py``, differ from it:

- They iterate on displacements, so that rounding errors of products are relative to those.
- Residuals are ``[d, rows]``, and the inputs are transposed once. Both products of an iteration then
  have the layout that is fastest on the matrix units of a GPU.
- The first product is not written, only the change of the transfer's value. For that the
  pre-activations at the start are encoded once (``transfer_change.py``).
- The second product, the gradient of weight and bias, is not written either: the same kernel takes
  the solver's step. With XᵀX the first product is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_locoprop.fast.eligibility import transfer_of
from torch_locoprop.fast.triton import availability, matrix_products, rmsprop
from torch_locoprop.fast.triton.matrix_products import (
    member_stride,
    members,
    operands,
    padded,
    transposed_inputs,
    unexpanded,
    unit,
)
from torch_locoprop.fast.triton.rmsprop import TensorAndState
from torch_locoprop.paper.gram import Gram, full_products
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Number, Tensors
from torch_locoprop.paper.transfers import Linear, ReLU, Sigmoid, Tanh
from torch_locoprop.solvers import Numbers, local_rate
from torch_locoprop.solvers.base import Checked

ROUNDED = torch.bfloat16  # dtype of the factors of products with products="bf16"

Iterates = dict[str, TensorAndState]  # the displacements of "weight" and "bias", with their states

# The numbers of the transfers in the kernels, see transfer_change.py.
TRANSFERS: dict[type | None, int] = {Linear: 0, Tanh: 1, Sigmoid: 2, ReLU: 3}


class Step(NamedTuple):
    """The numbers of one local iteration after the first."""

    rate: float  # factor of the learning rate
    ok: Tensor | None  # only in the last iteration: flags [members], set to 0 if not finite


def fits(problem: LocalProblem, states: dict[str, Tensors], numbers: dict[str, Numbers]) -> bool:
    """Return True if the kernels support a problem in every respect.

    Args:
        problem: the local problem.
        states: RMSProp's state of each tensor; empty before the first step.
        numbers: RMSProp's numbers for each tensor.
    """
    start = problem.start
    weight = start.get("weight")
    if weight is None or not availability.has_kernels(weight.device) or weight.dim() > 3:
        return False
    if transfer_of(problem) not in TRANSFERS or not _are_equal(numbers):
        return False
    if problem.structure is not None:
        return False
    x = problem.x.square if isinstance(problem.x, Gram) else problem.x
    if isinstance(problem.x, Gram) and isinstance(problem.x.rows, Tensor):
        return False
    if any(state and state.keys() != {"square", "momentum"} for state in states.values()):
        return False  # the state of another solver
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
    """Solve a problem that :func:`fits`; return the new tensors and the new states.

    The arguments are those of :meth:`torch_locoprop.solvers.Solver.solve`, with states that are not
    empty.
    """
    gram, gamma = problem.through_gram(local_steps), problem.gamma
    rates = [local_rate(t, local_steps, local_decay) for t in range(local_steps)]
    at = {}
    for name, start in problem.start.items():
        old = TensorAndState(start, **states[name])
        at[name] = TensorAndState(*map(torch.empty_like, old))
        gradient, more = problem.backprop[name], local_steps > 1
        rmsprop.step(old, at[name], gradient, numbers[name], rates[0], gamma, from_zero=more)
    if local_steps == 1:
        return _tensors(at), _states(at)
    weight = problem.start["weight"]
    ok = torch.ones(members(weight), dtype=torch.uint8, device=weight.device)
    steps = [Step(rate, None) for rate in rates[1:-1]] + [Step(rates[-1], ok)]
    if gram is not None:
        at = _iterate_by_gram(problem, gram, at, numbers["weight"], steps)
    else:
        rows = ByRows(problem, at)
        for step in steps:
            rows.residual()
            rows.step(numbers["weight"], step)
    return Checked(_tensors(at), ok.view(torch.bool)), _states(at)


def _tensors(at: Iterates) -> Tensors:
    return {name: own.tensor for name, own in at.items()}


def _states(at: Iterates) -> dict[str, Tensors]:
    return {name: {"square": own.square, "momentum": own.momentum} for name, own in at.items()}


def _iterate_by_gram(
    problem: LocalProblem, gram: Gram, at: Iterates, numbers: Numbers, steps: Sequence[Step]
) -> Iterates:
    """Take all iterations after the first with XᵀX; return the last iterates."""
    column_sums, left = gram.total.contiguous(), at["weight"].tensor
    total = unexpanded(gram.total.unsqueeze(-1))
    centred = _centred(unexpanded(gram.square), total, float(gram.rows))
    sums = _partial_sums(left, column_sums, matrix_products.STEP[_precision(problem)].width)
    centred, left = (t.to(_dtype(problem)).contiguous() for t in (centred, left))
    for step in steps:
        rounded = torch.empty_like(left) if _rounds(problem) else left
        terms = _GramTerms(column_sums, float(gram.rows), sums, torch.empty_like(sums))
        at = _take_step(problem, left, centred, at, rounded, numbers, step, terms)
        left, sums = rounded if _rounds(problem) else at["weight"].tensor, terms.new_partial_sums
    return at


class _GramTerms(NamedTuple):
    """The arguments of a step with XᵀX besides XᵀX, in the order of the kernel's arguments."""

    column_sums: Tensor  # Xᵀ1
    row_count: float
    partial_sums: Tensor  # W Xᵀ1 [..., parts, d] for the displacement W: the sum over the parts
    new_partial_sums: Tensor  # written by the kernel, for the new W


def _centred(square: Tensor, total: Tensor, rows: float) -> Tensor:
    """Return XᵀX of the rows minus their mean, with which products have smaller rounding errors."""
    return torch.addcmul(square, total, total.mT, value=-1 / rows)


def _partial_sums(weight: Tensor, column_sums: Tensor, width: int) -> Tensor:
    """Return ``W Xᵀ1 [..., parts, d]`` in float32, with a part for each program along the columns."""
    *lead, d, n = weight.shape
    sums = weight.new_zeros(*lead, -(-n // width), d)
    if lead:
        with full_products(weight):
            sums[..., :1, :] = (weight @ column_sums.unsqueeze(-1)).mT
    else:  # without cuBLAS, which takes memory for every stream that uses it
        sums[0] = (weight * column_sums).sum(-1)
    return sums


class ByRows:
    """Runs all iterations after the first, from the rows, in place: ``residual``, then ``step``.

    Args:
        problem: the local problem.
        at: the displacements after the first iteration, which are updated in place.
    """

    def __init__(self, problem: LocalProblem, at: Iterates) -> None:
        self._problem, self._at = problem, at
        weight = at["weight"].tensor
        x = unexpanded(problem.x).contiguous()
        self._codes = _codes_at_start(problem, x)
        columns = padded(x.shape[-2])
        self._transposed = transposed_inputs(x, columns, "bias" in at, _dtype(problem))
        self._x, self._rounded = (t.to(_dtype(problem)) for t in (x, weight))
        self._delta = self._x.new_empty(*weight.shape[:-1], columns)

    def residual(self) -> None:
        """Compute the residual δ at the present displacements."""
        bias, precision = self._at.get("bias"), _precision(self._problem)
        own = None if bias is None else bias.tensor
        _write_residual(
            self._problem, self._rounded, own, self._x, self._codes, self._delta, precision
        )

    def step(self, numbers: Numbers, step: Step) -> None:
        """Take the solver's step with the gradient that follows from the residual."""
        left, right = self._delta, self._transposed
        _take_step(self._problem, left, right, self._at, self._rounded, numbers, step)


def _codes_at_start(problem: LocalProblem, x: Tensor) -> Tensor:
    """Return the codes ``[..., d, rows]`` of the pre-activations at the start."""
    transfer, before = transfer_of(problem), problem.before
    if transfer is Linear:
        return x  # the kernels do not read this pointer
    origin = problem.fixed | problem.start
    origin |= {name: origin[name] + tensor for name, tensor in problem.base.items()}
    bias = origin["bias"].contiguous() if "bias" in origin else None
    weight, rows = origin["weight"].contiguous(), x.shape[-2]
    codes = weight.new_empty(*weight.shape[:-1], rows)
    if before is None:
        _write_residual(problem, weight, bias, x, codes, None, availability.precision())
        return codes
    d, tile = weight.shape[-2], matrix_products.TRANSPOSE_TILE
    availability.kernels().encode_all[(-(-rows // tile), -(-d // tile), members(weight))](
        before.a, codes if bias is None else bias, codes, before.lr, before.weight_decay, rows, d,
        rmsprop.place(before.lr), rmsprop.place(before.weight_decay),
        TRANSFER=TRANSFERS[transfer], HAS_BIAS=bias is not None, TILE=tile,
    )  # fmt: skip
    return codes


def _write_residual(
    problem: LocalProblem,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    codes: Tensor,
    delta: Tensor | None,
    precision: str,
) -> None:
    """Write the residual at the displacements ``weight`` and ``bias`` to ``delta``.

    If ``delta`` is None, ``weight`` and ``bias`` are those at the start, and the codes of their
    pre-activations are written to ``codes``.
    """
    (d, n), rows = weight.shape[-2:], x.shape[-2]
    tiles = matrix_products.RESIDUAL[precision]
    left, right, are_descriptors = operands(weight, x, tiles)
    availability.kernels().residual[tiles.grid(padded(rows), d, members(weight))](
        left, right, codes, codes if bias is None else bias, codes if delta is None else delta,
        n // unit(n), rows // unit(rows), d, member_stride(x),
        TRANSFER=TRANSFERS[transfer_of(problem)], HAS_BIAS=bias is not None,
        ENCODES=delta is None, N_UNIT=unit(n), ROW_UNIT=unit(rows), DESCRIPTORS=are_descriptors,
        **tiles.options(precision),
    )  # fmt: skip


def _take_step(
    problem: LocalProblem,
    left: Tensor,
    right: Tensor,
    at: Iterates,
    rounded: Tensor,
    numbers: Numbers,
    step: Step,
    terms: _GramTerms | None = None,
) -> Iterates:
    """Take RMSProp's step on displacements and return the new ones; in the last step, new tensors.

    Args:
        problem: the local problem.
        left: the left factor of the gradient ``left @ rightᵀ``: δ, or with XᵀX the displacement.
        right: the right factor of the product: the transposed inputs, or XᵀX of the centred rows.
        at: the displacements with their states. The states are updated in place; the displacements too,
            except with XᵀX, where the kernel reads them as a factor.
        rounded: where the new displacement of the weight is written in the dtype of the factors.
        numbers: RMSProp's numbers, the same for weight and bias.
        step: the numbers of this iteration.
        terms: what a step with XᵀX needs; None for a step from rows.
    """
    first, weight, bias = problem.backprop, at["weight"], at.get("bias")
    d, n = weight.tensor.shape[-2:]
    columns, inner = right.shape[-2:]
    new = _tensors(at)
    if terms is not None:
        new = {name: torch.empty_like(tensor) for name, tensor in new.items()}
    unused = weight.tensor  # a pointer that the kernel does not read
    precision = _precision(problem)
    tiles = matrix_products.STEP[precision]
    *factors, are_descriptors = operands(left, right, tiles)
    availability.kernels().step[tiles.grid(columns, d, members(weight.tensor))](
        *factors, *(terms or (unused, 0.0, unused, unused)),
        first["weight"], first.get("bias", unused), problem.gamma,
        *weight, new["weight"], rounded, *(bias or (unused,) * 3), new.get("bias", unused),
        problem.start["weight"], problem.start.get("bias", unused),
        unused if step.ok is None else step.ok,
        problem.row_weight, *rmsprop.numbers_of(numbers), step.rate,
        inner // unit(inner), n // unit(n), d, member_stride(right),
        rmsprop.place(problem.gamma), *rmsprop.places(numbers),
        BY_GRAM=terms is not None, HAS_BIAS=bias is not None,
        ROUNDS=_rounds(problem) and step.ok is None, LAST=step.ok is not None,
        INNER_UNIT=unit(inner), N_UNIT=unit(n), DESCRIPTORS=are_descriptors,
        **tiles.options(precision),
    )  # fmt: skip
    return {name: own._replace(tensor=new[name]) for name, own in at.items()}


def _rounds(problem: LocalProblem) -> bool:
    """Return True if the factors of products are rounded to :data:`ROUNDED`."""
    return problem.products == "bf16" and availability.has_bf16()


def _dtype(problem: LocalProblem) -> torch.dtype:
    return ROUNDED if _rounds(problem) else torch.float32


def _precision(problem: LocalProblem) -> str:
    return "bf16" if _rounds(problem) else availability.precision()


def _are_equal(numbers: dict[str, Numbers]) -> bool:
    """Return True if weight and bias have equal numbers: one kernel updates both."""
    pairs = zip(*(rmsprop.numbers_of(each) for each in numbers.values()), strict=True)
    return all(len(set(map(id, pair))) == 1 or _equal_floats(pair) for pair in pairs)


def _equal_floats(numbers: Sequence[Number]) -> bool:
    return not any(isinstance(n, Tensor) for n in numbers) and len(set(numbers)) == 1
