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
def moved(w, v, m, g, eta, mu, rho, eps):
    """``v ← ρ v + (1−ρ) g²``, ``m ← μ m + η g / √(v + ε)``, ``w ← w − m``."""
    v = v + (1 - rho) * (g * g - v)
    m = mu * m + eta * g * tl.rsqrt(v + eps)
    return w - m, v, m


@triton.jit
def rmsprop(
    tensor, square, momentum, new_tensor, new_square, new_momentum,
    gradient, first, scale, eta, mu, rho, eps, rate, each,
    eta_at: tl.constexpr, mu_at: tl.constexpr, rho_at: tl.constexpr, eps_at: tl.constexpr,
    HAS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMSProp with the gradient or, given a first one, with that and ``scale`` gradients."""
    k = tl.program_id(1).to(tl.int64)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = inside < each
    at = k * each + inside
    g = tl.load(gradient + at, mask)
    if HAS_FIRST:
        g = scale * g + tl.load(first + at, mask)
    w, v, m = moved(
        tl.load(tensor + at, mask), tl.load(square + at, mask), tl.load(momentum + at, mask), g,
        number(eta, k, eta_at) * rate, number(mu, k, mu_at),
        number(rho, k, rho_at), number(eps, k, eps_at),
    )  # fmt: skip
    tl.store(new_square + at, v, mask)
    tl.store(new_momentum + at, m, mask)
    tl.store(new_tensor + at, w, mask)


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
def transferred(z, TRANSFER: tl.constexpr):
    if TRANSFER == TANH:
        y = tanh(z)
    elif TRANSFER == SIGMOID:
        y = 1 / (1 + tl.exp(-z))
    elif TRANSFER == RELU:
        y = tl.where(z < 0, 0.0, z)  # what is no number stays none
    else:
        y = z
    return y


@triton.jit
def plus(one, other):
    return one + other


@triton.jit
def residual(
    a, base, start, sums, bias, square, momentum, new_bias, new_square, new_momentum, first,
    scale, eta, mu, rho, eps, rate, rows, d,
    eta_at: tl.constexpr, mu_at: tl.constexpr, rho_at: tl.constexpr, eps_at: tl.constexpr,
    TRANSFER: tl.constexpr, HAS_START: tl.constexpr, HAS_BIAS: tl.constexpr,
    MOVES_BIAS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``a ← f(a₀ + a + b) − f(a₀)`` for displacements ``a [d, rows]`` and ``b [d]``.

    ``a₀`` is base, and the bias it started from. One program has a part of a feature's rows. The sum
    over the part goes to ``sums [parts, d]`` or, where it is all of the bias's gradient but the first,
    into a step of RMSProp on the bias.
    """
    k = tl.program_id(2).to(tl.int64)
    feature = k * d + tl.program_id(0)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    b0, b = 0.0, 0.0
    if HAS_START:
        b0 = tl.load(start + feature)
    if HAS_BIAS:
        b = tl.load(bias + feature)
    for block in range(BLOCKS):
        row = (tl.program_id(1) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        at, mask = feature * rows + row, row < rows
        z = tl.load(base + at, mask, 0.0) + b0
        moved_to = transferred(z + (tl.load(a + at, mask, 0.0) + b), TRANSFER)
        change = tl.where(mask, moved_to - transferred(z, TRANSFER), 0.0)
        tl.store(a + at, change, mask)
        total += change
    g = tl.reduce(total, 0, plus)
    if MOVES_BIAS:
        w, v, m = moved(
            b, tl.load(square + feature), tl.load(momentum + feature),
            scale * g + tl.load(first + feature),
            number(eta, k, eta_at) * rate, number(mu, k, mu_at),
            number(rho, k, rho_at), number(eps, k, eps_at),
        )  # fmt: skip
        tl.store(new_square + feature, v)
        tl.store(new_momentum + feature, m)
        tl.store(new_bias + feature, w)
    else:
        part = k * tl.num_programs(1) + tl.program_id(1)
        tl.store(sums + part * d + tl.program_id(0), g)


@triton.jit
def by_gram(
    gradient, total, count, weight_first, bias_first,
    weight, weight_square, weight_momentum,
    bias, bias_square, bias_momentum, new_bias, new_bias_square, new_bias_momentum,
    scale, eta, mu, rho, eps, rate, d, n, width,
    eta_at: tl.constexpr, mu_at: tl.constexpr, rho_at: tl.constexpr, eps_at: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMSProp on the displacements ``[W b]`` of a squared loss, given ``W [XᵀX Xᵀ1]``.

    The gradient is that, what the bias adds, and the first one. The weight moves in place; the bias,
    which other programs read, does not.
    """
    k = tl.program_id(1).to(tl.int64)
    columns = n + 1 if HAS_BIAS else n
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i, j = at // columns, at % columns
    inside = at < d * columns
    here = inside & (j < n)
    of_weight = k * d * n + i * n + j
    g = tl.load(gradient + (k * d + i) * width + j, inside)
    first = tl.load(weight_first + of_weight, here, 0.0)
    w = tl.load(weight + of_weight, here, 0.0)
    v = tl.load(weight_square + of_weight, here, 0.0)
    m = tl.load(weight_momentum + of_weight, here, 0.0)
    if HAS_BIAS:
        there = inside & (j == n)
        of_bias = k * d + i
        counts = tl.where(j < n, tl.load(total + k * n + j, here, 0.0), count)
        g += tl.load(bias + of_bias, inside, 0.0) * counts
        first += tl.load(bias_first + of_bias, there, 0.0)
        w += tl.load(bias + of_bias, there, 0.0)
        v += tl.load(bias_square + of_bias, there, 0.0)
        m += tl.load(bias_momentum + of_bias, there, 0.0)
    w, v, m = moved(
        w, v, m, scale * g + first,
        number(eta, k, eta_at) * rate, number(mu, k, mu_at),
        number(rho, k, rho_at), number(eps, k, eps_at),
    )  # fmt: skip
    tl.store(weight + of_weight, w, here)
    tl.store(weight_square + of_weight, v, here)
    tl.store(weight_momentum + of_weight, m, here)
    if HAS_BIAS:
        tl.store(new_bias + of_bias, w, there)
        tl.store(new_bias_square + of_bias, v, there)
        tl.store(new_bias_momentum + of_bias, m, there)
