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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_locoprop.fast_paths import transfer_of
from torch_locoprop.gram import Gram
from torch_locoprop.kernels import on_device, rmsprop
from torch_locoprop.kernels.rmsprop import Moving
from torch_locoprop.problem import LocalProblem
from torch_locoprop.solvers.base import Checked, Numbers, Tensors, local_rate
from torch_locoprop.spread import Number
from torch_locoprop.transfers import Linear, ReLU, Sigmoid, Tanh


class Parts(NamedTuple):
    """What one program computes of a product, how many terms at a time, and by how many threads."""

    tall: int
    broad: int
    deep: int
    warps: int
    stages: int

    def grid(self, columns: int, d: int, members: int) -> tuple[int, int, int]:
        return -(-columns // self.broad), -(-d // self.tall), members

    def options(self, precision: str) -> dict[str, object]:
        sizes = {"TALL": self.tall, "BROAD": self.broad, "DEEP": self.deep}
        how = {"PRECISION": "tf32" if precision == "bf16" else precision}  # which bf16 has not
        limit = {} if torch.version.hip else {"maxnreg": self.registers}
        return {**sizes, **how, **limit, "num_warps": self.warps, "num_stages": self.stages}

    @property
    def registers(self) -> int:
        """Of each thread, so that a multiprocessor has room for two programs."""
        return min(2**16 // (2 * 32 * self.warps), 255)


RESIDUAL = {
    "bf16": Parts(128, 128, 64, 8, 3),
    "tf32": Parts(128, 128, 32, 8, 3),
    "tf32x3": Parts(64, 64, 32, 4, 3),
    "ieee": Parts(64, 64, 32, 4, 3),
}
STEP = {**RESIDUAL, "bf16": Parts(64, 128, 64, 4, 3)}
"""The fastest of those that were tried on an H200, by the precision of products."""

NOTED = 1024  # rows that one program takes
TURNED = 64  # rows and columns that one program takes to transpose
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
    if weight is None or not on_device.has_kernels(weight.device) or weight.dim() > 3:
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
    is_float = x.dtype == torch.float32
    return is_float and _is_countable(weight, x.shape[-2]) and rmsprop.fits(tensors, own)


def _is_countable(weight: Tensor, rows: int) -> bool:
    """Whether entries of residuals and inputs have numbers of 32 bits, and programs those of 16."""
    d, n = weight.shape[-2:]
    entries = _members(weight) * max(d, n + 1) * (rows + 7)
    programs = max(-(-max(d, n + 1) // TURNED), -(-rows // NOTED))
    return entries < 2**31 and programs < 2**16


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
    ok = torch.ones(_members(weight), dtype=torch.uint8, device=weight.device)
    steps = [Step(rate, None) for rate in rates[1:-1]] + [Step(rates[-1], ok)]
    if gram is not None:
        at = _by_gram(problem, gram, at, numbers["weight"], steps)
    else:
        at = _by_rows(problem, at, numbers["weight"], steps)
    return Checked(_tensors(at), ok.view(torch.bool)), _states(at)


def _tensors(at: Movings) -> Tensors:
    return {name: moving.tensor for name, moving in at.items()}


def _states(at: Movings) -> dict[str, Tensors]:
    return {name: {"square": m.square, "momentum": m.momentum} for name, m in at.items()}


def _by_gram(
    problem: LocalProblem, gram: Gram, at: Movings, numbers: Numbers, steps: Sequence[Step]
) -> Movings:
    """The rest of the iterations, by the products of the rows with themselves."""
    rows, total = gram.square, gram.total.contiguous()
    table = torch.cat([rows, total.unsqueeze(-2)], -2) if "bias" in at else rows.contiguous()
    table, left = (t.to(_dtype(problem)) for t in (table, at["weight"].tensor))
    for step in steps:
        rounded = torch.empty_like(left) if _rounds(problem) else left
        at = _stepped(problem, left, table, at, rounded, numbers, step, gram)
        left = rounded if _rounds(problem) else at["weight"].tensor
    return at


def _by_rows(
    problem: LocalProblem, at: Movings, numbers: Numbers, steps: Sequence[Step]
) -> Movings:
    """The rest of the iterations, by the rows, in place."""
    x, weight, bias = problem.x, at["weight"], at.get("bias")
    if x.dim() == 3 and x.stride(0) == 0:  # all members have the same
        x = x[:1]
    x = x.contiguous()
    (d, n), rows = weight.tensor.shape[-2:], x.shape[-2]
    lead = -(-rows // 8) * 8
    notes = _notes(problem, x)
    table = _turned(x, lead, bias is not None, _dtype(problem))
    x, rounded = (t.to(_dtype(problem)) for t in (x, weight.tensor))
    delta = x.new_empty(*weight.tensor.shape[:-1], lead)
    precision = _precision(problem)
    parts = RESIDUAL[precision]
    grid = parts.grid(lead, d, _members(weight.tensor))
    w_blocks, x_blocks, in_blocks = _factors(rounded, x, parts)
    for step in steps:
        on_device.kernels().residual[grid](
            w_blocks, x_blocks, notes, notes if bias is None else bias.tensor, delta,
            n // _unit(n), rows // _unit(rows), d, _apart(x),
            TRANSFER=TRANSFERS[transfer_of(problem)], HAS_BIAS=bias is not None,
            N_UNIT=_unit(n), ROW_UNIT=_unit(rows), IN_BLOCKS=in_blocks,
            **parts.options(precision),
        )  # fmt: skip
        _stepped(problem, delta, table, at, rounded, numbers, step)
    return at


def _notes(problem: LocalProblem, x: Tensor) -> Tensor:
    """What has to be known of the preactivations at the start: ``[d, rows]``."""
    transfer = transfer_of(problem)
    if transfer is Linear:
        return x  # a pointer that is not read
    origin = problem.fixed | problem.start
    origin |= {name: origin[name] + tensor for name, tensor in problem.base.items()}
    a = torch.matmul(origin["weight"], x.mT).contiguous()
    start, rows = origin.get("bias"), x.shape[-2]
    on_device.kernels().note_all[(a.numel() // rows, -(-rows // NOTED))](
        a, a if start is None else start.contiguous(), rows,
        TRANSFER=TRANSFERS[transfer], HAS_START=start is not None, BLOCK=NOTED,
    )  # fmt: skip
    return a


def _turned(x: Tensor, lead: int, has_bias: bool, dtype: torch.dtype) -> Tensor:
    """``[X 1]ᵀ``, without the ones if there is no bias."""
    rows, n = x.shape[-2:]
    columns = n + 1 if has_bias else n
    table = x.new_empty(*x.shape[:-2], columns, lead, dtype=dtype)
    grid = (-(-lead // TURNED), -(-columns // TURNED), _members(x))
    on_device.kernels().turn[grid](x, table, rows, lead, n, HAS_BIAS=has_bias, TILE=TURNED)
    return table


def _stepped(
    problem: LocalProblem,
    left: Tensor,
    table: Tensor,
    at: Movings,
    rounded: Tensor,
    numbers: Numbers,
    step: Step,
    gram: Gram | None = None,
) -> Movings:
    """RMSProp's step with the gradient ``left @ tableᵀ``: in place, but for what is read.

    It is of displacements, and the last one's result is not.
    """
    first, weight, bias = problem.backprop, at["weight"], at.get("bias")
    d, n = weight.tensor.shape[-2:]
    columns, inner = table.shape[-2:]
    new = _tensors(at)
    if gram is not None:
        new = {name: torch.empty_like(tensor) for name, tensor in new.items()}
    unused = weight.tensor  # a pointer that is not read
    precision = _precision(problem)
    parts = STEP[precision]
    *factors, in_blocks = _factors(left, table, parts)
    on_device.kernels().step[parts.grid(columns, d, _members(weight.tensor))](
        *factors, unused if gram is None else gram.total.contiguous(),
        0.0 if gram is None else float(gram.rows), first["weight"], first.get("bias", unused),
        problem.gamma,
        *weight, new["weight"], rounded, *(bias or (unused,) * 3), new.get("bias", unused),
        problem.start["weight"], problem.start.get("bias", unused),
        unused if step.ok is None else step.ok,
        problem.row_weight, *rmsprop.numbers_of(numbers), step.rate,
        inner // _unit(inner), n // _unit(n), d, _apart(table),
        rmsprop.place(problem.gamma), *rmsprop.places(numbers),
        BY_GRAM=gram is not None, HAS_BIAS=bias is not None,
        ROUNDS=_rounds(problem) and step.ok is None, LAST=step.ok is not None,
        UNIT=_unit(inner), N_UNIT=_unit(n), IN_BLOCKS=in_blocks,
        **parts.options(precision),
    )  # fmt: skip
    return {name: moving._replace(tensor=new[name]) for name, moving in at.items()}


def _factors(left: Tensor, right: Tensor, parts: Parts) -> tuple[Any, Any, bool]:
    """Those of a product, and whether as what the device fetches by the block."""
    if not on_device.has_blocks(left, right):
        return left, right, False
    # Not flattened: a matrix of one row may have any stride, and only a reshaped one its width.
    left, right = (t.reshape(-1, t.shape[-1]) for t in (left, right))
    return (
        on_device.blocks(left, parts.tall, parts.deep),
        on_device.blocks(right, parts.broad, parts.deep),
        True,
    )


def _rounds(problem: LocalProblem) -> bool:
    """Whether products are of numbers that have fewer digits than the weights."""
    return problem.products == "bf16" and on_device.has_bf16()


def _dtype(problem: LocalProblem) -> torch.dtype:
    return ROUNDED if _rounds(problem) else torch.float32


def _precision(problem: LocalProblem) -> str:
    return "bf16" if _rounds(problem) else on_device.precision()


def _members(tensor: Tensor) -> int:
    """How many problems there are, of tensors ``[members, ·, ·]`` or ``[·, ·]``."""
    return tensor.shape[0] if tensor.dim() == 3 else 1


def _apart(rows: Tensor) -> int:
    """By how many rows those of one member are away from those of the next."""
    return rows.shape[-2] if rows.dim() == 3 and rows.shape[0] > 1 else 0


def _unit(inner: int) -> int:
    """How many entries of such rows can be loaded at once."""
    return next(unit for unit in (8, 4, 2, 1) if inner % unit == 0)


def _agree(numbers: dict[str, Numbers]) -> bool:
    """Whether weight and bias, which one kernel moves, have the same numbers."""
    pairs = zip(*(rmsprop.numbers_of(each) for each in numbers.values()), strict=True)
    return all(len(set(map(id, pair))) == 1 or _equal_floats(pair) for pair in pairs)


def _equal_floats(numbers: Sequence[Number]) -> bool:
    return not any(isinstance(n, Tensor) for n in numbers) and len(set(numbers)) == 1
