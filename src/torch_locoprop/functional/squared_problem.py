"""The local problem of LocoProp-S whose unknown is the displacement of one matrix, without rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.regularizers import REGULARIZERS, Regularizer
from torch_locoprop.paper.tensors import Number
from torch_locoprop.paper.transfers import Linear
from torch_locoprop.paper.variants import VARIANTS


def squared_problem(
    grad: Tensor,
    curvature: Any,
    *,
    lr: Number,
    gamma: Number = 1.0,
    regularizer: Regularizer = REGULARIZERS["none"],
) -> LocalProblem:
    """Return the problem of LocoProp-S for a gradient.

    Args:
        grad: G, ``[..., d, n]``.
        curvature: what the solver takes as C.
        lr: the learning rate η.
        gamma: the distance γ of the target.
        regularizer: the regularizer R.
    """
    return LocalProblem(
        linear_map=Dense(),
        x=curvature,
        start={"weight": torch.zeros_like(grad)},
        fixed={},
        backprop={"weight": grad},
        target=VARIANTS["locoprop-s"].target,
        loss=VARIANTS["locoprop-s"].loss,
        transfer=Linear(),
        gamma=gamma,
        eta=lr,
        regularizer=regularizer,
    )
