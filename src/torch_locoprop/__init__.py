"""LocoProp: every layer solves a small local problem after each backward pass."""

from torch_locoprop import (
    baselines,
    functional,
    losses,
    regularizers,
    solvers,
    targets,
    transfers,
    variants,
)
from torch_locoprop.config.settings import Guards
from torch_locoprop.optimizer import LocoProp
from torch_locoprop.training_step import TrainingStep
from torch_locoprop.variants import Variant

__all__ = [
    "Guards",
    "LocoProp",
    "TrainingStep",
    "Variant",
    "baselines",
    "functional",
    "losses",
    "regularizers",
    "solvers",
    "targets",
    "transfers",
    "variants",
]
__version__ = "0.1.0"
