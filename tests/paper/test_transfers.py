"""Every transfer against quadrature, numeric suprema, autograd and torch's own functions."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.nn import functional

from torch_locoprop.paper import transfers
from torch_locoprop.paper.transfers import (
    CELU,
    ELU,
    SELU,
    Arctan,
    Hardtanh,
    LeakyReLU,
    Linear,
    LogSigmoid,
    ReLU,
    ReLU6,
    Sigmoid,
    Softmax,
    Softplus,
    Softsign,
    SquaredReLU,
    Step,
    Tanh,
    Transfer,
    bregman,
    get,
    matching_loss,
)


def exact_softplus(a, beta=1.0):
    return torch.logaddexp(beta * a, torch.zeros_like(a)) / beta


# The transfer, torch's own version of f, and the points where f is not smooth.
# CELU by way of ELU: the gradient of torch's celu rounds 1 / alpha to float32.
CASES = [
    (Step(), lambda a: torch.heaviside(a, torch.tensor(0.5, dtype=a.dtype)), [0.0]),
    (Linear(), lambda a: a, []),
    (ReLU(), torch.relu, [0.0]),
    (LeakyReLU(), functional.leaky_relu, [0.0]),
    (LeakyReLU(0.3), lambda a: functional.leaky_relu(a, 0.3), [0.0]),
    (LeakyReLU(0), torch.relu, [0.0]),
    (LeakyReLU(2.0), lambda a: functional.leaky_relu(a, 2.0), [0.0]),
    (Sigmoid(), torch.sigmoid, []),
    (Tanh(), torch.tanh, []),
    (Arctan(), torch.atan, []),
    (Softplus(), exact_softplus, []),
    (Softplus(2.5), lambda a: exact_softplus(a, 2.5), []),
    (ELU(), functional.elu, [0.0]),
    (ELU(0.5, 2.0, 1.5), lambda a: torch.ops.aten.elu(a, 0.5, 2.0, 1.5), [0.0]),
    (ELU(alpha=0.0), torch.relu, [0.0]),
    (SELU(), functional.selu, [0.0]),
    (CELU(), functional.celu, [0.0]),
    (CELU(0.4), lambda a: 0.4 * functional.elu(a / 0.4), [0.0]),
    (Hardtanh(), functional.hardtanh, [-1.0, 1.0]),
    (Hardtanh(0.5, 2.0), lambda a: functional.hardtanh(a, 0.5, 2.0), [0.5, 2.0]),
    (ReLU6(), functional.relu6, [0.0, 6.0]),
    (Softsign(), functional.softsign, [0.0]),
    (LogSigmoid(), functional.logsigmoid, []),
    (SquaredReLU(), lambda a: torch.relu(a) ** 2, [0.0]),
]
SMOOTH_AT_ZERO = [Sigmoid(), Tanh(), Arctan(), Softplus(2.5), ELU(), CELU(0.4), LogSigmoid()]

each_case = pytest.mark.parametrize(
    ("transfer", "torch_f", "kinks"), CASES, ids=[repr(case[0]) for case in CASES]
)
each_transfer = pytest.mark.parametrize("transfer", [case[0] for case in CASES], ids=repr)
each_strict = pytest.mark.parametrize(
    "transfer", [case[0] for case in CASES if case[0].strictly_increasing], ids=repr
)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
quick = settings(deadline=None, max_examples=30)
numbers = st.floats(-12, 12)
vectors = st.lists(numbers, min_size=4, max_size=4)


def tensor(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def away_from(kinks, a):
    return a[torch.tensor([all(abs(x - kink) > 1e-3 for kink in kinks) for x in a.tolist()])]


def within(transfer, low=-4.0, high=4.0, count=33):
    """Points strictly inside the domain."""
    low, high = max(low, transfer.domain[0]), min(high, transfer.domain[1])
    return torch.linspace(low, high, count, dtype=torch.float64)[1:-1]


def supremum(transfer, y, reach):
    """``sup_z y z − F(z)`` over ``|z| ≤ reach``, on a grid that closes in on the maximum."""
    center, radius = 0.0, reach
    while radius > 1e-9:
        z = torch.linspace(center - radius, center + radius, 2001, dtype=torch.float64)
        z = z.clamp(-reach, reach)
        values = y * z - transfer.integral(z)
        center, radius = z[values.argmax()].item(), radius / 500
    return values.max().item()


# f and its derivatives


@each_case
@each_dtype
def test_f_is_torchs(transfer, torch_f, kinks, dtype):
    a = torch.cat([torch.linspace(-30, 30, 121), tensor(*kinks)]).to(dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(transfer.f(a), torch_f(a), rtol=tolerance, atol=tolerance)


def test_celu_is_torchs():
    a = torch.linspace(-3, 3, 25, dtype=torch.float64)
    torch.testing.assert_close(CELU(0.4).f(a), functional.celu(a, 0.4))


def test_softplus_is_exact_beyond_torchs_threshold():
    a = tensor(20.5, 25.0)
    expected = [x + math.log1p(math.exp(-x)) for x in a.tolist()]
    torch.testing.assert_close(Softplus().f(a), tensor(*expected), rtol=1e-16, atol=0)
    assert not torch.equal(functional.softplus(a), tensor(*expected))


@each_case
def test_derivative_is_autograds(transfer, torch_f, kinks):
    a = away_from(kinks, torch.linspace(-10, 10, 203, dtype=torch.float64)).requires_grad_()
    # Step and heaviside have no gradient in torch; their derivative is zero.
    (expected,) = (torch.zeros_like(a),) if transfer == Step() else grad(torch_f(a).sum(), a)
    torch.testing.assert_close(transfer.derivative(a), expected, rtol=1e-12, atol=1e-14)


@each_case
def test_derivative_at_a_kink_is_torchs(transfer, torch_f, kinks):
    if kinks and transfer != Step():
        a = tensor(*kinks).requires_grad_()
        assert torch.equal(transfer.derivative(a), grad(torch_f(a).sum(), a)[0])


def test_saturated_derivatives_keep_their_digits():
    a = tensor(-40.0, 40.0)
    slope = tensor(math.exp(-40), math.exp(-40))
    torch.testing.assert_close(Sigmoid().derivative(a), slope, rtol=1e-14, atol=0)
    torch.testing.assert_close(Tanh().derivative(a / 2), 4 * slope, rtol=1e-14, atol=0)


@each_case
def test_strictness_and_domain_describe_f(transfer, torch_f, kinks):
    a = torch.linspace(-8, 8, 641, dtype=torch.float64)
    steps = transfer.f(a).diff()
    assert (steps >= 0).all()
    assert (steps > 0).all() == transfer.strictly_increasing
    lower, upper = transfer.domain
    far = transfer.f(tensor(-1e8, 1e8))
    for end, value in zip((lower, upper), far.tolist(), strict=True):
        assert abs(value) >= 1e5 if math.isinf(end) else value == pytest.approx(end, abs=1e-7)


# F, F* and the inverse


@each_case
def test_integral_matches_quadrature(transfer, torch_f, kinks):
    for end in (-9.0, -2.5, -0.3, 0.7, 3.0, 11.0):
        breaks = [k for k in kinks if min(0, end) < k < max(0, end)]
        expected, _ = quad(
            lambda x: torch_f(tensor(x)).item(), 0, end, points=breaks or None, epsabs=1e-12
        )
        actual = (transfer.integral(tensor(end)) - transfer.integral(tensor(0.0))).item()
        assert actual == pytest.approx(expected, rel=1e-10, abs=1e-10)


@each_case
def test_gradient_of_the_integral_is_f(transfer, torch_f, kinks):
    a = torch.cat([torch.linspace(-40, 40, 321), tensor(*kinks), tensor(0.0, 1.0, -1.0)])
    a = a.double().requires_grad_()
    (first,) = grad(transfer.integral(a).sum(), a)
    torch.testing.assert_close(first, torch_f(a), rtol=1e-13, atol=1e-14)


@each_case
def test_integral_is_twice_differentiable(transfer, torch_f, kinks):
    a = away_from(kinks, tensor(-3.1, -1.2, -0.4, 0.45, 1.3, 2.7)).requires_grad_()
    assert gradcheck(transfer.integral, a)
    if transfer != Step():
        assert gradgradcheck(transfer.integral, a)


@pytest.mark.parametrize("transfer", [*SMOOTH_AT_ZERO, Softsign()], ids=repr)
@each_dtype
def test_curvature_of_the_integral_exactly_at_zero(transfer, dtype):
    a = torch.zeros(3, dtype=dtype, requires_grad=True)
    (first,) = grad(transfer.integral(a).sum(), a, create_graph=True)
    (second,) = grad(first.sum(), a)
    h = 1e-4
    slope = (transfer.f(tensor(h)) - transfer.f(tensor(-h))) / (2 * h)
    torch.testing.assert_close(second, slope.expand(3).to(dtype), rtol=3e-4, atol=0)


@pytest.mark.parametrize("transfer", [Tanh(), Arctan(), Linear(), ReLU()], ids=repr)
def test_small_values_of_the_integral_keep_their_digits(transfer):
    a = torch.tensor([1e-4, 3e-3], dtype=torch.float32)
    torch.testing.assert_close(transfer.integral(a), a.square() / 2, rtol=1e-5, atol=0)
    y = transfer.f(a)
    torch.testing.assert_close(transfer.dual(y), y.square() / 2, rtol=1e-2, atol=0)


@each_transfer
def test_dual_is_the_supremum(transfer):
    y = within(transfer, count=12)
    expected = [supremum(transfer, value, reach=2000.0) for value in y.tolist()]
    torch.testing.assert_close(transfer.dual(y), tensor(*expected), rtol=1e-11, atol=1e-11)


@each_transfer
def test_dual_at_the_ends_of_the_domain(transfer):
    for end in transfer.domain:
        if math.isinf(end):
            continue
        value = transfer.dual(tensor(end)).item()
        sups = [supremum(transfer, end, reach) for reach in (1e2, 1e4)]
        if isinstance(transfer, Arctan | Softsign):
            assert math.isinf(value)
            assert sups[1] > sups[0] + 4  # it grows like log z, without bound
        else:
            assert value == pytest.approx(sups[1], abs=1e-10)


@each_transfer
def test_dual_is_infinite_outside_the_domain(transfer):
    for end, sign in zip(transfer.domain, (-1, 1), strict=True):
        if math.isinf(end):
            continue
        outside = end + sign * 0.1
        assert transfer.dual(tensor(outside)).item() == math.inf
        assert supremum(transfer, outside, reach=1e6) > 1e4
        assert matching_loss(transfer, tensor(outside), tensor(0.3)).item() == math.inf


@pytest.mark.parametrize(
    ("name", "y", "expected"),
    [
        ("tanh", [-1.0, 1.0], [math.log(2)] * 2),
        ("sigmoid", [0.0, 0.5, 1.0], [0.0, -math.log(2), 0.0]),
        ("softplus", [0.0], [0.0]),
        ("logsigmoid", [0.0], [0.0]),
        ("elu", [-1.0], [1.0]),
        ("step", [0.0, 0.3, 1.0], [0.0] * 3),
    ],
)
def test_known_duals(name, y, expected):
    torch.testing.assert_close(get(name).dual(tensor(*y)), tensor(*expected))


@each_transfer
def test_gradient_of_the_dual_is_the_inverse(transfer):
    if transfer == Step():
        return  # any a of its sign would do
    y = within(transfer).requires_grad_()
    (slope,) = grad(transfer.dual(y).sum(), y)
    torch.testing.assert_close(slope, transfer.inverse(y), rtol=1e-11, atol=1e-11)


@each_transfer
def test_f_undoes_the_inverse(transfer):
    y = transfer.f(torch.linspace(-20, 20, 161, dtype=torch.float64))
    torch.testing.assert_close(transfer.f(transfer.inverse(y)), y, rtol=1e-12, atol=1e-13)
    y = tensor(0.0, 0.5, 1.0) if transfer == Step() else within(transfer)
    torch.testing.assert_close(transfer.f(transfer.inverse(y)), y, rtol=1e-12, atol=1e-13)


@each_strict
def test_inverse_undoes_f(transfer):
    a = torch.linspace(-5, 5, 41, dtype=torch.float64)
    torch.testing.assert_close(transfer.inverse(transfer.f(a)), a, rtol=1e-10, atol=1e-10)


@each_transfer
@each_dtype
def test_inverse_at_and_beyond_the_ends(transfer, dtype):
    lower, upper = transfer.domain
    ends = tensor(*(end for end in (lower, upper) if math.isfinite(end)), dtype=dtype)
    inverse = transfer.inverse(ends)
    if transfer != Softsign():  # torch's is NaN at infinity
        torch.testing.assert_close(transfer.f(inverse), ends)
    beyond = ends + torch.where(ends == torch.tensor(lower, dtype=dtype), -3.0, 3.0)
    assert torch.equal(transfer.inverse(beyond), inverse)
    if transfer.strictly_increasing:
        assert inverse.isinf().all()


# The divergences

GAUSS_NODES, GAUSS_WEIGHTS = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(12))


@each_transfer
@quick
@given(a_hat=numbers, a=numbers)
def test_bregman_is_the_line_integral(transfer, a_hat, a):
    """Eq. 1: the integral of ``f(z) − f(a)`` from ``a`` to ``â``, by Gauss–Legendre quadrature."""
    kinks = next(case[2] for case in CASES if case[0] is transfer)
    low, high = min(a, a_hat), max(a, a_hat)
    breaks = [low, *sorted(k for k in kinks if low < k < high), high]
    expected, sign = 0.0, 1 if a_hat >= a else -1
    for start, stop in pairwise(breaks):
        pieces = torch.linspace(start, stop, 41, dtype=torch.float64)
        half = (pieces[1:] - pieces[:-1]).unsqueeze(1) / 2
        nodes = half * GAUSS_NODES + (pieces[1:] + pieces[:-1]).unsqueeze(1) / 2
        integrand = transfer.f(nodes) - transfer.f(tensor(a))
        expected += sign * (half * GAUSS_WEIGHTS * integrand).sum().item()
    actual = bregman(transfer, tensor(a_hat), tensor(a)).item()
    assert actual >= 0
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-11)


@each_strict
@quick
@given(a_hat=st.floats(-5, 5), a=st.floats(-5, 5))
def test_duality(transfer, a_hat, a):
    """Property (II): ``D_F(â, a) = D_F*(y, ŷ)``."""
    a_hat, a = tensor(a_hat), tensor(a)
    y_hat, y = transfer.f(a_hat), transfer.f(a)
    dual_slope = transfer.inverse(y_hat)
    dual = transfer.dual(y) - transfer.dual(y_hat) - dual_slope * (y - y_hat)
    torch.testing.assert_close(bregman(transfer, a_hat, a), dual, rtol=1e-9, atol=1e-10)


@each_strict
@quick
@given(a=st.floats(-5, 5), gap=st.floats(0.01, 5), sign=st.sampled_from([-1, 1]))
def test_zero_only_when_equal_if_strict(transfer, a, gap, sign):
    a = tensor(a)
    assert bregman(transfer, a, a) == 0
    assert bregman(transfer, a + sign * gap, a) > 0


@pytest.mark.parametrize("name", ["relu", "step", "squared_relu", "relu6"])
def test_zero_on_flat_parts(name):
    a_hat, a = tensor(-0.1, -3.0, -7.0), tensor(-5.0, -0.2, -7.0)
    assert torch.equal(bregman(name, a_hat, a), torch.zeros(3, dtype=torch.float64))


@each_transfer
@quick
@given(a_hat=numbers, a=st.floats(-4, 4))
def test_matching_loss_is_the_bregman_divergence(transfer, a_hat, a):
    a_hat, a = tensor(a_hat), tensor(a)
    loss = matching_loss(transfer, transfer.f(a), a_hat)
    torch.testing.assert_close(loss, bregman(transfer, a_hat, a), rtol=1e-9, atol=1e-10)


@each_transfer
@quick
@given(first=numbers, second=numbers, mix=st.floats(0, 1))
def test_matching_loss_is_convex(transfer, first, second, mix):
    y = within(transfer, count=7)
    between = mix * first + (1 - mix) * second
    at_first, at_second, at_between = (
        matching_loss(transfer, y, tensor(a)) for a in (first, second, between)
    )
    assert (at_between <= mix * at_first + (1 - mix) * at_second + 1e-9).all()


@each_case
def test_gradient_of_the_matching_loss(transfer, torch_f, kinks):
    """Eq. 2, also where the value is rounding noise and where ``y`` is outside the domain."""
    y = within(transfer).unsqueeze(1)
    a_hat = torch.cat([torch.linspace(-8, 8, 33), tensor(1e3, -1e3)]).double()
    y = torch.cat([y, transfer.f(a_hat).unsqueeze(1), y + 9])
    a_hat = a_hat.expand(len(y), -1).clone().requires_grad_()
    (slope,) = grad(matching_loss(transfer, y, a_hat).sum(), a_hat)
    torch.testing.assert_close(slope, torch_f(a_hat) - y, rtol=1e-13, atol=1e-13)


@each_transfer
def test_divergences_keep_the_gradient_where_they_lift_noise(transfer):
    a = torch.linspace(-3, 3, 301, dtype=torch.float32).requires_grad_()
    a_hat = (a.detach() + 1e-4).requires_grad_()
    assert (bregman(transfer, a_hat, a) >= 0).all()
    (slope,) = grad(bregman(transfer, a_hat, a).sum(), a_hat)
    torch.testing.assert_close(slope, transfer.f(a_hat) - transfer.f(a), rtol=0, atol=1e-6)


def test_divergences_take_names_and_broadcast():
    a_hat, a = torch.randn(5, 1, 3).double(), torch.randn(2, 3).double()
    assert bregman("tanh", a_hat, a).shape == (5, 2, 3)
    assert bregman("softmax", a_hat, a).shape == (5, 2)
    torch.testing.assert_close(bregman("linear", a_hat, a), (a_hat - a) ** 2 / 2)


@quick
@given(a_hat=numbers, a=numbers)
def test_sigmoid_divergence_is_binary_kl(a_hat, a):
    y, y_hat = tensor(a).sigmoid(), tensor(a_hat).sigmoid()
    kl = y * (y / y_hat).log() + (1 - y) * ((1 - y) / (1 - y_hat)).log()
    torch.testing.assert_close(
        bregman("sigmoid", tensor(a_hat), tensor(a)), kl, rtol=1e-8, atol=1e-9
    )


@quick
@given(a_hat=vectors, a=vectors)
def test_softmax_divergence_is_kl(a_hat, a):
    """Eq. 6 and Property (II)."""
    a_hat, a = tensor(*a_hat), tensor(*a)
    y, log_y, log_y_hat = a.softmax(-1), a.log_softmax(-1), a_hat.log_softmax(-1)
    kl = (y * (log_y - log_y_hat)).sum()
    torch.testing.assert_close(bregman("softmax", a_hat, a), kl, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(matching_loss("softmax", y, a_hat), kl, rtol=1e-9, atol=1e-11)


def test_matching_loss_is_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    a_hat = 5 * torch.randn(6, 4, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 3, 1, 1, 2, 0])
    expected = functional.cross_entropy(a_hat, labels, reduction="none")
    one_hot = functional.one_hot(labels, 4).double()
    torch.testing.assert_close(matching_loss("softmax", one_hot, a_hat), expected)
    soft = torch.rand(6, 4, generator=generator, dtype=torch.float64)
    soft[:, :3] /= soft.sum(-1, keepdim=True)
    soft[:, 3] = 1 - soft[:, :3].sum(-1)
    entropy = -(soft * soft.log()).sum(-1)
    expected = functional.cross_entropy(a_hat, soft, reduction="none") - entropy
    torch.testing.assert_close(matching_loss("softmax", soft, a_hat), expected)
    expected = functional.binary_cross_entropy_with_logits(a_hat, one_hot, reduction="none")
    torch.testing.assert_close(matching_loss("sigmoid", one_hot, a_hat), expected)
    entropy = functional.binary_cross_entropy(soft, soft, reduction="none")
    expected = functional.binary_cross_entropy(a_hat.sigmoid(), soft, reduction="none") - entropy
    torch.testing.assert_close(matching_loss("sigmoid", soft, a_hat), expected)


# Softmax


def test_softmax_pieces():
    softmax = Softmax()
    a = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a.requires_grad_()
    y = functional.softmax(a, -1)
    assert torch.equal(softmax.f(a), y)
    torch.testing.assert_close(softmax.integral(a), a.exp().sum(-1).log())
    torch.testing.assert_close(grad(softmax.integral(a).sum(), a)[0], y)
    jacobian = torch.autograd.functional.jacobian(softmax.f, a[0, 0])
    torch.testing.assert_close(softmax.derivative(a)[0, 0], jacobian)
    centered = a - a.mean(-1, keepdim=True)
    torch.testing.assert_close(softmax.inverse(y), centered)
    dual = (y * centered).sum(-1) - softmax.integral(centered)
    torch.testing.assert_close(softmax.dual(y), dual)
    assert gradcheck(softmax.integral, a)
    assert gradgradcheck(softmax.integral, a)
    assert not softmax.elementwise
    assert all(case[0].elementwise for case in CASES)


def test_softmax_at_the_edge_of_the_simplex():
    softmax = Softmax()
    y = tensor([1.0, 0.0, 0.0], [0.25, 0.75, 0.0])
    half_gap = math.log(3) / 2
    expected = tensor([0.0, -math.inf, -math.inf], [-half_gap, half_gap, -math.inf])
    torch.testing.assert_close(softmax.inverse(y), expected)
    torch.testing.assert_close(softmax.f(softmax.inverse(y)), y)
    entropy = 0.25 * math.log(0.25) + 0.75 * math.log(0.75)
    torch.testing.assert_close(softmax.dual(y), tensor(0.0, entropy))


@pytest.mark.parametrize(
    ("y", "inside"),
    [
        ([0.2, 0.8], True),
        ([0.2, 0.8 + 1e-7], True),
        ([-1e-8, 1.0 + 1e-8], True),
        ([0.2, 0.9], False),
        ([0.2, 0.7], False),
        ([-0.1, 1.1], False),
    ],
)
def test_softmax_dual_is_finite_on_the_simplex_only(y, inside):
    assert get("softmax").dual(tensor(y)).isfinite().item() is inside


# Stability

FAR = (-1e4, -999.0, -104.0, -88.5, -20.0, -1.0, -1e-4, 0.0)


@each_transfer
@each_dtype
def test_far_out_nothing_overflows(transfer, dtype):
    a = tensor(*FAR, *(-x for x in FAR), dtype=dtype).requires_grad_()
    assert transfer.f(a).isfinite().all()
    assert transfer.derivative(a).isfinite().all()
    value = transfer.integral(a)
    exact = transfer.integral(a.double()).to(dtype)
    torch.testing.assert_close(value, exact, rtol=1e-5, atol=1e-6)
    (first,) = grad(value.sum(), a, create_graph=True)
    torch.testing.assert_close(first, transfer.f(a), rtol=1e-5, atol=1e-6)
    if first.requires_grad and transfer != Step():
        (second,) = grad(first.sum(), a)
        assert second.isfinite().all()
        away = a.abs() > 6.1
        expected = transfer.derivative(a)[away]
        torch.testing.assert_close(second[away], expected, rtol=1e-4, atol=1e-6)
    a_hat = a.detach().unsqueeze(1).requires_grad_()
    divergence = bregman(transfer, a_hat, a)
    assert divergence.isfinite().all()
    assert (divergence >= 0).all()
    slopes = grad(divergence.sum(), (a_hat, a))
    assert all(slope.isfinite().all() for slope in slopes)


@each_transfer
@each_dtype
def test_far_out_the_dual_and_the_inverse(transfer, dtype):
    a = tensor(*FAR, *(-x for x in FAR), dtype=dtype)
    y = transfer.f(a)
    inverse = transfer.inverse(y)
    assert not inverse.isnan().any()
    torch.testing.assert_close(transfer.f(inverse), y, rtol=1e-4, atol=1e-6)
    # F* is infinite at two transfers' ends, which they round to only far beyond this.
    assert transfer.dual(y).isfinite().all()
    loss = matching_loss(transfer, y, a)
    rounding = transfer.integral(a).abs() + (a * y).abs() + 1
    assert (loss <= 8 * torch.finfo(dtype).eps * rounding).all()
    y = y[inverse.isfinite()].requires_grad_()
    (slope,) = grad(transfer.dual(y).sum(), y)
    assert slope.isfinite().all()
    y = tensor(-1e4, -1e4 / 3, 1e4 / 3, 1e4, dtype=dtype)
    y = y[(y > transfer.domain[0]) & (y < transfer.domain[1])].requires_grad_()
    for value in (transfer.dual(y), transfer.inverse(y)):
        assert value.isfinite().all()
        assert grad(value.sum(), y)[0].isfinite().all()


@each_dtype
def test_softmax_far_out(dtype):
    a = tensor([1e4, -1e4, 0.0], [1e4, 1e4, 1e4 - 1], dtype=dtype).requires_grad_()
    a_hat = a.detach().flip(-1).requires_grad_()
    for value in (Softmax().integral(a), bregman("softmax", a_hat, a)):
        (first,) = grad(value.sum(), a, create_graph=True)
        (second,) = grad(first.square().sum(), a)
        assert all(result.isfinite().all() for result in (value, first, second))
    assert Softmax().pull_back(a, torch.full_like(a, 10.0)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", transfers.NAMES)
def test_half_precision(name, dtype):
    transfer = get(name)
    a = tensor(-3.0, -0.25, 0.0, 0.5, 2.0, dtype=dtype)
    y = transfer.f(a)
    results = {
        method: getattr(transfer, method)(a) for method in ("f", "derivative", "integral")
    } | {method: getattr(transfer, method)(y) for method in ("dual", "inverse")}
    results["loss"] = matching_loss(transfer, y, a)
    for method, result in results.items():
        assert result.dtype == dtype, method
        assert result.isfinite().all(), method
    expected = transfer.integral(a.double())
    torch.testing.assert_close(results["integral"].double(), expected, rtol=2e-2, atol=2e-2)


# Moving gradients through f


@each_case
def test_vjp_and_pull_back(transfer, torch_f, kinks):
    a = away_from(kinks, torch.linspace(-6.2, 6.2, 32, dtype=torch.float64)).requires_grad_()
    v = torch.randn(a.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    if transfer == Step():
        assert not transfer.vjp(a, v).any()
        assert not transfer.pull_back(a, v).any()
        return
    (g,) = grad((torch_f(a) * v).sum(), a)
    torch.testing.assert_close(transfer.vjp(a, v), g, rtol=1e-11, atol=1e-13)
    pulled = transfer.pull_back(a, g)
    moves = transfer.derivative(a) > 0
    torch.testing.assert_close(pulled[moves], v[moves], rtol=1e-9, atol=1e-9)
    assert not pulled[~moves].any()


@each_transfer
@each_dtype
def test_pull_back_is_finite(transfer, dtype):
    a = tensor(-1e4, -90.0, -88.0, -44.0, 0.0, 44.0, 88.0, 90.0, 1e4, dtype=dtype)
    assert transfer.pull_back(a, torch.full_like(a, -100.0)).isfinite().all()


def test_softmax_vjp_and_pull_back():
    generator = torch.Generator().manual_seed(3)
    a, v = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    a.requires_grad_()
    (g,) = grad((functional.softmax(a, -1) * v).sum(), a)
    torch.testing.assert_close(Softmax().vjp(a, v), g)
    torch.testing.assert_close(Softmax().vjp(a, Softmax().pull_back(a, g)), g)


# Names, values and errors


def test_every_name_gives_its_transfer():
    expected = (
        "step linear relu leaky_relu sigmoid softmax tanh arctan softplus elu "
        "hardtanh relu6 selu celu softsign logsigmoid squared_relu"
    )
    assert set(transfers.NAMES) == set(expected.split())
    for name in transfers.NAMES:
        assert get(name).name == name
    assert get("Leaky-ReLU") == LeakyReLU()
    given_transfer = Softplus(3.0)
    assert get(given_transfer) is given_transfer


def test_transfers_are_values():
    assert LeakyReLU(0.2) == LeakyReLU(0.2) != LeakyReLU(0.3)
    assert len({Tanh(), Tanh(), ReLU(), ReLU6(), ReLU6(), Hardtanh(0, 6)}) == 4
    for transfer in (case[0] for case in CASES):
        assert eval(repr(transfer)) == transfer
    with pytest.raises(dataclasses.FrozenInstanceError):
        LeakyReLU().slope = 0.5


@pytest.mark.parametrize("name", ["nope", "", "softmax2", 3, None])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match=r"Invalid transfer=.*step, linear, relu.*squared_relu"):
        get(name)


@pytest.mark.parametrize("name", [*sorted(transfers.NON_MONOTONE), "GELU"])
def test_non_monotone_names_say_so(name):
    with pytest.raises(ValueError, match="not non-decreasing, so it has no matching loss"):
        bregman(name, tensor(0.0), tensor(1.0))


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        (LeakyReLU, {"slope": -1.0}, r"Invalid slope=-1\.0\. Must be >= 0\."),
        (LeakyReLU, {"slope": math.nan}, r"Invalid slope=nan\. Must be finite\."),
        (ELU, {"alpha": -0.5}, r"Invalid alpha=-0\.5\. Must be >= 0\."),
        (ELU, {"scale": 0.0}, r"Invalid scale=0\.0\. Must be > 0\."),
        (ELU, {"input_scale": -1.0}, r"Invalid input_scale=-1\.0\. Must be > 0\."),
        (CELU, {"alpha": 0.0}, r"Invalid alpha=0\.0\. Must be > 0\."),
        (Softplus, {"beta": 0.0}, r"Invalid beta=0\.0\. Must be > 0\."),
        (Softplus, {"beta": math.inf}, r"Invalid beta=inf\. Must be finite\."),
        (Hardtanh, {"min_val": 2.0}, r"Invalid min_val=2\.0\. Must be <= max_val=1\.0\."),
        (Hardtanh, {"max_val": math.nan}, r"Must be <= max_val=nan\."),
    ],
)
def test_bad_parameters(kind, parameters, message):
    with pytest.raises(ValueError, match=message):
        kind(**parameters)


def test_a_transfer_of_ones_own():
    class Cube(Transfer):
        name = "cube"

        def f(self, a):
            return a**3

        def derivative(self, a):
            return 3 * a**2

        def integral(self, a):
            return a**4 / 4

        def _dual(self, y):
            return 0.75 * y.abs() ** (4 / 3)

        def _inverse(self, y):
            return y.sign() * y.abs() ** (1 / 3)

    a_hat, a = tensor(2.0, -1.0), tensor(1.0, 1.5)
    torch.testing.assert_close(bregman(Cube(), a_hat, a), matching_loss(Cube(), Cube().f(a), a_hat))
