"""Shapes that all formulas share: a layer's tensors by name, as one matrix, and for populations.

A layer's tensors are a dictionary ``{"weight": [..., d, n], "bias": [..., d]}``. Leading dimensions are
free: K problems of one shape are ``[K, d, n]``, and a number may then be a tensor ``[K]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Generator, Tensor
from torch._subclasses.fake_tensor import FakeTensor

Tensors = dict[str, Tensor]
Number = float | Tensor  # one number for all problems, or a tensor [K] with one for each
Product = Callable[[Tensor, Tensor], Tensor]  # a matrix product; torch.matmul is the plain one
Inverse = Callable[[Tensor], Tensor]  # (L Lᵀ)⁻¹ of L; torch.cholesky_inverse is the plain one


def join(tensors: Tensors) -> Tensor:
    """Return weight and bias as one matrix ``[W b]`` of shape ``[..., d, n(+1)]``.

    The bias, if there is one, is the last column. Without a weight the matrix is ``[..., d, 1]``.
    """
    columns = [tensors["weight"]] if "weight" in tensors else []
    columns += [tensors["bias"].unsqueeze(-1)] if "bias" in tensors else []
    return torch.cat(columns, dim=-1)


def split(joint: Tensor, like: Tensors) -> Tensors:
    """Return the columns of a joint matrix by name; the inverse of :func:`join`.

    Args:
        joint: a matrix ``[W b]`` of shape ``[..., d, n(+1)]``.
        like: tensors whose names and widths say which columns are whose.
    """
    parts: Tensors = {}
    if "weight" in like:
        parts["weight"] = joint[..., : like["weight"].shape[-1]]
    if "bias" in like:
        parts["bias"] = joint[..., -1]
    return parts


def spread(number: Number, like: Tensor) -> Number:
    """Return the number in a shape that multiplies ``like``: ``[K] -> [K, 1, 1]`` for ``[K, d, n]``."""
    if not isinstance(number, Tensor) or number.dim() == 0:
        return number
    return number.reshape(number.shape + (1,) * (like.dim() - number.dim()))


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half-precision tensors as float32, which torch's factorizations need at least."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Return a context that computes in the dtypes of its tensors, on the device of ``like``."""
    device = like.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of all entries of all tensors, in float32 or wider."""
    norms = [
        torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))
        for t in tensors
    ]
    total: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return total


def holds(condition: Tensor, *, unknown: bool) -> bool:
    """Return a boolean scalar as a Python bool; on an accelerator the host waits for it.

    Args:
        condition: a boolean scalar.
        unknown: what to return if the condition has no value.
    """
    return bool(condition) if has_values(condition) else unknown


def has_values(tensor: Tensor) -> bool:
    """Return False on the device ``meta`` and in PyTorch's ``FakeTensorMode``.

    Programs that estimate memory run whole training steps with such tensors.
    """
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def seeded(device: torch.device, seed: int) -> Generator:
    """Return a generator of random numbers for a device; the device ``meta`` has none of its own."""
    return Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
