"""Device functions in Triton for ``f(z + a) − f(z)``, accurate even if the difference is small.

:func:`encode` computes once what is needed of z; :func:`change` uses it in every local iteration. The
derivation: let s be the logistic function of z and ``D = eᵃ − 1``. The logistic function of z + a is
greater than s by ``s (1 − s) D / (1 + s D)``. Tanh of z is twice the logistic function of 2 z, minus 1.
Importing this module imports Triton.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

LINEAR = tl.constexpr(0)
TANH = tl.constexpr(1)
SIGMOID = tl.constexpr(2)
RELU = tl.constexpr(3)


@triton.jit
def expm1(x):
    """Return ``eˣ − 1`` to rounding. x is clamped to ±88, so that eˣ stays finite."""
    x = tl.clamp(x, -88.0, 88.0, propagate_nan=tl.PropagateNan.ALL)
    p = 1.98412698e-4 * x + 1.38888889e-3
    p = p * x + 8.33333333e-3
    p = p * x + 4.16666667e-2
    p = p * x + 1.66666667e-1
    p = p * x + 0.5
    near = x + x * x * p
    return tl.where(tl.abs(x) < 0.35, near, tl.exp(x) - 1)


@triton.jit
def encode(z, TRANSFER: tl.constexpr):
    """Return what :func:`change` needs of z: its code.

    For ReLU the code is z. For sigmoid it is the logistic function of −|z|, which is at most 1/2, with
    the sign of z; if that is too small for float32, it is z itself. For tanh it is the same for 2 z.
    """
    if TRANSFER == RELU:
        code = z
    else:
        z *= 2 if TRANSFER == TANH else 1
        t = tl.exp(-tl.abs(z))
        share = t / (1 + t)
        code = tl.where(tl.abs(z) > 60, z, tl.where(z < 0, -share, share))
    return code


@triton.jit
def change(code, a, TRANSFER: tl.constexpr):
    """Return ``f(z + a) − f(z)`` for the z that was encoded.

    For sigmoid and tanh the error is relative to the difference. For z > 0 the formula is applied
    to −z and −a, and the result gets the opposite sign. If the code is z itself (``far``), s is
    negligible and the whole logistic function of z + a is the change.
    """
    if TRANSFER == LINEAR:
        found = a
    elif TRANSFER == RELU:
        z = code + a
        found = tl.where(z < 0, 0.0, z) - tl.where(code < 0, 0.0, code)  # NaN stays NaN
    else:
        scale: tl.constexpr = 2.0 if TRANSFER == TANH else 1.0
        negative, size = code < 0, tl.abs(code)
        far = size > 1
        s = tl.where(far, 0.0, size)
        more = expm1(scale * tl.where(negative, a, -a) - tl.where(far, size, 0.0))
        gain, whole = tl.where(far, more + 1, s * (1 - s) * more), 1 + s * more
        found = scale * gain / tl.where(far, more + 2, whole)
        found = tl.where(negative, found, -found)
    return found
