"""Layers as matrices ``[W b]``, for each group of a convolution, found without unfolding.

A layer is linear in its weight: the rows X are what it gives for unit vectors as weights.
"""

from __future__ import annotations

import numpy as np
import torch
from reference import Array
from torch import Tensor, nn
from torch.func import functional_call


def group_count(module: nn.Module) -> int:
    return getattr(module, "groups", 1)


def width(module: nn.Module) -> int:
    for name in ("out_features", "out_channels", "nf"):
        if hasattr(module, name):
            return getattr(module, name)
    raise TypeError(f"Unknown layer {module}.")


def as_matrix(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a weight as ``[groups, outputs, inputs]``."""
    groups = group_count(module)
    if type(module).__name__ == "Conv1D":
        return weight.mT[None]
    if getattr(module, "transposed", False):
        parts = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
        return parts.flatten(2)
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def entry_places(module: nn.Module) -> Tensor:
    """Return where each entry of the matrix is in the weight."""
    weight = module.weight
    return as_matrix(module, torch.arange(weight.numel()).reshape(weight.shape))


def rows(module: nn.Module, out: Tensor) -> Array:
    """Return an output, or its gradient, as ``[groups, rows, outputs of a group]``."""
    axis = 1 if isinstance(module, nn.modules.conv._ConvNd) else -1
    groups = group_count(module)
    rows = out.detach().movedim(axis, -1).reshape(-1, groups, width(module) // groups)
    return rows.movedim(1, 0).numpy()


def rows_of_inputs(module: nn.Module, inputs: list[Tensor]) -> Array:
    """Return ``X [groups, rows, inputs]``: what the layer gives for unit vectors as weights."""
    places = entry_places(module)
    columns = []
    for column in range(places.shape[-1]):
        unit = torch.zeros(module.weight.numel(), dtype=torch.float64)
        unit[places[:, 0, column]] = 1.0
        own = {"weight": unit.reshape(module.weight.shape)}
        if module.bias is not None:
            own["bias"] = torch.zeros_like(module.bias)
        out = functional_call(module, own, tuple(inputs))
        columns.append(rows(module, out)[:, :, 0])
    return np.stack(columns, axis=-1)


def columns(X: Array, trained: list[str]) -> Array:
    """Return the rows that multiply the trained tensors: ``[X 1]``, ``X`` or ``1``."""
    parts = [X] if "weight" in trained else []
    if "bias" in trained:
        parts.append(np.ones((len(X), 1)))
    return np.concatenate(parts, axis=1)


def still(module: nn.Module, group: int, trained: list[str], X: Array) -> Array:
    """Return what the frozen tensors add to the pre-activations."""
    outputs = width(module) // group_count(module)
    total = np.zeros((len(X), outputs))
    if "weight" not in trained:
        total = total + X @ as_matrix(module, module.weight.detach())[group].numpy().T
    if "bias" not in trained and module.bias is not None:
        total = total + module.bias.detach().reshape(-1, outputs)[group].numpy()
    return total


def joint(module: nn.Module, group: int, trained: list[str], gradient: bool = False) -> Array:
    """Return ``[W b]`` of the trained tensors, or its gradient."""
    parts = []
    for name in trained:
        tensor = getattr(module, name)
        tensor = (tensor.grad if gradient else tensor).detach()
        if name == "weight":
            parts.append(as_matrix(module, tensor)[group].numpy())
        else:
            parts.append(tensor.reshape(group_count(module), -1)[group].numpy()[:, None])
    return np.concatenate(parts, axis=1)


def write(module: nn.Module, group: int, trained: list[str], joint: Array) -> None:
    new = torch.from_numpy(np.ascontiguousarray(joint))
    if "weight" in trained:
        places = entry_places(module)[group]
        flat = module.weight.data.flatten()
        flat[places] = new[:, : places.shape[1]]
        module.weight.data.copy_(flat.reshape(module.weight.shape))
    if "bias" in trained:
        module.bias.data.view(group_count(module), -1)[group] = new[:, -1]
