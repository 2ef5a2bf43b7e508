"""Triton kernels for the local iterations of a linear layer, with RMSProp.

An iteration is two matrix products. ``residual`` computes the first one and writes how much the
transfer's value has changed, ``δ [d, rows]``. ``step`` computes the second one, the gradient, and
uses it at once for RMSProp's step without writing it. How they are launched is in
``local_iterations.py`` and ``matrix_products.py``.

Tensors are contiguous, ``[members, ...]`` for a population. One program computes one tile of
``HEIGHT × WIDTH`` entries of a product, from ``DEPTH`` terms at a time. Lengths are passed as multiples
of a constant unit (``n = n_units * N_UNIT``), so that the compiler knows what divides them and loads
several entries at once. Importing this module imports Triton.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from torch_locoprop.fast.triton.elementwise_kernels import (
    finite,
    is_finite,
    load_number,
    rmsprop,
    rmsprop_update,
    write,
)
from torch_locoprop.fast.triton.transfer_change import LINEAR, change, encode

__all__ = ["encode_all", "finite", "residual", "rmsprop", "step", "transpose_inputs", "write"]


@triton.jit
def encode_all(
    a, bias, codes, eta, weight_decay, rows, d, eta_place: tl.constexpr, decay_place: tl.constexpr,
    TRANSFER: tl.constexpr, HAS_BIAS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the codes ``[d, rows]`` of ``a₀``, from the forward pass's pre-activations ``a [rows, d]``.

    ``a₀`` differs from ``a`` because weight decay has shrunk the weight, but not the bias, since then.
    """
    k = tl.program_id(2)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    feature = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (feature[None, :] < d)
    z = tl.load(a + (k * rows + row[:, None]) * d + feature[None, :], inside, 0.0)
    b = tl.full((TILE,), 0.0, tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + k * d + feature, feature < d, 0.0)
    lost = load_number(eta, k, eta_place) * load_number(weight_decay, k, decay_place)
    z -= lost * (z - b[None, :])
    at = (k * d + feature[:, None]) * rows + row[None, :]
    here = (feature[:, None] < d) & (row[None, :] < rows)
    tl.store(codes + at, tl.trans(encode(z, TRANSFER)), here)


@triton.jit
def product_tile(
    left, right, k, d, right_stride, i, j, columns, inner, DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return a tile of ``left @ rightᵀ`` for member k: rows from i, columns from j.

    ``left`` is ``[d, inner]`` and ``right`` is ``[columns, inner]``. The rows of ``right`` of two
    successive members are ``right_stride`` apart; 0 if all members share them. Entries of the tile
    outside of the product are undefined. With DESCRIPTORS the factors are tensor descriptors.
    """
    total = tl.full((HEIGHT, WIDTH), 0.0, tl.float32)
    if DESCRIPTORS:
        for done in range(0, inner, DEPTH):
            one = left.load([k * d + i, done])
            other = right.load([k * right_stride + j, done])
            total = tl.dot(one, other.T, total, input_precision=PRECISION)
    else:
        terms = tl.arange(0, DEPTH)
        rows = k * d + (i + tl.arange(0, HEIGHT)) % d
        left += rows[:, None] * inner + terms[None, :]
        rows = k * right_stride + (j + tl.arange(0, WIDTH)) % columns
        right += rows[None, :] * inner + terms[:, None]
        for done in range(0, inner, DEPTH):
            inside = terms < inner - done
            total = tl.dot(
                tl.load(left, inside[None, :], 0.0), tl.load(right, inside[:, None], 0.0), total,
                input_precision=PRECISION,
            )  # fmt: skip
            left += DEPTH
            right += DEPTH
    return total


@triton.jit
def halve_columns(tile, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the left and the right half of a tile ``[HEIGHT, WIDTH]``."""
    return tl.split(tl.permute(tl.reshape(tile, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def halve_rows(tile, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the upper and the lower half of a tile ``[HEIGHT, WIDTH]``."""
    return tl.split(tl.permute(tl.reshape(tile, (2, HEIGHT // 2, WIDTH)), (1, 2, 0)))


@triton.jit
def split_columns(tile, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return a tile as four tiles of columns: there are too few registers to process it as one."""
    left, right = halve_columns(tile, HEIGHT, WIDTH)
    return halve_columns(left, HEIGHT, WIDTH // 2) + halve_columns(right, HEIGHT, WIDTH // 2)


@triton.jit
def split_rows(tile, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return a tile as four tiles of rows: with long rows, reads and writes of memory are faster."""
    upper, lower = halve_rows(tile, HEIGHT, WIDTH)
    return halve_rows(upper, HEIGHT // 2, WIDTH) + halve_rows(lower, HEIGHT // 2, WIDTH)


@triton.jit
def add(one, other):
    return one + other


@triton.jit
def transpose_inputs(
    x, transposed, rows, padded_rows, n, HAS_BIAS: tl.constexpr, TILE: tl.constexpr
):
    """Write ``[X 1]ᵀ`` of ``X [rows, n]``, padded with zeros to ``padded_rows`` columns.

    Without HAS_BIAS it is ``Xᵀ``.
    """
    k = tl.program_id(2)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < n)
    value = tl.load(x + (k * rows + row[:, None]) * n + column[None, :], inside, 0.0)
    columns = n
    if HAS_BIAS:
        value = tl.where(column[None, :] == n, 1.0, value)
        columns = n + 1
    at = (k * columns + column[:, None]) * padded_rows + row[None, :]
    here = (column[:, None] < columns) & (row[None, :] < padded_rows)
    tl.store(transposed + at, tl.trans(value), here)


@triton.jit
def store_residual(
    a, codes, delta, k, d, rows, b, feature, row, TRANSFER: tl.constexpr, ENCODES: tl.constexpr
):
    """Write a tile of δ, or of codes, from a tile ``a`` of ``W Xᵀ``; see :func:`residual`."""
    inside = row[None, :] < rows
    code_at = (k * d + (feature % d)[:, None]) * rows + row[None, :]
    if ENCODES:
        here = (feature[:, None] < d) & inside
        tl.store(codes + code_at, encode(a + b[:, None], TRANSFER), here)
    else:
        code = tl.full((1, 1), 0.0, tl.float32)
        if TRANSFER != LINEAR:
            code = tl.load(codes + code_at, inside, 0.0)
        padded_rows = (rows + 7) // 8 * 8
        at = (k * d + feature[:, None]) * padded_rows + row[None, :]
        here = (feature[:, None] < d) & (row[None, :] < padded_rows)
        tl.store(delta + at, tl.where(inside, change(code, a + b[:, None], TRANSFER), 0.0), here)


@triton.jit
def residual(
    left, right, codes, bias, delta, n_units, row_units, d, right_stride,
    TRANSFER: tl.constexpr, HAS_BIAS: tl.constexpr, ENCODES: tl.constexpr,
    N_UNIT: tl.constexpr, ROW_UNIT: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write ``δ = f(a₀ + W Xᵀ + b) − f(a₀)`` for displacements ``W [d, n]`` and ``b [d]``.

    ``left`` is W, ``right`` is ``X [rows, n]``, and the codes ``[d, rows]`` are those of ``a₀``. The
    columns of δ are padded with zeros to a multiple of eight. With ENCODES, W and b are weight and bias
    themselves, and the codes of ``a₀ = W Xᵀ + b`` are written in place of δ.
    """
    k = tl.program_id(2)
    n, rows = n_units * N_UNIT, row_units * ROW_UNIT
    feature = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    begin = tl.program_id(0) * WIDTH
    a = product_tile(
        left, right, k, d, right_stride, tl.program_id(1) * HEIGHT, begin, rows, n, DESCRIPTORS,
        PRECISION, HEIGHT, WIDTH, DEPTH,
    )  # fmt: skip
    b = tl.full((HEIGHT,), 0.0, tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + k * d + feature % d)
    parts = split_columns(a, HEIGHT, WIDTH)
    for q in tl.static_range(4):
        row = begin + q * (WIDTH // 4) + tl.arange(0, WIDTH // 4)
        store_residual(parts[q], codes, delta, k, d, rows, b, feature, row, TRANSFER, ENCODES)


@triton.jit
def update_and_store(
    g, tensor, square, momentum, new_tensor, rounded, start, ok, eta, mu, rho, eps, at, here,
    ROUNDS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Take RMSProp's step with gradient g for the entries at ``at``; return the new displacement.

    With ROUNDS the displacement is also written to ``rounded``, in its dtype. In the LAST step the
    start is added to the displacement, and ``ok`` is set to 0 if a result is not finite.
    """
    w, v, m = rmsprop_update(
        tl.load(tensor + at, here), tl.load(square + at, here), tl.load(momentum + at, here),
        g, eta, mu, rho, eps,
    )  # fmt: skip
    if LAST:
        w += tl.load(start + at, here)
        good = is_finite(w) & is_finite(v) & is_finite(m)
        tl.store(ok + 0 * at, 0, here & (good == 0))
    tl.store(new_tensor + at, w, here)
    if ROUNDS:
        tl.store(rounded + at, w, here)
    tl.store(square + at, v, here)
    tl.store(momentum + at, m, here)
    return w


@triton.jit
def mean_displacement(partial_sums, bias, row_count, k, feature, d, HAS_BIAS: tl.constexpr):
    """Return ``u = W Xᵀ1 / row_count + b``: the change of these features' mean over the rows.

    ``W Xᵀ1`` comes in parts, one from each program along the columns of W.
    """
    mean = tl.full((feature.shape[0],), 0.0, tl.float32)
    for program in range(tl.num_programs(0)):
        at = (k * tl.num_programs(0) + program) * d + feature
        mean += tl.load(partial_sums + at, feature < d, 0.0)
    mean /= row_count
    if HAS_BIAS:
        mean += tl.load(bias + k * d + feature, feature < d, 0.0)
    return mean


@triton.jit
def step(
    left, right, column_sums, row_count, partial_sums, new_partial_sums,
    weight_gradient, bias_gradient, gamma,
    weight, weight_square, weight_momentum, new_weight, rounded,
    bias, bias_square, bias_momentum, new_bias, weight_start, bias_start, ok,
    row_weight, eta, mu, rho, eps, rate, inner_units, n_units, d, right_stride,
    gamma_place: tl.constexpr, eta_place: tl.constexpr, mu_place: tl.constexpr,
    rho_place: tl.constexpr, eps_place: tl.constexpr,
    BY_GRAM: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDS: tl.constexpr, LAST: tl.constexpr,
    INNER_UNIT: tl.constexpr, N_UNIT: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Take RMSProp's step on the displacements ``W [d, n]`` and ``b [d]`` of weight and bias.

    The gradient is γ times the first gradient plus ``row_weight`` times its change since the start:

    - From rows: ``δ [X 1]``, with ``left = δ [d, rows]`` and ``right = [X 1]ᵀ [n + 1, rows]``.
    - BY_GRAM, for a squared loss: ``W C + u 1ᵀX`` for the weight and ``row_count · u`` for the bias,
      with ``left = W``, ``right = C`` (XᵀX of the centred rows, ``[n, n]``) and ``u`` the change of the
      mean pre-activation (:func:`mean_displacement`).

    BY_GRAM, other programs still read W and b, so the new ones are written to other memory. For the
    next step's u each program also writes its part of the new ``W Xᵀ1``. This part is computed from W
    in float32: the terms of u nearly cancel, so that a rounded W would leave few correct digits.

    With ROUNDS, W is also written in the dtype of the factors. The LAST step adds the start, and sets
    ``ok`` of member k to 0 if a result is not finite.
    """
    k = tl.program_id(2)
    inner, n = inner_units * INNER_UNIT, n_units * N_UNIT
    columns = n + 1 if HAS_BIAS and not BY_GRAM else n
    feature = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    begin = tl.program_id(0) * WIDTH
    column = begin + tl.arange(0, WIDTH)
    g = product_tile(
        left, right, k, d, right_stride, tl.program_id(1) * HEIGHT, begin, columns, inner, DESCRIPTORS,
        PRECISION, HEIGHT, WIDTH, DEPTH,
    )  # fmt: skip
    own_eta, own_mu = load_number(eta, k, eta_place) * rate, load_number(mu, k, mu_place)
    own_rho, own_eps = load_number(rho, k, rho_place), load_number(eps, k, eps_place)
    own_gamma = load_number(gamma, k, gamma_place)
    if HAS_BIAS:  # noqa: SIM102  # a compile-time constant, apart from the run-time condition
        if tl.program_id(0) == (0 if BY_GRAM else n // WIDTH):
            there, mine = feature < d, k * d + feature
            if BY_GRAM:
                of_tile = mean_displacement(partial_sums, bias, row_count, k, feature, d, HAS_BIAS)
                bias_sum = row_count * of_tile
            else:  # column n of the product
                bias_sum = tl.reduce(tl.where(column[None, :] == n, g, 0.0), 1, add)
            update_and_store(
                row_weight * bias_sum + own_gamma * tl.load(bias_gradient + mine, there),
                bias, bias_square, bias_momentum, new_bias, new_bias, bias_start, ok + k,
                own_eta, own_mu, own_rho, own_eps, mine, there, False, LAST,
            )  # fmt: skip
    parts = split_rows(g, HEIGHT, WIDTH)
    for q in tl.static_range(4):
        own = tl.program_id(1) * HEIGHT + q * (HEIGHT // 4) + tl.arange(0, HEIGHT // 4)
        part = parts[q]
        at = (k * d + own[:, None]) * n + column[None, :]
        here = (own[:, None] < d) & (column[None, :] < n)
        if BY_GRAM:
            sums_here = tl.load(column_sums + k * n + column, column < n, 0.0)
            u = mean_displacement(partial_sums, bias, row_count, k, own, d, HAS_BIAS)
            part += u[:, None] * sums_here[None, :]
        w = update_and_store(
            row_weight * part + own_gamma * tl.load(weight_gradient + at, here),
            weight, weight_square, weight_momentum, new_weight, rounded, weight_start, ok + k,
            own_eta, own_mu, own_rho, own_eps, at, here, ROUNDS, LAST,
        )  # fmt: skip
        if BY_GRAM and not LAST:
            partial_sum = tl.reduce(tl.where(here, w * sums_here[None, :], 0.0), 1, add)
            mine = (k * tl.num_programs(0) + tl.program_id(0)) * d + own
            tl.store(new_partial_sums + mine, partial_sum, own < d)
