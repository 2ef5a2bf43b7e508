"""The kernel of ``rmsprop.py`` in Triton; importing this needs Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl

FLOAT = tl.constexpr(0)
SHARED = tl.constexpr(1)


@triton.jit
def number(value, k, place: tl.constexpr):
    """A number that came with the call, or from the device for all or for member k."""
    if place == FLOAT:  # else and not return: both sides of a plain return are compiled
        found = value
    elif place == SHARED:
        found = tl.load(value)
    else:
        found = tl.load(value + k)
    return found


@triton.jit
def rmsprop(
    tensor, gradient, square, momentum, eta, mu, rho, eps, rate, each,
    eta_at: tl.constexpr, mu_at: tl.constexpr, rho_at: tl.constexpr, eps_at: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``v ← ρ v + (1−ρ) g²``, ``m ← μ m + η g / √(v + ε)``, ``w ← w − m``."""
    k = tl.program_id(1)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = inside < each
    at = k.to(tl.int64) * each + inside
    g = tl.load(gradient + at, mask)
    v = tl.load(square + at, mask)
    m = tl.load(momentum + at, mask)
    w = tl.load(tensor + at, mask)
    v = v + (1 - number(rho, k, rho_at)) * (g * g - v)
    scaled = number(eta, k, eta_at) * rate * g * tl.rsqrt(v + number(eps, k, eps_at))
    m = number(mu, k, mu_at) * m + scaled
    tl.store(square + at, v, mask)
    tl.store(momentum + at, m, mask)
    tl.store(tensor + at, w - m, mask)
