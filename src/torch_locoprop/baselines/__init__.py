"""The optimizers LocoProp is compared with: K-FAC, Shampoo, and TensorFlow's first-order methods."""

from torch_locoprop.baselines.first_order import SGD, Adagrad, Adam, Momentum, Nesterov, RMSProp
from torch_locoprop.baselines.kfac import KFAC
from torch_locoprop.baselines.shampoo import Shampoo

__all__ = ["KFAC", "SGD", "Adagrad", "Adam", "Momentum", "Nesterov", "RMSProp", "Shampoo"]
