"""Solvers of the local problem, by name."""

from torch_locoprop.solvers.averaged_preconditioned import AveragedPreconditioned
from torch_locoprop.solvers.base import Numbers, Solver
from torch_locoprop.solvers.exact import Exact
from torch_locoprop.solvers.first_order import (
    LOCAL_DECAYS,
    Adagrad,
    Adam,
    FirstOrder,
    Momentum,
    Nesterov,
    RmsProp,
    Sgd,
    local_rate,
)
from torch_locoprop.solvers.preconditioned import Preconditioned
from torch_locoprop.solvers.spectral import Spectral

SOLVERS: dict[str, Solver] = {
    solver.name: solver
    for solver in (
        *(Sgd(), Momentum(), Nesterov(), Adagrad(), RmsProp(), Adam()),
        *(Exact(), Preconditioned(), AveragedPreconditioned(), Spectral()),
    )
}
SOLVERS["general"] = Spectral(agreement=1.0, bias_rate=0.0)  # the solver of preset="general"

__all__ = [
    "LOCAL_DECAYS",
    "SOLVERS",
    "Adagrad",
    "Adam",
    "AveragedPreconditioned",
    "Exact",
    "FirstOrder",
    "Momentum",
    "Nesterov",
    "Numbers",
    "Preconditioned",
    "RmsProp",
    "Sgd",
    "Solver",
    "Spectral",
    "local_rate",
]
