"""The kernels in Triton; importing this needs Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl

FLOAT = tl.constexpr(0)
SHARED = tl.constexpr(1)

LINEAR = tl.constexpr(0)
TANH = tl.constexpr(1)
SIGMOID = tl.constexpr(2)
RELU = tl.constexpr(3)


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
    tensor, square, momentum, new_tensor, new_square, new_momentum,
    gradient, first, weight, eta, mu, rho, eps, rate, each,
    eta_at: tl.constexpr, mu_at: tl.constexpr, rho_at: tl.constexpr, eps_at: tl.constexpr,
    PARTS: tl.constexpr, HAS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``v ← ρ v + (1−ρ) g²``, ``m ← μ m + η g / √(v + ε)``, ``w ← w − m``.

    g is the sum of the parts of the gradient or, with a first one, that and ``weight`` times the sum.
    """
    k = tl.program_id(1).to(tl.int64)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = inside < each
    at = k * each + inside
    g = tl.load(gradient + k * PARTS * each + inside, mask)
    for part in tl.static_range(1, PARTS):
        g += tl.load(gradient + (k * PARTS + part) * each + inside, mask)
    if HAS_FIRST:
        g = weight * g + tl.load(first + at, mask)
    v = tl.load(square + at, mask)
    m = tl.load(momentum + at, mask)
    w = tl.load(tensor + at, mask)
    v = v + (1 - number(rho, k, rho_at)) * (g * g - v)
    scaled = number(eta, k, eta_at) * rate * g * tl.rsqrt(v + number(eps, k, eps_at))
    m = number(mu, k, mu_at) * m + scaled
    tl.store(new_square + at, v, mask)
    tl.store(new_momentum + at, m, mask)
    tl.store(new_tensor + at, w - m, mask)


@triton.jit
def tanh(z):
    """To rounding; near zero by a polynomial, where the quotient would lose digits."""
    square = z * z
    p = -5.70498872745e-3 * square + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    near = z + z * square * p
    size = tl.abs(z)
    far = 1 - 2 / (tl.exp(2 * size) + 1)
    return tl.where(size < 0.625, near, tl.where(z < 0, -far, far))


@triton.jit
def plus(one, other):
    return one + other


@triton.jit
def residual(
    a, target, sums, rows, d,
    TRANSFER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``a ← f(a) − target``, and its sums over blocks of rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(2).to(tl.int64)
    at = (k * rows + row[:, None]) * d + column[None, :]
    mask = (row[:, None] < rows) & (column[None, :] < d)
    z = tl.load(a + at, mask, 0.0)
    if TRANSFER == TANH:
        z = tanh(z)
    elif TRANSFER == SIGMOID:
        z = 1 / (1 + tl.exp(-z))
    elif TRANSFER == RELU:
        z = tl.where(z < 0, 0.0, z)  # what is no number stays none
    change = tl.where(mask, z - tl.load(target + at, mask, 0.0), 0.0)
    tl.store(a + at, change, mask)
    block = k * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + block * d + column, tl.reduce(change, 0, plus), column < d)
