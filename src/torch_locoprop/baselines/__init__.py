"""Optimizers that the paper compares LocoProp with.

:class:`KFAC` and :class:`Shampoo` are second-order methods. :class:`SGD`, :class:`Momentum`,
:class:`Nesterov`, :class:`Adagrad`, :class:`RMSProp` and :class:`Adam` follow TensorFlow's formulas,
which differ from those of ``torch.optim``.
"""

from torch_locoprop.baselines.first_order import SGD, Adagrad, Adam, Momentum, Nesterov, RMSProp
from torch_locoprop.baselines.kfac import KFAC
from torch_locoprop.baselines.shampoo import Shampoo

__all__ = ["KFAC", "SGD", "Adagrad", "Adam", "Momentum", "Nesterov", "RMSProp", "Shampoo"]
