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
def expm1(x):
    """``eˣ − 1`` to rounding; beyond ±88 that of ±88, before numbers end."""
    x = tl.clamp(x, -88.0, 88.0, propagate_nan=tl.PropagateNan.ALL)
    p = 1.98412698e-4 * x + 1.38888889e-3
    p = p * x + 8.33333333e-3
    p = p * x + 4.16666667e-2
    p = p * x + 1.66666667e-1
    p = p * x + 0.5
    near = x + x * x * p
    return tl.where(tl.abs(x) < 0.35, near, tl.exp(x) - 1)


@triton.jit
def noted(z, TRANSFER: tl.constexpr):
    """What ``change`` has to know of z, with z's sign.

    For a bounded transfer that is the logistic of −|z|, at most a half; or z, where that is too small.
    """
    if TRANSFER == RELU:
        note = z
    else:
        z *= 2 if TRANSFER == TANH else 1
        t = tl.exp(-tl.abs(z))
        share = t / (1 + t)
        note = tl.where(tl.abs(z) > 60, z, tl.where(z < 0, -share, share))
    return note


@triton.jit
def change(note, a, TRANSFER: tl.constexpr):
    """``f(z + a) − f(z)``, to rounding of the difference where f is bounded.

    With s the logistic of z and ``D = eᵃ − 1``, that of z + a has ``s (1 − s) D / (1 + s D)`` more;
    where s is nothing, all of it is more. Tanh is twice the logistic of 2 z, less one. For z > 0 all
    is taken with the opposite sign.
    """
    if TRANSFER == LINEAR:
        found = a
    elif TRANSFER == RELU:
        z = note + a
        found = tl.where(z < 0, 0.0, z) - tl.where(note < 0, 0.0, note)  # NaN stays NaN
    else:
        scale: tl.constexpr = 2.0 if TRANSFER == TANH else 1.0
        negative, size = note < 0, tl.abs(note)
        far = size > 1
        s = tl.where(far, 0.0, size)
        more = expm1(scale * tl.where(negative, a, -a) - tl.where(far, size, 0.0))
        gain, whole = tl.where(far, more + 1, s * (1 - s) * more), 1 + s * more
        found = scale * gain / tl.where(far, more + 2, whole)
        found = tl.where(negative, found, -found)
    return found


@triton.jit
def note_all(
    a, bias, notes, eta, weight_decay, rows, d, eta_at: tl.constexpr, decay_at: tl.constexpr,
    TRANSFER: tl.constexpr, HAS_BIAS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What ``change`` has to know of ``a₀``, as ``[d, rows]``, from ``a [rows, d]``.

    That was at a weight from which weight decay has taken its part since.
    """
    k = tl.program_id(2)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    feature = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (feature[None, :] < d)
    z = tl.load(a + (k * rows + row[:, None]) * d + feature[None, :], inside, 0.0)
    b = tl.full((TILE,), 0.0, tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + k * d + feature, feature < d, 0.0)
    z -= number(eta, k, eta_at) * number(weight_decay, k, decay_at) * (z - b[None, :])
    at = (k * d + feature[:, None]) * rows + row[None, :]
    here = (feature[:, None] < d) & (row[None, :] < rows)
    tl.store(notes + at, tl.trans(noted(z, TRANSFER)), here)


@triton.jit
def product(
    left, right, k, d, right_rows, i, j, columns, inner, IN_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Rows from i of ``left [d, inner]`` times rows from j of ``right [columns, inner]``.

    Of member k, whose rows of ``right`` begin ``right_rows`` after those of the one before. In what
    belongs to no row there may be anything.
    """
    total = tl.full((TALL, BROAD), 0.0, tl.float32)
    if IN_BLOCKS:
        for done in range(0, inner, DEEP):
            one = left.load([k * d + i, done])
            other = right.load([k * right_rows + j, done])
            total = tl.dot(one, other.T, total, input_precision=PRECISION)
    else:
        terms = tl.arange(0, DEEP)
        rows = k * d + (i + tl.arange(0, TALL)) % d
        left += rows[:, None] * inner + terms[None, :]
        rows = k * right_rows + (j + tl.arange(0, BROAD)) % columns
        right += rows[None, :] * inner + terms[:, None]
        for done in range(0, inner, DEEP):
            inside = terms < inner - done
            total = tl.dot(
                tl.load(left, inside[None, :], 0.0), tl.load(right, inside[:, None], 0.0), total,
                input_precision=PRECISION,
            )  # fmt: skip
            left += DEEP
            right += DEEP
    return total


@triton.jit
def left_right(tile, TALL: tl.constexpr, BROAD: tl.constexpr):
    """The left and the right columns of ``[TALL, BROAD]``."""
    return tl.split(tl.permute(tl.reshape(tile, (TALL, 2, BROAD // 2)), (0, 2, 1)))


@triton.jit
def upper_lower(tile, TALL: tl.constexpr, BROAD: tl.constexpr):
    """The upper and the lower rows of ``[TALL, BROAD]``."""
    return tl.split(tl.permute(tl.reshape(tile, (2, TALL // 2, BROAD)), (1, 2, 0)))


@triton.jit
def columns_by_four(tile, TALL: tl.constexpr, BROAD: tl.constexpr):
    """The columns in four parts, for what follows a product: registers are too few for all at once."""
    left, right = left_right(tile, TALL, BROAD)
    return left_right(left, TALL, BROAD // 2) + left_right(right, TALL, BROAD // 2)


@triton.jit
def rows_by_four(tile, TALL: tl.constexpr, BROAD: tl.constexpr):
    """Likewise the rows, where much is read and written: memory is faster at longer stretches."""
    upper, lower = upper_lower(tile, TALL, BROAD)
    return upper_lower(upper, TALL // 2, BROAD) + upper_lower(lower, TALL // 2, BROAD)


@triton.jit
def plus(one, other):
    return one + other


@triton.jit
def turn(x, table, rows, lead, n, HAS_BIAS: tl.constexpr, TILE: tl.constexpr):
    """``[X 1]ᵀ`` of ``X [rows, n]``, filled up with zeros to ``lead`` columns; the 1 is for a bias."""
    k = tl.program_id(2)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < n)
    value = tl.load(x + (k * rows + row[:, None]) * n + column[None, :], inside, 0.0)
    columns = n
    if HAS_BIAS:
        value = tl.where(column[None, :] == n, 1.0, value)
        columns = n + 1
    at = (k * columns + column[:, None]) * lead + row[None, :]
    here = (column[:, None] < columns) & (row[None, :] < lead)
    tl.store(table + at, tl.trans(value), here)


@triton.jit
def write_residual(
    a, notes, delta, k, d, rows, b, feature, row, TRANSFER: tl.constexpr, NOTES: tl.constexpr
):
    inside = row[None, :] < rows
    noted_at = (k * d + (feature % d)[:, None]) * rows + row[None, :]
    if NOTES:
        here = (feature[:, None] < d) & inside
        tl.store(notes + noted_at, noted(a + b[:, None], TRANSFER), here)
    else:
        note = tl.full((1, 1), 0.0, tl.float32)
        if TRANSFER != LINEAR:
            note = tl.load(notes + noted_at, inside, 0.0)
        lead = (rows + 7) // 8 * 8
        at = (k * d + feature[:, None]) * lead + row[None, :]
        here = (feature[:, None] < d) & (row[None, :] < lead)
        tl.store(delta + at, tl.where(inside, change(note, a + b[:, None], TRANSFER), 0.0), here)


@triton.jit
def residual(
    left, right, notes, bias, delta, n_units, row_units, d, right_rows,
    TRANSFER: tl.constexpr, HAS_BIAS: tl.constexpr, NOTES: tl.constexpr,
    N_UNIT: tl.constexpr, ROW_UNIT: tl.constexpr, PRECISION: tl.constexpr, IN_BLOCKS: tl.constexpr,
    TALL: tl.constexpr, BROAD: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """``δ = f(a₀ + W Xᵀ + b) − f(a₀)`` for displacements ``W [d, n]``, the left, and ``b [d]``.

    Of ``a₀ [d, rows]`` there are the notes; ``X [rows, n]`` is the right. The columns of δ are filled
    up with zeros to a multiple of eight. Or, for W and b themselves, ``a₀ = W Xᵀ + b`` as notes.
    """
    k = tl.program_id(2)
    n, rows = n_units * N_UNIT, row_units * ROW_UNIT  # the compiler knows what divides them
    feature = tl.program_id(1) * TALL + tl.arange(0, TALL)
    begin = tl.program_id(0) * BROAD
    a = product(
        left, right, k, d, right_rows, tl.program_id(1) * TALL, begin, rows, n, IN_BLOCKS,
        PRECISION, TALL, BROAD, DEEP,
    )  # fmt: skip
    b = tl.full((TALL,), 0.0, tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + k * d + feature % d)
    parts = columns_by_four(a, TALL, BROAD)
    for q in tl.static_range(4):
        row = begin + q * (BROAD // 4) + tl.arange(0, BROAD // 4)
        write_residual(parts[q], notes, delta, k, d, rows, b, feature, row, TRANSFER, NOTES)


@triton.jit
def is_number(x):
    return tl.abs(x) < float("inf")  # which what is no number is not


@triton.jit
def write_moved(
    g, tensor, square, momentum, new_tensor, rounded, start, ok, eta, mu, rho, eps, at, here,
    ROUNDS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Write a step's results; of the last one the tensor itself, and whether all is finite."""
    w, v, m = moved(
        tl.load(tensor + at, here), tl.load(square + at, here), tl.load(momentum + at, here),
        g, eta, mu, rho, eps,
    )  # fmt: skip
    if LAST:
        w += tl.load(start + at, here)
        good = is_number(w) & is_number(v) & is_number(m)
        tl.store(ok + 0 * at, 0, here & (good == 0))
    tl.store(new_tensor + at, w, here)
    if ROUNDS:
        tl.store(rounded + at, w, here)
    tl.store(square + at, v, here)
    tl.store(momentum + at, m, here)
    return w


@triton.jit
def mean_moved(sums, bias, count, k, feature, d, HAS_BIAS: tl.constexpr):
    """``W Xᵀ1 / count + b``, by how much the mean of the rows has moved these features."""
    mean = tl.full((feature.shape[0],), 0.0, tl.float32)
    for program in range(tl.num_programs(0)):
        at = (k * tl.num_programs(0) + program) * d + feature
        mean += tl.load(sums + at, feature < d, 0.0)
    mean /= count
    if HAS_BIAS:
        mean += tl.load(bias + k * d + feature, feature < d, 0.0)
    return mean


@triton.jit
def step(
    left, right, total, count, sums, new_sums, weight_first, bias_first, gamma,
    weight, weight_square, weight_momentum, new_weight, rounded,
    bias, bias_square, bias_momentum, new_bias, weight_start, bias_start, ok,
    scale, eta, mu, rho, eps, rate, units, n_units, d, right_rows, gamma_at: tl.constexpr,
    eta_at: tl.constexpr, mu_at: tl.constexpr, rho_at: tl.constexpr, eps_at: tl.constexpr,
    BY_GRAM: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDS: tl.constexpr, LAST: tl.constexpr,
    UNIT: tl.constexpr, N_UNIT: tl.constexpr, PRECISION: tl.constexpr, IN_BLOCKS: tl.constexpr,
    TALL: tl.constexpr, BROAD: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """RMSProp on displacements ``[W b]``, with ``scale`` gradients and γ times the first one.

    The gradient is ``δ [X 1]`` by the table ``[X 1]ᵀ`` or, of a squared loss, ``W C + u 1ᵀX`` by that
    of the rows less their mean, ``C``, and by how much the mean has moved, ``u``; for the bias it is u
    times their count. There other programs read W and b meanwhile: the new ones are written elsewhere.
    What u needs, ``W Xᵀ1``, is a sum over parts by columns, and each program leaves its own of the new
    W: with all digits, of which few are left in u. Where products are of rounded numbers, W is also
    written as such. The last step adds the start, and clears ``ok`` of member k if something is not
    finite.
    """
    k = tl.program_id(2)
    inner, n = units * UNIT, n_units * N_UNIT
    columns = n + 1 if HAS_BIAS and not BY_GRAM else n
    feature = tl.program_id(1) * TALL + tl.arange(0, TALL)
    begin = tl.program_id(0) * BROAD
    column = begin + tl.arange(0, BROAD)
    g = product(
        left, right, k, d, right_rows, tl.program_id(1) * TALL, begin, columns, inner, IN_BLOCKS,
        PRECISION, TALL, BROAD, DEEP,
    )  # fmt: skip
    own_eta, own_mu = number(eta, k, eta_at) * rate, number(mu, k, mu_at)
    own_rho, own_eps = number(rho, k, rho_at), number(eps, k, eps_at)
    own_gamma = number(gamma, k, gamma_at)
    if HAS_BIAS:  # noqa: SIM102  # a constant of the compiler, outside of what is not
        if tl.program_id(0) == (0 if BY_GRAM else n // BROAD):
            there, mine = feature < d, k * d + feature
            if BY_GRAM:
                sum_of = count * mean_moved(sums, bias, count, k, feature, d, HAS_BIAS)
            else:  # it is a column of the product
                sum_of = tl.reduce(tl.where(column[None, :] == n, g, 0.0), 1, plus)
            write_moved(
                scale * sum_of + own_gamma * tl.load(bias_first + mine, there),
                bias, bias_square, bias_momentum, new_bias, new_bias, bias_start, ok + k,
                own_eta, own_mu, own_rho, own_eps, mine, there, False, LAST,
            )  # fmt: skip
    parts = rows_by_four(g, TALL, BROAD)
    for q in tl.static_range(4):
        own = tl.program_id(1) * TALL + q * (TALL // 4) + tl.arange(0, TALL // 4)
        part = parts[q]
        at = (k * d + own[:, None]) * n + column[None, :]
        here = (own[:, None] < d) & (column[None, :] < n)
        if BY_GRAM:
            counts = tl.load(total + k * n + column, column < n, 0.0)
            mean = mean_moved(sums, bias, count, k, own, d, HAS_BIAS)
            part += mean[:, None] * counts[None, :]
        w = write_moved(
            scale * part + own_gamma * tl.load(weight_first + at, here),
            weight, weight_square, weight_momentum, new_weight, rounded, weight_start, ok + k,
            own_eta, own_mu, own_rho, own_eps, at, here, ROUNDS, LAST,
        )  # fmt: skip
        if BY_GRAM and not LAST:
            of_mean = tl.reduce(tl.where(here, w * counts[None, :], 0.0), 1, plus)
            mine = (k * tl.num_programs(0) + tl.program_id(0)) * d + own
            tl.store(new_sums + mine, of_mean, own < d)


@triton.jit
def finite(ok, tensors, each, BLOCK: tl.constexpr):
    """Clear ``ok`` of member k if something of its share is infinite or not a number."""
    k = tl.program_id(1).to(tl.int64)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for t in tl.static_range(len(tensors)):
        value = tl.load(tensors[t] + k * each + inside, inside < each, 0.0)
        tl.store(ok + k + 0 * inside, 0, is_number(value) == 0)


@triton.jit
def write(ok, news, olds, each, BLOCK: tl.constexpr):
    """``old ← new`` for the members that are ok."""
    k = tl.program_id(1).to(tl.int64)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(ok + k) != 0:
        for t in tl.static_range(len(news)):
            value = tl.load(news[t] + k * each + inside, inside < each)
            tl.store(olds[t] + k * each + inside, value, inside < each)
