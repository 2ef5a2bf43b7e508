"""The optimizers LocoProp is compared with: K-FAC, Shampoo, and TensorFlow's first-order methods."""

from torch_locoprop.baselines.kfac import KFAC
from torch_locoprop.baselines.shampoo import Shampoo
from torch_locoprop.baselines.tf_optim import SGD, Adagrad, Adam, Momentum, Nesterov, RMSProp

__all__ = ["KFAC", "SGD", "Adagrad", "Adam", "Momentum", "Nesterov", "RMSProp", "Shampoo"]
