"""Solvers of the local problem, by name."""

from torch_locoprop.solvers.base import LOCAL_DECAYS, Numbers, Solver, local_rate
from torch_locoprop.solvers.exact import Exact
from torch_locoprop.solvers.first_order import (
    Adagrad,
    Adam,
    FirstOrder,
    Momentum,
    Nesterov,
    RmsProp,
    Sgd,
)

SOLVERS: dict[str, Solver] = {
    solver.name: solver
    for solver in (Sgd(), Momentum(), Nesterov(), Adagrad(), RmsProp(), Adam(), Exact())
}

__all__ = [
    "LOCAL_DECAYS",
    "SOLVERS",
    "Adagrad",
    "Adam",
    "Exact",
    "FirstOrder",
    "Momentum",
    "Nesterov",
    "Numbers",
    "RmsProp",
    "Sgd",
    "Solver",
    "local_rate",
]
