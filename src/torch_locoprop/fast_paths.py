"""Which local problems have fast paths: ``kernels/local.py`` (GPU) and ``solvers/joined.py`` (CPU)."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_locoprop.kernels import on_device
from torch_locoprop.layers import Layer
from torch_locoprop.layers.linear import LinearLayer
from torch_locoprop.losses import Matching, Squared
from torch_locoprop.problem import LocalProblem
from torch_locoprop.targets import GradientDescent, MirrorDescent
from torch_locoprop.transfers import Linear, Transfer


def may_have_kernels(kind: Layer, solver: str, device: torch.device) -> bool:
    """Whether a layer's problems are such as our kernels take, as far as these tell."""
    return type(kind) is LinearLayer and solver == "rmsprop" and on_device.has_kernels(device)


def transfer_of(problem: LocalProblem) -> type[Transfer] | None:
    """The f of a linear layer's problem whose residual is ``f(a) − f(a₀)`` and that asks for no more.

    None for all other problems, which take the plain way.
    """
    regularizer = problem.regularizer
    if type(problem.layer) is not LinearLayer or problem.g is not None:
        return None
    if regularizer.has_direction or regularizer.has_prox or isinstance(problem.row_weight, Tensor):
        return None
    parts = (type(problem.loss), type(problem.target))
    if problem.exchange is not None or parts not in (
        (Squared, GradientDescent),
        (Matching, MirrorDescent),
    ):
        return None
    return Linear if parts[0] is Squared else type(problem.transfer)
