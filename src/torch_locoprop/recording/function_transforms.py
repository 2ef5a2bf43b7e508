"""Tells whether code runs inside a transform of ``torch.func``, such as ``vmap`` or ``jacrev``.

Inside a transform a tensor is a wrapper of another one, and autograd nodes belong to the transform. A
layer's rows and gradients cannot be recorded there.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

# PyTorch's own function, because hooks call it for every layer.
innermost: Callable[[], object | None] = _functorch.peek_interpreter_stack
"""Return the innermost transform of ``torch.func`` that is running; None outside of any."""


def reaches_ordinary_autograd(tensor: Tensor) -> bool:
    """Return True if a later ``backward()`` outside of all transforms may go through a tensor."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def has_tangent(tensor: object) -> bool:
    """Return True for a dual tensor inside of ``torch.autograd.forward_ad.dual_level()``.

    Its tangent is computed by a product with the weight too, whose rows are not recorded.
    """
    if not isinstance(tensor, Tensor):
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


# ``torch.autograd.grad(..., is_grads_batched=True)``, as ``jacobian(vectorize=True)`` uses it.
is_batched: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
"""Return True for the gradient of several backward passes in one, which adds to no ``.grad``."""
