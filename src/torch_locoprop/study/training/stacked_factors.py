"""Orthogonal factors and inverses of stacked matrices by matrix products alone, in float64.

A library's QR decomposition, or inverse, of a stack is a loop over its matrices, of which each leaves
most of a GPU idle. Here all matrices take each product together. A GPU for computing in double
precision, such as an H200, multiplies matrices in float64 as fast as in float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LEAF = 128
"""Columns of the triangular factors that the library inverts."""

MOST = 2**26
"""Entries of matrices that are factorised at a time; in float64 they are half a GiB."""

TIE = 1e-10
"""Length of what is added to columns of unit length, far below the rounding of float32."""

SHIFT = 1e-10
"""Added to the eigenvalues of AᵀA, relative to its norm, while A is not nearly orthogonal."""

TOLERANCE = 3e-8
"""Largest entry of QᵀQ − I of a result, a quarter of the distance of numbers in float32 above 1."""

REPETITIONS = 8
"""Most repetitions before the library's QR decomposition takes over. Most matrices need up to four."""


def of_stacks(
    function: Callable[..., Tensor], arguments: Sequence[tuple[Tensor, ...]]
) -> list[Tensor]:
    """Apply a function of stacked matrices to all matrices of one shape together.

    Args:
        function: takes tensors ``[k, n, n]`` and returns one.
        arguments: its arguments, ``[K, n, n]`` each, for each call that it stands for.
    """
    places = defaultdict(list)
    for place, (first, *_) in enumerate(arguments):
        places[first.shape].append(place)
    found: dict[int, Tensor] = {}
    for (members, n, _), own in places.items():
        stacked = [torch.cat(same) for same in zip(*(arguments[i] for i in own), strict=True)]
        parts = zip(*(torch.split(each, max(MOST // n**2, 1)) for each in stacked), strict=True)
        results = torch.cat([function(*part) for part in parts])
        found |= zip(own, torch.split(results, members), strict=True)
    return [found[place] for place in range(len(arguments))]


def inverse(matrix: Tensor) -> Tensor:
    """Return the inverses of positive definite matrices ``[k, n, n]``; NaN where there is none."""
    root = inverse_root(matrix.double())
    return (root @ root.mT).to(matrix.dtype)


def orthogonal_factor(matrix: Tensor, start: Tensor) -> Tensor:
    """Return the factor Q of ``A = QR``, with a positive diagonal of R.

    The Gram matrix ``AᵀA = RᵀR`` has the Cholesky factor R, so ``Q = A R⁻¹``. Repeated with a shift,
    ``AᵀA + sI``, this is orthogonal for ill-conditioned A too (shifted CholeskyQR3: Fukaya et al. 2020,
    *SIAM J. Sci. Comput.* 42). Q is that of A with columns of unit length, which are far better
    conditioned if A is nearly orthogonal but for the lengths of its columns.

    Columns that vanish, or depend on those before them, do not determine those of Q. A multiple of an
    orthogonal matrix determines them, too small to change the others beyond the rounding of float32.
    In a power iteration ``A = M P``, give P: directions without eigenvalues then stay as they are in P.
    The host waits for the device, once a repetition.

    Args:
        matrix: A, ``[k, n, n]``.
        start: orthogonal matrices, ``[k, n, n]``.

    Returns:
        Q, orthogonal to the rounding of float32; NaN for matrices that are not finite.
    """
    wide, tie = matrix.double(), start.double()
    lengths = torch.linalg.vector_norm(wide, dim=-2, keepdim=True)
    vanishes = lengths == 0
    found = torch.where(vanishes, tie, wide / torch.where(vanishes, 1.0, lengths)) + TIE * tie
    eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    for _ in range(REPETITIONS):
        gram = found.mT @ found
        rest = gram - eye
        error = rest.abs().amax((-2, -1))
        if not (error > TOLERANCE).any():  # neither is NaN, of matrices that are not finite
            break
        is_far = torch.linalg.matrix_norm(rest) > 0.5
        shift = torch.where(is_far, SHIFT * torch.linalg.matrix_norm(gram), 0.0)
        found = found @ inverse_root(gram + shift[:, None, None] * eye)
    failed = ~(error <= TOLERANCE) & matrix.isfinite().all(-1).all(-1)
    if failed.any():
        found[failed] = torch.linalg.qr(wide[failed])[0]
    return found.to(matrix.dtype)


def inverse_root(matrix: Tensor) -> Tensor:
    """Return ``R⁻¹``, upper triangular, of the Cholesky decomposition ``M = RᵀR``.

    With ``M = [[A, B], [Bᵀ, D]]``, ``R = [[U, V], [0, W]]`` where ``UᵀU = A``, ``V = U⁻ᵀB`` and
    ``WᵀW = D − VᵀV``, and ``R⁻¹ = [[U⁻¹, −U⁻¹ V W⁻¹], [0, W⁻¹]]``.

    Args:
        matrix: M, symmetric, ``[k, n, n]``.

    Returns:
        ``R⁻¹``; NaN in matrices that are not positive definite.
    """
    n = matrix.shape[-1]
    if n <= LEAF:
        factor, info = torch.linalg.cholesky_ex(matrix, upper=True)
        eye = torch.eye(n, dtype=matrix.dtype, device=matrix.device)
        solved = torch.linalg.solve_triangular(factor, eye.expand_as(matrix), upper=True)
        return torch.where((info != 0)[:, None, None], torch.nan, solved)
    half = 16 * -(-n // 32)  # addresses of aligned blocks
    first = inverse_root(matrix[:, :half, :half])
    v = first.mT @ matrix[:, :half, half:]
    last = inverse_root(matrix[:, half:, half:] - v.mT @ v)
    found = torch.zeros_like(matrix)
    found[:, :half, :half], found[:, half:, half:] = first, last
    found[:, :half, half:] = -(first @ (v @ last))
    return found
