"""The gradients of a linear layer's local problem on a CPU, with weight and bias as one matrix.

The plain version is ``LocalProblem.gradient``. Here the bias is a column of the weight matrix, with
input 1, so that the matrix products include it. Pre-activations are ``[d, rows]``, so that the left
factor of each product is contiguous. oneDNN, if PyTorch has it, computes such products faster than
``torch.mm`` and applies the transfer before it writes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from torch_locoprop.fast.eligibility import transfer_of
from torch_locoprop.paper.gram import Gram
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.paper.transfers import Linear, ReLU, Sigmoid, Tanh, Transfer
from torch_locoprop.solvers.first_order import Iterate

SWITCHED_OFF = False  # True: use the plain version for all problems (for tests)

# Multiplications of a matrix product; for smaller ones, joining weight and bias costs more than it
# saves.
LARGE = 2**22
MULTIPLE = 8  # matrices get a multiple of so many columns, which makes products faster

# For each transfer, its in-place function and oneDNN's name for it. oneDNN's ReLU is not used: it turns
# NaN into zero.
TRANSFERS: dict[type[Transfer], tuple[Callable[[Tensor], Tensor] | None, str]] = {
    Linear: (None, "none"),
    Tanh: (torch.tanh_, "tanh"),
    Sigmoid: (torch.sigmoid_, "sigmoid"),
    ReLU: (torch.relu_, "none"),
}


class Joined(Iterate):
    """The iterate of a local problem as one matrix ``[W b]``, updated in place, and its gradient.

    Args:
        problem: the local problem.
        gram: XᵀX of its rows; None computes gradients from the rows.
    """

    def __init__(self, problem: LocalProblem, gram: Gram | None) -> None:
        self.problem, self._gram = problem, gram
        self._iterate = _joined(problem.start)
        if gram is None:
            self._change = _by_rows(problem, self._iterate)
        else:
            self._change = _by_gram(problem, gram)
            self._iterate.zero_()  # the displacement, in which the gradient is linear
        self.at = _split(self._iterate, problem.start)

    def gradient(self) -> Tensors:
        change = self._change(self._iterate)
        if self.problem.row_weight != 1:
            change *= self.problem.row_weight
        changes = _split(change, self.problem.start)
        return {name: t.add_(self.problem.first_gradient[name]) for name, t in changes.items()}

    def found(self) -> Tensors:
        if self._gram is None:
            return self.at
        return {name: t.add_(self.problem.start[name]) for name, t in self.at.items()}


def fits(problem: LocalProblem) -> bool:
    """Return True if :class:`Joined` can compute the gradients of a problem on the CPU.

    :class:`Joined` is faster if a matrix product has at least :data:`LARGE` multiplications.
    """
    weight, x = problem.start.get("weight"), problem.x
    if SWITCHED_OFF or weight is None or weight.dim() != 2 or problem.structure is not None:
        return False
    if transfer_of(problem) not in TRANSFERS or problem.fixed or problem.base:
        return False
    tensors = [
        x.square if isinstance(x, Gram) else x,
        *problem.start.values(),
        *problem.backprop.values(),
    ]
    dtype = torch.promote_types(weight.dtype, torch.float32)  # excludes half precision
    return all(type(t) is Tensor and t.dtype == dtype for t in tensors)


def _by_rows(problem: LocalProblem, start: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function of ``[W b]``: the gradient minus that at the start, from rows.

    The function computes ``(f(a) − f(a₀))ᵀ[X 1]``.
    """
    transfer = transfer_of(problem)
    assert transfer is not None
    ones = {"bias": torch.ones_like(problem.x[:, 0])} if "bias" in problem.start else {}
    x = _joined({"weight": problem.x} | ones)
    y0 = product(start, x, transfer)
    return lambda at: product(product(at, x, transfer).sub_(y0), x.mT)


def _by_gram(problem: LocalProblem, gram: Gram) -> Callable[[Tensor], Tensor]:
    """Return a function of the displacement ``Δ`` of ``[W b]``: the gradient minus that at the start.

    The function computes ``Δ [X 1]ᵀ[X 1]``.
    """
    n, biases = len(gram.square), len(problem.start) - 1
    square = gram.square.new_zeros(_columns(n + biases), _columns(n + biases))
    square[:n, :n] = gram.square
    if biases:
        square[n, :n] = square[:n, n] = gram.total
        square[n, n] = gram.rows
    return lambda moved: product(moved, square)


def product(left: Tensor, right: Tensor, transfer: type[Transfer] = Linear) -> Tensor:
    """Return ``f(left @ rightᵀ)``.

    Args:
        left: a contiguous matrix ``[d, n]``.
        right: a matrix ``[rows, n]``.
        transfer: the transfer f, one of :data:`TRANSFERS`.
    """
    in_place, name = TRANSFERS[transfer]
    if not onednn_supports(left):
        result, applied = left @ right.mT, False
    else:
        result = torch.ops.mkldnn._linear_pointwise(left, right, None, name, [], "")
        applied = name != "none"
    return result if applied or in_place is None else in_place(result)


def onednn_supports(tensor: Tensor) -> bool:
    """Return True if oneDNN computes the products of :func:`product` with a matrix as left factor."""
    enabled = bool(torch.backends.mkldnn.enabled)
    return tensor.dtype == torch.float32 and enabled and _has_onednn()


@cache
def _has_onednn() -> bool:
    """Return True if PyTorch has oneDNN and its private operation for matrix products."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _joined(tensors: Tensors) -> Tensor:
    """Return weight and bias as one matrix ``[d, n(+1)]``, padded with zero columns."""
    d, n = tensors["weight"].shape
    joined = tensors["weight"].new_empty(d, _columns(n + len(tensors) - 1))
    joined[:, :n] = tensors["weight"]
    joined[:, n:] = 0
    if "bias" in tensors:
        joined[:, n] = tensors["bias"]
    return joined


def _split(joined: Tensor, like: Tensors) -> Tensors:
    """Return views of weight and bias in a matrix of :func:`_joined`, for the names in ``like``."""
    n = like["weight"].shape[1]
    return {name: joined[:, :n] if name == "weight" else joined[:, n] for name in like}


def _columns(needed: int) -> int:
    """Return the number of columns of a padded matrix."""
    return -(-needed // MULTIPLE) * MULTIPLE
