"""Local iterations with RMSProp on a linear layer, in four kernels each on a GPU.

The plain version is ``FirstOrder.solve``. Here pre-activations are ``[d, rows]``: both products of an
iteration then have the layout that the matrix units of a GPU take fastest, and one kernel adds the
bias, applies the transfer, subtracts the target, sums over the rows, and makes the bias's step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_locoprop.gram import Gram
from torch_locoprop.kernels import on_device, rmsprop
from torch_locoprop.kernels.rmsprop import Moving
from torch_locoprop.layers.linear import LinearLayer
from torch_locoprop.losses import Matching, Squared
from torch_locoprop.problem import LocalProblem
from torch_locoprop.solvers.base import Numbers, Tensors, local_rate
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
    if problem.g is not None or problem.base or isinstance(problem.row_weight, Tensor):
        return False
    if regularizer.has_direction or regularizer.has_prox:
        return False
    x = problem.x.square if isinstance(problem.x, Gram) else problem.x
    entries = [entry for state in states.values() for entry in state.values()]
    tensors = [*start.values(), *entries, *problem.first_gradient.values()]
    tensors += problem.fixed.values()
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
    weight = problem.row_weight
    assert isinstance(weight, float | int)
    gram, first = problem.through_gram(local_steps), problem.first_gradient
    now = {name: Moving(tensor, **states[name]) for name, tensor in problem.start.items()}
    new = {name: Moving(*map(torch.empty_like, moving)) for name, moving in now.items()}
    for name, moving in now.items():
        rate = local_rate(0, local_steps, local_decay)
        rmsprop.step(moving, new[name], first[name], numbers[name], rate)
    rows = _Rows(problem) if gram is None and local_steps > 1 else None
    for t in range(1, local_steps):
        rate = local_rate(t, local_steps, local_decay)
        if rows is not None:
            gradients = rows.gradients(new, numbers, rate)
        else:
            assert gram is not None
            at = {name: moving.tensor for name, moving in new.items()}
            gradients = gram.gradient(problem.displacement(at))
        for name, gradient in gradients.items():
            moving = new[name]
            rmsprop.step(moving, moving, gradient, numbers[name], rate, first[name], weight)
    kept = {name: {"square": m.square, "momentum": m.momentum} for name, m in new.items()}
    return {name: moving.tensor for name, moving in new.items()}, kept


class _Rows:
    """The rows of a problem and their targets, as the products of an iteration take them."""

    def __init__(self, problem: LocalProblem) -> None:
        self.problem, self.x = problem, problem.x
        self.turned = problem.x.mT.contiguous()
        self.transfer = _transfer(problem)
        self.first = problem.first_gradient.get("bias")
        start = problem.start["weight"]
        self.target = torch.matmul(start, self.x.mT).contiguous()
        bias = problem.start.get("bias", problem.fixed.get("bias"))
        d, rows = self.target.shape[-2:]
        self.grid = (d, -(-rows // (BLOCK * BLOCKS)), self.target.numel() // (d * rows))
        on_device.kernels().transfer[(d, -(-rows // BLOCK), self.grid[2])](
            self.target, self.target if bias is None else bias, rows, d,
            TRANSFER=self.transfer, HAS_BIAS=bias is not None, BLOCK=BLOCK,
        )  # fmt: skip

    def gradients(self, at: dict[str, Moving], numbers: dict[str, Numbers], rate: float) -> Tensors:
        """What the gradients are more than the first ones; the bias's step may be made already."""
        a = torch.matmul(at["weight"].tensor, self.x.mT).contiguous()
        d, rows = a.shape[-2:]
        moving, fixed = at.get("bias"), self.problem.fixed.get("bias")
        bias = moving.tensor if moving is not None else fixed
        own = numbers.get("bias", numbers["weight"])
        members = rmsprop.members(own)
        moves = moving is not None and self.grid[1] == 1 and members in (1, self.grid[2])
        sums = a.new_empty(*a.shape[:-2], self.grid[1], d)
        unused = a  # a pointer that is not read
        states = moving if moving is not None else Moving(unused, unused, unused)
        on_device.kernels().residual[self.grid](
            a, self.target, sums, unused if bias is None else bias, *states[1:], *states,
            unused if self.first is None else self.first, self.problem.row_weight,
            *rmsprop.numbers_of(own), rate, rows, d, *rmsprop.places(own),
            TRANSFER=self.transfer, HAS_BIAS=bias is not None, MOVES_BIAS=moves,
            BLOCKS=min(BLOCKS, -(-rows // BLOCK)), BLOCK=BLOCK,
        )  # fmt: skip
        gradients = {"weight": torch.matmul(a, self.turned.mT)}
        if moving is not None and not moves:
            # The parts of a member are together only where the members have numbers of their own.
            gradients["bias"] = sums if members == self.grid[2] else sums.sum(-2)
        return gradients


def _transfer(problem: LocalProblem) -> int | None:
    """The kernel's number of what is applied to a pre-activation, where the target is its start's."""
    parts = (type(problem.loss), type(problem.target))
    if parts == (Squared, GradientDescent):
        return TRANSFERS[Linear]
    return TRANSFERS.get(type(problem.transfer)) if parts == (Matching, MirrorDescent) else None
