"""Decides which local problems have a form that the fast paths can solve.

The conditions on devices and sizes are in ``triton/local_iterations.py`` and ``cpu_onednn.py``.
"""

from __future__ import annotations

from torch import Tensor

from torch_locoprop.paper.linear_map import Dense, LinearMap
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import LocalLoss, Matching, Squared
from torch_locoprop.paper.regularizers import Regularizer
from torch_locoprop.paper.targets import GradientDescent, MirrorDescent, Target
from torch_locoprop.paper.transfers import Linear, Transfer


def transfer_of(problem: LocalProblem) -> type[Transfer] | None:
    """Return the class of f if the residual is ``f(a) − f(a₀)`` and the layer is dense.

    Returns:
        The class of the transfer f; None for all other problems, and for those with gradients of rows,
        with different weights of rows, or with rows in other processes.
    """
    plain = problem.g is None and problem.others is None
    if not plain or isinstance(problem.row_weight, Tensor):
        return None
    parts = (problem.loss, problem.target, problem.regularizer, problem.transfer)
    return transfer_in(problem.linear_map, *parts)


def transfer_in(
    linear_map: LinearMap,
    loss: LocalLoss,
    target: Target,
    regularizer: Regularizer,
    transfer: Transfer,
) -> type[Transfer] | None:
    """Return what :func:`transfer_of` returns, for the components of a problem not built yet."""
    if type(linear_map) is not Dense or regularizer.has_direction or regularizer.has_prox:
        return None
    if (type(loss), type(target)) == (Squared, GradientDescent):
        return Linear
    matching = (type(loss), type(target)) == (Matching, MirrorDescent)
    return type(transfer) if matching else None
