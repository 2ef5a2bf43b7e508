"""Local iterations with RMSProp on a linear layer, in four kernels each on a GPU, or in two by XᵀX.

The plain version is ``FirstOrder.solve``. Here the iterations are on displacements: the rounding of a
product is relative to what has moved. Pre-activations are ``[d, rows]``: both products of an iteration
then have the layout that the matrix units of a GPU take fastest, and one kernel applies the transfer,
subtracts the target, sums over the rows, and makes the bias's step. By XᵀX, one product gives the
gradients of weight and bias, and one kernel makes both steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_locoprop.gram import Gram
from torch_locoprop.kernels import on_device, rmsprop
from torch_locoprop.kernels.rmsprop import Moving
from torch_locoprop.layers.linear import LinearLayer
from torch_locoprop.losses import Matching, Squared
from torch_locoprop.problem import LocalProblem
from torch_locoprop.solvers.base import Numbers, Tensors, local_rate
from torch_locoprop.spread import Number
from torch_locoprop.targets import GradientDescent, MirrorDescent
from torch_locoprop.transfers import Linear, ReLU, Sigmoid, Tanh

BLOCK, BLOCKS = 1024, 4  # rows at a time, and times: a program's share of a feature

TRANSFERS: dict[type, int] = {Linear: 0, Tanh: 1, Sigmoid: 2, ReLU: 3}


def fits(problem: LocalProblem, states: dict[str, Tensors], numbers: dict[str, Numbers]) -> bool:
    """Whether the kernels take this problem, and do all that it asks for."""
    start, regularizer = problem.start, problem.regularizer
    weight = start.get("weight")
    if weight is None or not on_device.has_kernels(weight.device) or weight.dim() > 3:
        return False
    if type(problem.layer) is not LinearLayer or _transfer(problem) is None:
        return False
    if problem.g is not None or isinstance(problem.row_weight, Tensor):
        return False
    if regularizer.has_direction or regularizer.has_prox:
        return False
    if problem.loss.is_quadratic(problem.transfer) and not _agree(numbers):
        return False
    x = problem.x.square if isinstance(problem.x, Gram) else problem.x
    if isinstance(problem.x, Gram) and isinstance(problem.x.rows, Tensor):
        return False
    if any(state and state.keys() != {"square", "momentum"} for state in states.values()):
        return False  # another solver was at work before
    entries = [entry for state in states.values() for entry in state.values()]
    tensors = [*start.values(), *entries, *problem.first_gradient.values()]
    tensors += [*problem.fixed.values(), *problem.base.values()]
    own = [number for each in numbers.values() for number in rmsprop.numbers_of(each)]
    return x.dtype == torch.float32 and rmsprop.fits(tensors, own)


def solve(
    problem: LocalProblem,
    states: dict[str, Tensors],
    numbers: dict[str, Numbers],
    local_steps: int,
    local_decay: str,
) -> tuple[Tensors, dict[str, Tensors]]:
    """Return the new tensors and states."""
    gram, first = problem.through_gram(local_steps), problem.first_gradient
    rates = [local_rate(t, local_steps, local_decay) for t in range(local_steps)]
    at = {}
    for name, start in problem.start.items():
        old = Moving(torch.zeros_like(start), **states[name])
        at[name] = Moving(*map(torch.empty_like, old))
        rmsprop.step(old, at[name], first[name], numbers[name], rates[0])
    if gram is not None:
        at = _by_gram(problem, gram, at, numbers, rates[1:])
    elif local_steps > 1:
        _by_rows(problem, at, numbers, rates[1:])
    found = {name: problem.start[name] + moving.tensor for name, moving in at.items()}
    return found, {name: {"square": m.square, "momentum": m.momentum} for name, m in at.items()}


def _by_gram(
    problem: LocalProblem,
    gram: Gram,
    at: dict[str, Moving],
    numbers: dict[str, Numbers],
    rates: Sequence[float],
) -> dict[str, Moving]:
    """The rest of the iterations on the displacements, by the products of the rows with themselves."""
    weight, bias, first = at["weight"], at.get("bias"), problem.first_gradient
    d, n = weight.tensor.shape[-2:]
    products = [gram.square]
    if bias is not None:
        padding = gram.square.new_zeros(*gram.square.shape[:-1], -(n + 1) % 8)
        products += [gram.total.unsqueeze(-1), padding]
    table = torch.cat(products, dim=-1)  # as wide as products are fast
    own, scale = numbers["weight"], problem.row_weight
    elements = d * (n if bias is None else n + 1)
    grid = (-(-elements // rmsprop.BLOCK), weight.tensor.numel() // (d * n))
    unused = (weight.tensor,) * 3  # pointers that are not read
    spare = None if bias is None else Moving(*map(torch.empty_like, bias))
    for rate in rates:
        gradient = torch.matmul(weight.tensor, table)
        on_device.kernels().by_gram[grid](
            gradient, gram.total, float(gram.rows), first["weight"],
            first["weight"] if bias is None else first["bias"],
            *weight, *(bias or unused), *(spare or unused),
            scale, *rmsprop.numbers_of(own), rate, d, n, gradient.shape[-1], *rmsprop.places(own),
            HAS_BIAS=bias is not None, BLOCK=rmsprop.BLOCK,
        )  # fmt: skip
        bias, spare = spare, bias
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


def _by_rows(
    problem: LocalProblem,
    at: dict[str, Moving],
    numbers: dict[str, Numbers],
    rates: Sequence[float],
) -> None:
    """The rest of the iterations on the displacements, in place."""
    x, first = problem.x, problem.first_gradient
    turned = x.mT.contiguous()
    weight, bias = at["weight"], at.get("bias")
    origin = problem.fixed | problem.start
    origin |= {name: origin[name] + tensor for name, tensor in problem.base.items()}
    base = torch.matmul(origin["weight"], x.mT).contiguous()
    start = origin.get("bias")
    d, rows = base.shape[-2:]
    grid = (d, -(-rows // (BLOCK * BLOCKS)), base.numel() // (d * rows))
    own = numbers.get("bias", numbers["weight"])
    at_once = bias is not None and grid[1] == 1  # the bias's step, with its gradient
    unused = Moving(base, base, base)  # pointers that are not read
    states = bias or unused
    for rate in rates:
        a = torch.matmul(weight.tensor, x.mT).contiguous()
        sums = a.new_empty(*a.shape[:-2], grid[1], d)
        on_device.kernels().residual[grid](
            a, base, base if start is None else start, sums, *states, *states,
            first.get("bias", base), problem.row_weight, *rmsprop.numbers_of(own), rate, rows, d,
            *rmsprop.places(own),
            TRANSFER=_transfer(problem), HAS_START=start is not None, HAS_BIAS=bias is not None,
            MOVES_BIAS=at_once, BLOCKS=min(BLOCKS, -(-rows // BLOCK)), BLOCK=BLOCK,
        )  # fmt: skip
        gradient = torch.matmul(a, turned.mT)
        scale = problem.row_weight
        rmsprop.step(weight, weight, gradient, numbers["weight"], rate, first["weight"], scale)
        if bias is not None and not at_once:
            rmsprop.step(bias, bias, sums.sum(-2), own, rate, first["bias"], scale)


def _agree(numbers: dict[str, Numbers]) -> bool:
    """Whether weight and bias, which one kernel moves, have the same numbers."""
    pairs = zip(*(rmsprop.numbers_of(each) for each in numbers.values()), strict=True)
    return all(len(set(map(id, pair))) == 1 or _equal_floats(pair) for pair in pairs)


def _equal_floats(numbers: Sequence[Number]) -> bool:
    return not any(isinstance(n, Tensor) for n in numbers) and len(set(numbers)) == 1


def _transfer(problem: LocalProblem) -> int | None:
    """The kernel's number of what is applied to a pre-activation, where the target is its start's."""
    parts = (type(problem.loss), type(problem.target))
    if parts == (Squared, GradientDescent):
        return TRANSFERS[Linear]
    return TRANSFERS.get(type(problem.transfer)) if parts == (Matching, MirrorDescent) else None
