"""A layer's weight and bias as the one matrix that the functions take, and back.

The shapes of each kind of layer (convolutions, GPT-2's ``Conv1D``) are known to ``layers/``.
"""

from __future__ import annotations

from torch import Tensor, nn

from torch_locoprop.layers import LayerKind, layer_kind
from torch_locoprop.paper.tensors import join, split


def as_matrix(layer: nn.Module, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a layer's tensors, or their gradients, as the matrix ``[W b]``.

    Args:
        layer: a linear layer, a convolution, a GPT-2 ``Conv1D`` or a bilinear layer.
        weight: a tensor of the shape of the layer's weight.
        bias: a tensor of the shape of its bias; None leaves the last column out.

    Returns:
        ``[d, n(+1)]``, or ``[G, d/G, n(+1)]`` for a convolution with G groups.

    Raises:
        ValueError: if the layer is of a kind that has no local problem.

    Example::

        >>> grad = as_matrix(layer, layer.weight.grad, layer.bias.grad)
    """
    kind = known_kind(layer)
    tensors = {"weight": kind.matrix("weight", weight)}
    if bias is not None:
        tensors["bias"] = kind.matrix("bias", bias)
    return join(tensors)


def from_matrix(layer: nn.Module, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a matrix ``[W b]`` in the shapes of the layer's weight and bias.

    Args:
        layer: as in :func:`as_matrix`.
        matrix: what :func:`as_matrix` returned, or a displacement of that shape.

    Returns:
        The weight, and the bias or None if the matrix has no column for it.

    Raises:
        ValueError: if the matrix does not have the shape of the layer's matrix.
    """
    kind = known_kind(layer)
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    like = {"weight": kind.matrix("weight", weight)}
    *leading, n = like["weight"].shape
    expected = [[*leading, n]]
    if isinstance(bias, Tensor):
        expected.append([*leading, n + 1])
    if list(matrix.shape) not in expected:
        raise ValueError(
            f"A matrix of shape {list(matrix.shape)} is not that of this "
            f"{type(layer).__name__}. Expected {' or '.join(map(str, expected))}."
        )
    if not isinstance(bias, Tensor) or matrix.shape[-1] == n:
        return kind.restored("weight", matrix, weight), None
    parts = split(matrix, like | {"bias": bias})
    restored = kind.restored("bias", parts["bias"], bias)
    return kind.restored("weight", parts["weight"], weight), restored


def known_kind(layer: nn.Module) -> LayerKind:
    """Return the adapter of a layer.

    Raises:
        ValueError: if the layer is of a kind that has no local problem.
    """
    kind = layer_kind(layer)
    if kind is None:
        raise ValueError(
            f"{type(layer).__name__} has no local problem. Linear layers, convolutions, GPT-2's "
            "Conv1D and bilinear layers have one."
        )
    return kind
