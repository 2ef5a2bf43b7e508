"""The integral of softplus and its Fenchel dual (Table 2), which need Spence's function Li₂.

Both use one rapidly converging series, where ``Bₙ`` are the Bernoulli numbers:

    G(u) = −Li₂(1 − eᵘ) = u + u²/4 + Σₖ B₂ₖ u²ᵏ⁺¹ / (2k+1)!

With ``u = softplus(a)``, ``1 − eᵘ = −eᵃ``, so the integral of softplus is ``F(a) = G(softplus(a))``.
The series is used for ``0 ≤ u ≤ log 2`` only, which is ``a ≤ 0``; the reflection
``F(a) + F(−a) = π²/6 + a²/2`` gives positive ``a``. The functions work elementwise on tensors of any
shape and float dtype, and are differentiable any number of times.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

_LOG_2 = math.log(2.0)
_PI_SQUARED_OVER_6 = math.pi**2 / 6

# B₂ₖ for k = 1, ..., 8. At u = log 2 the last term is 5e-17 of the value and 7e-16 of the slope.
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_COEFFICIENTS = tuple(b / math.factorial(2 * k + 1) for k, b in enumerate(_BERNOULLI, start=1))


def softplus_integral(a: Tensor) -> Tensor:
    """Return ``F(a) = −Li₂(−eᵃ)``, with ``F' = softplus`` and ``F(−∞) = 0``: ``[...] -> [...]``."""
    # abs() has the derivative zero at zero, where the derivative of one of the branches is needed.
    magnitude = torch.where(a < 0, -a, a)
    series = _series(-logsigmoid(magnitude))
    return torch.where(a < 0, series, _PI_SQUARED_OVER_6 + 0.5 * a.square() - series)


def softplus_dual(y: Tensor) -> Tensor:
    """Return ``F*(y) = y log(eʸ − 1) − G(y)`` for ``y ≥ 0``, with ``F*(0) = 0``: ``[...] -> [...]``."""
    low = y.clamp(max=_LOG_2)
    tiny = torch.finfo(y.dtype).tiny
    below = low * low.expm1().clamp(min=tiny).log() - _series(low)
    # The reflection of F, written in y and s = softplus(−a) = y − a.
    high = y.clamp(min=_LOG_2)
    s = -torch.log1p(-torch.exp(-high))
    above = 0.5 * (high.square() - s.square()) - _PI_SQUARED_OVER_6 + _series(s)
    return torch.where(y < _LOG_2, below, above)


def _series(u: Tensor) -> Tensor:
    """Return ``G(u)`` for ``0 ≤ u ≤ log 2``."""
    square = u.square()
    tail = torch.zeros_like(u)
    for coefficient in reversed(_COEFFICIENTS):
        tail = tail * square + coefficient
    return u * (1 + u * (0.25 + u * tail))
