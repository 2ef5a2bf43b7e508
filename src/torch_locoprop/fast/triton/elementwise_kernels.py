"""Triton kernels that process tensors entry by entry: RMSProp's step, finiteness, guarded writes.

All tensors are float32 and contiguous, ``[members, ...]``. Each program processes one block of one
member. Importing this module imports Triton.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

# Where a kernel finds a number: in its arguments, in a tensor for all members, or (any other value)
# in a tensor with one entry for each member. See place() in rmsprop.py.
FLOAT = tl.constexpr(0)
SHARED = tl.constexpr(1)


@triton.jit
def load_number(value, k, place: tl.constexpr):
    """Return a number for member k: the argument itself, or an entry of the tensor it points to."""
    if place == FLOAT:  # no early return: Triton would compile both sides of it
        found = value
    elif place == SHARED:
        found = tl.load(value)
    else:
        found = tl.load(value + k)
    return found


@triton.jit
def rmsprop_update(w, v, m, g, eta, mu, rho, eps):
    """Return w, v, m after ``v ← ρ v + (1−ρ) g²``, ``m ← μ m + η g / √(v + ε)``, ``w ← w − m``."""
    v = v + (1 - rho) * (g * g - v)
    m = mu * m + eta * g * tl.rsqrt(v + eps)
    return w - m, v, m


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")  # False for NaN


@triton.jit
def rmsprop(
    tensor, square, momentum, new_tensor, new_square, new_momentum,
    gradient, gamma, eta, mu, rho, eps, rate, entries, gamma_place: tl.constexpr,
    eta_place: tl.constexpr, mu_place: tl.constexpr, rho_place: tl.constexpr,
    eps_place: tl.constexpr, FROM_ZERO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take a step of RMSProp with γ times the gradient.

    ``entries`` is the number of entries of each member, ``rate`` a factor of η. With FROM_ZERO the old
    tensor is not read and counts as zero, so that the new tensor is a displacement.
    """
    k = tl.program_id(1).to(tl.int64)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = inside < entries
    at = k * entries + inside
    w = tl.full((BLOCK,), 0.0, tl.float32)
    if not FROM_ZERO:
        w = tl.load(tensor + at, mask)
    w, v, m = rmsprop_update(
        w, tl.load(square + at, mask), tl.load(momentum + at, mask),
        load_number(gamma, k, gamma_place) * tl.load(gradient + at, mask),
        load_number(eta, k, eta_place) * rate, load_number(mu, k, mu_place),
        load_number(rho, k, rho_place), load_number(eps, k, eps_place),
    )  # fmt: skip
    tl.store(new_square + at, v, mask)
    tl.store(new_momentum + at, m, mask)
    tl.store(new_tensor + at, w, mask)


@triton.jit
def finite(ok, tensors, entries, BLOCK: tl.constexpr):
    """Set ``ok[k]`` to 0 if an entry of member k is not finite, in any of the tensors."""
    k = tl.program_id(1).to(tl.int64)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for t in tl.static_range(len(tensors)):
        value = tl.load(tensors[t] + k * entries + inside, inside < entries, 0.0)
        tl.store(ok + k + 0 * inside, 0, is_finite(value) == 0)


@triton.jit
def write(ok, news, olds, entries, BLOCK: tl.constexpr):
    """Copy each new tensor over its old one, for the members whose ``ok[k]`` is not 0."""
    k = tl.program_id(1).to(tl.int64)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(ok + k) != 0:
        for t in tl.static_range(len(news)):
            value = tl.load(news[t] + k * entries + inside, inside < entries)
            tl.store(olds[t] + k * entries + inside, value, inside < entries)
