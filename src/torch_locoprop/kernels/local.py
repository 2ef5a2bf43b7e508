"""Local iterations with RMSProp on a linear layer, in four or five kernels each on a GPU.

The plain version is ``FirstOrder.solve``. Here transfer, target and the sums for the bias are one pass
over the pre-activations, and the solver's step takes the parts of the gradient from where they are.
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
from torch_locoprop.spread import Number
from torch_locoprop.transfers import Linear, ReLU, Sigmoid, Tanh

ROWS, COLUMNS = 128, 32  # of a block of pre-activations

TRANSFERS: dict[type, int] = {Linear: 0, Tanh: 1, Sigmoid: 2, ReLU: 3}


def fits(problem: LocalProblem, states: dict[str, Tensors], numbers: dict[str, Numbers]) -> bool:
    """Whether the kernels take this problem, and do all that it asks for."""
    start, regularizer = problem.start, problem.regularizer
    weight = start.get("weight")
    if weight is None or not on_device.has_kernels(weight.device) or weight.dim() > 3:
        return False
    if type(problem.layer) is not LinearLayer or _transfer(problem) is None or problem.base:
        return False
    if not problem.target.starts_at_zero or problem.g is not None:
        return False
    if regularizer.has_direction or regularizer.has_prox or isinstance(problem.row_weight, Tensor):
        return False
    x = problem.x.square if isinstance(problem.x, Gram) else problem.x
    entries = [entry for state in states.values() for entry in state.values()]
    tensors = [*start.values(), *entries, *problem.first_gradient.values()]
    own = [number for each in numbers.values() for number in _tuple(each)]
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
    for t in range(local_steps):
        rate = local_rate(t, local_steps, local_decay)
        at = {name: moving.tensor for name, moving in now.items()}
        if t == 0:
            gradients = first
        elif gram is not None:
            gradients = gram.gradient(problem.displacement(at))
        else:
            gradients = _by_rows(problem, at, numbers)
        for name, moving in now.items():
            added = first[name] if t > 0 else None
            own = _tuple(numbers[name])
            rmsprop.step(moving, new[name], gradients[name], own, rate, added, weight)
        now = new
    kept = {name: {"square": m.square, "momentum": m.momentum} for name, m in new.items()}
    return {name: moving.tensor for name, moving in new.items()}, kept


def _by_rows(problem: LocalProblem, at: Tensors, numbers: dict[str, Numbers]) -> Tensors:
    """What the gradient is more than the first one; the bias's in parts, one for a block of rows."""
    a = problem.layer.forward(problem.x, **at, **problem.fixed).contiguous()
    rows, d = a.shape[-2:]
    members, blocks = a.numel() // (rows * d), -(-rows // ROWS)
    sums = a.new_empty(*a.shape[:-2], blocks, d)
    transfer = _transfer(problem)
    on_device.kernels().residual[(-(-d // COLUMNS), blocks, members)](
        a, problem.target_rows, sums, rows, d, TRANSFER=transfer, ROWS=ROWS, COLUMNS=COLUMNS
    )
    if members > 1 and "bias" in numbers:
        own = _tuple(numbers["bias"])
        if not any(isinstance(number, Tensor) and number.numel() == members for number in own):
            sums = sums.sum(-2)  # the parts of a member are together only for numbers of its own
    gradient = {"weight": a.mT @ problem.x, "bias": sums}
    return {name: gradient[name] for name in at}


def _transfer(problem: LocalProblem) -> int | None:
    """The kernel's number of what the residual applies to a pre-activation."""
    if type(problem.loss) is Squared:
        return TRANSFERS[Linear]
    return TRANSFERS.get(type(problem.transfer)) if type(problem.loss) is Matching else None


def _tuple(numbers: Numbers) -> tuple[Number, Number, Number, Number]:
    return numbers.lr, numbers.momentum, numbers.decay, numbers.eps
