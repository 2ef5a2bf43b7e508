"""Weight and bias of a layer as one matrix, for the forms that treat them together."""

from __future__ import annotations

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def join(tensors: Tensors) -> Tensor:
    """Weight and bias as one matrix ``[..., d, n(+1)]``; the bias is the last column."""
    columns = [tensors["weight"]] if "weight" in tensors else []
    columns += [tensors["bias"].unsqueeze(-1)] if "bias" in tensors else []
    return torch.cat(columns, dim=-1)


def split(joint: Tensor, like: Tensors) -> Tensors:
    """The inverse of :func:`join`, with the entries of ``like``."""
    parts: Tensors = {}
    if "weight" in like:
        parts["weight"] = joint[..., : like["weight"].shape[-1]]
    if "bias" in like:
        parts["bias"] = joint[..., -1]
    return parts
