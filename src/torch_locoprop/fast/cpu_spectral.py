"""The products of a spectral step on a CPU, by oneDNN.

The plain versions are ``torch.matmul`` and :func:`torch_locoprop.paper.spectral.polar`. PyTorch
computes products of float32 by MKL, which takes about twice the time of oneDNN on some processors (AMD
Zen).
"""

from __future__ import annotations

from torch import Tensor

from torch_locoprop.fast import cpu_onednn
from torch_locoprop.paper.spectral import ITERATIONS, QUINTIC, unit_length

# Multiplications of a matrix product; for smaller ones, calling oneDNN costs more than it saves.
LARGE = 2**20


def fits(left: Tensor) -> bool:
    """Return True if oneDNN can multiply ``left [d, n]`` by a matrix of the same dtype."""
    if type(left) is not Tensor or not left.is_cpu or left.dim() != 2:
        return False
    return cpu_onednn.onednn_supports(left)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of matrices that :func:`fits` has accepted."""
    return cpu_onednn.product(left, right.mT)


def polar(matrix: Tensor) -> Tensor:
    """Return the polar factor of a matrix ``[d, n]``, in the dtype of the matrix.

    The quintic is ``(S (c S + b I) + a I) M`` with ``S = M Mᵀ``: three products, without the copies
    that adding to a product takes.
    """
    a, b, c = QUINTIC
    wide = matrix.shape[-2] <= matrix.shape[-1]
    found = unit_length(matrix if wide else matrix.mT)
    for _ in range(ITERATIONS):
        square = cpu_onednn.product(found, found)
        inner = c * square
        inner.diagonal().add_(b)
        polynomial = cpu_onednn.product(square, inner)  # the factors are symmetric
        polynomial.diagonal().add_(a)
        found = product(polynomial, found)
    return found if wide else found.mT
