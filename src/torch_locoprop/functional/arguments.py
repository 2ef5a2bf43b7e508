"""The arguments of all functions: checks of numbers and states, dtypes, and names of components."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from torch_locoprop.config.settings import SETTINGS
from torch_locoprop.paper.names import unknown
from torch_locoprop.paper.regularizers import REGULARIZERS, Regularizer
from torch_locoprop.paper.structured_gram import StructuredGram
from torch_locoprop.paper.tensors import Number, Tensors
from torch_locoprop.solvers import SOLVERS, FirstOrder, Numbers, Solver

FIRST_ORDER: dict[str, Solver] = {
    name: each for name, each in SOLVERS.items() if isinstance(each, FirstOrder)
}

C = TypeVar("C")


def check_settings(**settings: object) -> None:
    """Raise ``ValueError`` for a setting out of its range; the values of tensors are not looked at."""
    for name, value in settings.items():
        if not isinstance(value, Tensor):
            SETTINGS[name].check(name, value)


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which these tensors are computed with: float32 at least.

    Raises:
        ValueError: if a tensor is not of a real floating dtype.
    """
    dtype = torch.float32
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"Invalid tensor of dtype {tensor.dtype}. Must be floating point.")
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def with_gram(grad: Tensor, gram: Tensor) -> tuple[Tensor, StructuredGram]:
    """Return the gradient and C in the dtype in which they are computed with.

    Raises:
        ValueError: if their shapes do not fit each other.
    """
    dtype = working_dtype(grad, gram)
    own = grad.to(dtype)
    return own, StructuredGram.beside(own, gram.to(dtype))


def first_order_solver(solver: str | Solver, eps: Number) -> FirstOrder:
    """Return a first-order solver, given itself or its name.

    Raises:
        ValueError: if there is no such first-order solver.
    """
    found = _named("solver", solver, FIRST_ORDER)
    if not isinstance(found, FirstOrder):
        raise ValueError(
            f"Invalid solver={solver!r}. Must be a first-order solver: {', '.join(FIRST_ORDER)}, or "
            "an instance of one. Closed forms are functions of their own."
        )
    if found is SOLVERS["adagrad"] and not isinstance(eps, Tensor) and not eps > 0:
        raise ValueError(f"Invalid eps={eps}. Must be > 0 with solver='adagrad'.")
    return found


def regularizer_without_fisher(regularizer: str | Regularizer | None) -> Regularizer:
    """Return a regularizer, given itself or its name; None means no regularizer.

    Raises:
        ValueError: if there is no such regularizer, or if it needs a Fisher matrix.
    """
    found = _named("regularizer", "none" if regularizer is None else regularizer, REGULARIZERS)
    if not isinstance(found, Regularizer) or found.needs:
        raise ValueError(
            f"Invalid regularizer={regularizer!r}. Must be None, 'l2', 'l1', or a Regularizer that "
            "needs no Fisher matrix."
        )
    return found


def check_state(state: Tensors | None, solver: FirstOrder, grad: Tensor) -> Tensors:
    """Return the state, ``{}`` for None.

    Raises:
        ValueError: if it is not the state of this solver for a gradient of this shape.
    """
    if state is None:
        return {}
    expected = set(solver.init(grad.new_empty(0), Numbers(1.0)))
    if set(state) != expected:
        raise ValueError(
            f"The state has the entries {sorted(state)}; solver={solver.name!r} keeps "
            f"{sorted(expected)}. Pass None to begin with a new state."
        )
    for name, entry in state.items():
        if entry.dim() > 0 and entry.shape != grad.shape:
            raise ValueError(
                f"The state's entry {name!r} has shape {list(entry.shape)}, the gradient "
                f"{list(grad.shape)}. Pass None to begin with a new state."
            )
    return state


def _named(role: str, value: str | C, known: dict[str, C]) -> C:
    if not isinstance(value, str):
        return value
    if value not in known:
        raise ValueError(unknown(role, value, known))
    return known[value]
