"""Which local problems have fast paths: ``kernels/local.py`` (GPU) and ``solvers/joined.py`` (CPU)."""

from __future__ import annotations

from torch import Tensor

from torch_locoprop.layers import Layer
from torch_locoprop.layers.linear import LinearLayer
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import LocalLoss, Matching, Squared
from torch_locoprop.paper.regularizers import Regularizer
from torch_locoprop.paper.targets import GradientDescent, MirrorDescent, Target
from torch_locoprop.paper.transfers import Linear, Transfer


def transfer_of(problem: LocalProblem) -> type[Transfer] | None:
    """The f of a linear layer's problem whose residual is ``f(a) − f(a₀)`` and that asks for no more.

    None for all other problems, which take the plain way.
    """
    parts = (problem.layer, problem.loss, problem.target, problem.regularizer, problem.transfer)
    others = problem.g is not None or problem.exchange is not None
    return None if others or isinstance(problem.row_weight, Tensor) else transfer_in(*parts)


def transfer_in(
    layer: Layer, loss: LocalLoss, target: Target, regularizer: Regularizer, transfer: Transfer
) -> type[Transfer] | None:
    """The same, as far as these tell."""
    if type(layer) is not LinearLayer or regularizer.has_direction or regularizer.has_prox:
        return None
    if (type(loss), type(target)) == (Squared, GradientDescent):
        return Linear
    matching = (type(loss), type(target)) == (Matching, MirrorDescent)
    return type(transfer) if matching else None
