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
    gradient, gamma, eta, mu, rho, eps, rate, each, gamma_at: tl.constexpr,
    eta_at: tl.constexpr, mu_at: tl.constexpr, rho_at: tl.constexpr, eps_at: tl.constexpr,
    FROM_ZERO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of RMSProp with γ times the gradient: of the tensor or, from zero, of a displacement."""
    k = tl.program_id(1).to(tl.int64)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = inside < each
    at = k * each + inside
    w = tl.full((BLOCK,), 0.0, tl.float32)
    if not FROM_ZERO:
        w = tl.load(tensor + at, mask)
    w, v, m = moved(
        w, tl.load(square + at, mask), tl.load(momentum + at, mask),
        number(gamma, k, gamma_at) * tl.load(gradient + at, mask),
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
def product(
    left, right, i, j, inner,
    PRECISION: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Rows i of ``left [·, inner]`` times rows j of ``right [·, inner]``: ``[TALL, BROAD]``."""
    k = tl.arange(0, DEEP)
    left += i.to(tl.int64)[:, None] * inner + k[None, :]
    right += j.to(tl.int64)[None, :] * inner + k[:, None]
    total = tl.full((TALL, BROAD), 0.0, tl.float32)
    for done in range(0, inner, DEEP):
        inside = k < inner - done
        total = tl.dot(
            tl.load(left, inside[None, :], 0.0), tl.load(right, inside[:, None], 0.0), total,
            input_precision=PRECISION,
        )  # fmt: skip
        left += DEEP
        right += DEEP
    return total


@triton.jit
def halves(tile, TALL: tl.constexpr, BROAD: tl.constexpr):
    """The left and the right columns of ``[TALL, BROAD]``."""
    return tl.split(tl.permute(tl.reshape(tile, (TALL, 2, BROAD // 2)), (0, 2, 1)))


@triton.jit
def quarters(tile, TALL: tl.constexpr, BROAD: tl.constexpr):
    """The columns in four parts, for what follows a product: registers are too few for all at once."""
    left, right = halves(tile, TALL, BROAD)
    return halves(left, TALL, BROAD // 2) + halves(right, TALL, BROAD // 2)


@triton.jit
def plus(one, other):
    return one + other


@triton.jit
def write_residual(
    a, base, delta, k, d, rows, b0, b, feature, row, TRANSFER: tl.constexpr
):  # fmt: skip
    inside = row[None, :] < rows
    z = tl.load(base + (k * d + (feature % d)[:, None]) * rows + row[None, :], inside, 0.0)
    z += b0[:, None]
    change = transferred(z + (a + b[:, None]), TRANSFER) - transferred(z, TRANSFER)
    lead = (rows + 7) // 8 * 8
    at = (k * d + feature[:, None]) * lead + row[None, :]
    here = (feature[:, None] < d) & (row[None, :] < lead)
    tl.store(delta + at, tl.where(inside, change, 0.0), here)


@triton.jit
def residual(
    weight, x, base, start, bias, delta, n_units, row_units, d, x_rows,
    TRANSFER: tl.constexpr, HAS_START: tl.constexpr, HAS_BIAS: tl.constexpr,
    N_UNIT: tl.constexpr, ROW_UNIT: tl.constexpr, PRECISION: tl.constexpr,
    TALL: tl.constexpr, BROAD: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """``δ = f(a₀ + W Xᵀ + b) − f(a₀)`` for displacements ``W [d, n]`` and ``b [d]``.

    ``a₀ [d, rows]`` is base, and the bias it started from; ``X [rows, n]``. The columns of δ are
    filled up with zeros to a multiple of eight.
    """
    k = tl.program_id(2).to(tl.int64)
    n, rows = n_units * N_UNIT, row_units * ROW_UNIT  # the compiler knows what divides them
    feature = tl.program_id(1) * TALL + tl.arange(0, TALL)
    begin = tl.program_id(0) * BROAD
    i, j = feature % d, (begin + tl.arange(0, BROAD)) % rows  # what is beyond is not written
    a = product(weight + k * d * n, x + k * x_rows * n, i, j, n, PRECISION, TALL, BROAD, DEEP)
    b0 = tl.full((TALL,), 0.0, tl.float32)
    b = b0
    if HAS_START:
        b0 = tl.load(start + k * d + i)
    if HAS_BIAS:
        b = tl.load(bias + k * d + i)
    parts = quarters(a, TALL, BROAD)
    for q in tl.static_range(4):
        row = begin + q * (BROAD // 4) + tl.arange(0, BROAD // 4)
        write_residual(parts[q], base, delta, k, d, rows, b0, b, feature, row, TRANSFER)


@triton.jit
def write_step(
    g, first, gamma, weight, square, momentum, new_weight, rounded, scale, eta, mu, rho, eps, k, d, n,
    feature, column, ROUNDS: tl.constexpr,
):  # fmt: skip
    at = (k * d + feature[:, None]) * n + column[None, :]
    here = (feature[:, None] < d) & (column[None, :] < n)
    w, v, m = moved(
        tl.load(weight + at, here), tl.load(square + at, here), tl.load(momentum + at, here),
        scale * g + gamma * tl.load(first + at, here), eta, mu, rho, eps,
    )  # fmt: skip
    tl.store(new_weight + at, w, here)
    if ROUNDS:
        tl.store(rounded + at, w, here)
    tl.store(square + at, v, here)
    tl.store(momentum + at, m, here)


@triton.jit
def step(
    left, right, total, count, weight_first, bias_first, gamma,
    weight, weight_square, weight_momentum, new_weight, rounded,
    bias, bias_square, bias_momentum, new_bias,
    scale, eta, mu, rho, eps, rate, units, n_units, d, right_rows, gamma_at: tl.constexpr,
    eta_at: tl.constexpr, mu_at: tl.constexpr, rho_at: tl.constexpr, eps_at: tl.constexpr,
    BY_GRAM: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDS: tl.constexpr,
    UNIT: tl.constexpr, N_UNIT: tl.constexpr, PRECISION: tl.constexpr,
    TALL: tl.constexpr, BROAD: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """RMSProp on displacements ``[W b]``, with ``scale`` gradients and γ times the first one.

    The gradient is ``δ [X 1]`` by the table ``[X 1]ᵀ`` or, of a squared loss, ``W [XᵀX Xᵀ1]`` and what
    the bias adds. There other programs read W and b meanwhile: the new ones are written elsewhere.
    Where products are of rounded numbers, W is also written as such.
    """
    k = tl.program_id(2).to(tl.int64)
    inner, n = units * UNIT, n_units * N_UNIT
    columns = n + 1 if HAS_BIAS else n
    feature = tl.program_id(1) * TALL + tl.arange(0, TALL)
    begin = tl.program_id(0) * BROAD
    column = begin + tl.arange(0, BROAD)
    g = product(
        left + k * d * inner, right + k * right_rows * inner,
        feature % d, column % columns, inner, PRECISION, TALL, BROAD, DEEP,
    )  # fmt: skip
    if BY_GRAM and HAS_BIAS:
        counts = tl.load(total + k * n + column, column < n, 0.0)
        counts = tl.where(column == n, count, counts)
        g += tl.load(bias + k * d + feature, feature < d, 0.0)[:, None] * counts[None, :]
    own_eta, own_mu = number(eta, k, eta_at) * rate, number(mu, k, mu_at)
    own_rho, own_eps = number(rho, k, rho_at), number(eps, k, eps_at)
    own_gamma = number(gamma, k, gamma_at)
    if HAS_BIAS:  # noqa: SIM102  # a constant of the compiler, outside of what is not
        if tl.program_id(0) == n // BROAD:  # which has the bias's gradient as a column
            sums = tl.reduce(tl.where(column[None, :] == n, g, 0.0), 1, plus)
            there, mine = feature < d, k * d + feature
            b, b_square, b_momentum = moved(
                tl.load(bias + mine, there), tl.load(bias_square + mine, there),
                tl.load(bias_momentum + mine, there),
                scale * sums + own_gamma * tl.load(bias_first + mine, there),
                own_eta, own_mu, own_rho, own_eps,
            )  # fmt: skip
            tl.store(new_bias + mine, b, there)
            tl.store(bias_square + mine, b_square, there)
            tl.store(bias_momentum + mine, b_momentum, there)
    parts = quarters(g, TALL, BROAD)
    for q in tl.static_range(4):
        write_step(
            parts[q], weight_first, own_gamma, weight, weight_square, weight_momentum,
            new_weight, rounded, scale, own_eta, own_mu, own_rho, own_eps,
            k, d, n, feature, begin + q * (BROAD // 4) + tl.arange(0, BROAD // 4), ROUNDS,
        )  # fmt: skip


@triton.jit
def finite(ok, tensors, each, BLOCK: tl.constexpr):
    """Clear ``ok`` of member k if something of its share is infinite or not a number."""
    k = tl.program_id(1).to(tl.int64)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for t in tl.static_range(len(tensors)):
        value = tl.load(tensors[t] + k * each + inside, inside < each, 0.0)
        good = tl.abs(value) < float("inf")  # which what is no number is not
        tl.store(ok + k + 0 * inside, 0, tl.where(good, 0, 1) == 1)


@triton.jit
def write(ok, news, olds, each, BLOCK: tl.constexpr):
    """``old ← new`` for the members that are ok."""
    k = tl.program_id(1).to(tl.int64)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(ok + k) != 0:
        for t in tl.static_range(len(news)):
            value = tl.load(news[t] + k * each + inside, inside < each)
            tl.store(olds[t] + k * each + inside, value, inside < each)
