"""The formulas of K-FAC's step: both Kronecker factors with damping, their inverses, and clipping.

Pure functions of tensors. Which factors they are, and where they come from, is in ``kfac.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_locoprop.paper.closed_form import eigh
from torch_locoprop.paper.fisher import cholesky
from torch_locoprop.paper.tensors import at_least_float32, holds


def damped_factors(A: Tensor, D: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return ``A + π √λ I`` and ``D + √λ/π I`` with ``π² = mean(diag A) / mean(diag D)``.

    The Kronecker product of the two is ``A ⊗ D + λ I`` plus two cross terms. This π minimises a bound
    of the cross terms in the trace norm (Martens & Grosse, Section 6.3). If a factor is zero, π = 1.

    Args:
        A: ``[..., n, n]``.
        D: ``[..., d, d]``.
        damping: λ.
    """
    ridges = _ridges(A, D, damping)
    return (
        A + ridges[0] * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device),
        D + ridges[1] * torch.eye(D.shape[-1], dtype=D.dtype, device=D.device),
    )


def damped_inverses(A: Tensor, D: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return the inverses of :func:`damped_factors`, which are finite if A and D are.

    A and D are positive semidefinite up to rounding. If the ridge is smaller than the rounding error,
    a damped factor may have no Cholesky factor. The inverse of such a factor is computed from its
    eigenvalues. Eigenvalues below the ridge, which do not exist in exact arithmetic, are replaced by
    the ridge.

    Args:
        A: ``[..., n, n]``.
        D: ``[..., d, d]``.
        damping: λ.
    """
    inverses = []
    ridges = _ridges(A, D, damping)
    for factor, ridge in zip(damped_factors(A, D, damping), ridges, strict=True):
        inverse = torch.cholesky_inverse(cholesky(at_least_float32(factor)))
        if not holds(inverse.isfinite().all(), unknown=True):
            values, vectors = eigh(factor.double())
            values = torch.maximum(values, ridge.squeeze(-1).to(values.dtype))
            inverse = vectors / values.unsqueeze(-2) @ vectors.mT
        inverses.append(inverse.to(factor.dtype))
    return inverses[0], inverses[1]


def _ridges(A: Tensor, D: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return ``π √λ`` and ``√λ/π``, ``[..., 1, 1]``."""
    diagonals = [factor.diagonal(dim1=-2, dim2=-1) for factor in (A, D)]
    sizes = [diagonal.mean(-1)[..., None, None] for diagonal in diagonals]
    degenerate = (sizes[0] <= 0) | (sizes[1] <= 0)
    pi = torch.where(degenerate, 1.0, (sizes[0] / sizes[1]).sqrt())
    return pi * damping**0.5, damping**0.5 / pi


def clip_scale(directions: list[Tensor], gradients: list[Tensor], lr: float, clip: float) -> Tensor:
    """Return the factor ``min(1, √(clip / (lr² Σ ⟨direction, G⟩)))`` for the steps of all layers.

    ``⟨direction, G⟩`` is the squared norm of a layer's direction in the metric of the Fisher matrix.
    With damping near the precision of the dtype, it may round below zero. The magnitude of the
    product is then the size of the rounding error and counts as length, so that a direction of
    rounding errors is clipped too.

    Args:
        directions: ``D⁻¹ G A⁻¹`` of each layer.
        gradients: G of each layer.
        lr: learning rate η.
        clip: upper bound of ``lr² Σ ⟨direction, G⟩``.
    """
    products = [(v * g).sum().abs() for v, g in zip(directions, gradients, strict=True)]
    norm = torch.stack([product.to(products[0].device) for product in products]).sum()
    return (clip / (lr**2 * norm)).sqrt().clamp_max(1.0)
