"""RMSProp's step in place: one kernel on a GPU, three passes over the tensors on a CPU.

The plain version is :meth:`torch_locoprop.solvers.first_order.RmsProp.step`, which makes new tensors.
"""

from __future__ import annotations

from torch import Tensor

from torch_locoprop.fast.triton import availability, rmsprop
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.solvers import RmsProp
from torch_locoprop.solvers.base import Numbers


def advance_(
    tensor: Tensor, gradient: Tensor, state: Tensors, numbers: Numbers, rate: float
) -> None:
    """Update a tensor and its state in place by one step of RMSProp.

    Args:
        tensor: the tensor.
        gradient: its gradient.
        state: its state, with the entries ``square`` and ``momentum``.
        numbers: the solver's numbers.
        rate: a factor of the learning rate.
    """
    v, m = state["square"], state["momentum"]
    own = (numbers.lr, numbers.momentum, numbers.decay, numbers.eps)
    on_gpu = tensor.is_cuda or availability.INTERPRETED
    if on_gpu and rmsprop.fits([tensor, gradient, v, m], own):
        in_place = rmsprop.TensorAndState(tensor, v, m)
        rmsprop.step(in_place, in_place, gradient, numbers, rate)
    elif True in [isinstance(number, Tensor) for number in own]:
        RmsProp().advance_(tensor, gradient, state, numbers, rate)
    else:
        eta, mu, rho, eps = map(float, own)
        v.mul_(rho).addcmul_(gradient, gradient, value=1 - rho)
        m.mul_(mu).addcmul_(gradient, (v + eps).rsqrt_(), value=eta * rate)
        tensor.sub_(m)
