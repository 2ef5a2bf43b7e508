"""Every transfer against quadrature, numeric suprema, autograd and torch's own functions."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from paper.transfer_cases import (
    CASES,
    SMOOTH_AT_ZERO,
    away_from,
    each_case,
    each_dtype,
    each_strict,
    each_transfer,
    supremum,
    tensor,
    within,
)
from scipy.integrate import quad
from scipy.special import spence
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.nn import functional

from torch_locoprop.paper import transfers
from torch_locoprop.paper.divergences import bregman, matching_loss
from torch_locoprop.paper.transfer_base import xlogx_1p
from torch_locoprop.paper.transfers import (
    CELU,
    ELU,
    SELU,
    Arctan,
    Hardtanh,
    LeakyReLU,
    Linear,
    ReLU,
    ReLU6,
    Sigmoid,
    Softmax,
    Softplus,
    Softsign,
    Step,
    Tanh,
    get,
)

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


# F of each row of the paper's Table 2, as printed; for ELU with the brackets put right.
TABLE_2 = {
    "step": (Step(), lambda a: a.clamp(min=0)),
    "linear": (Linear(), lambda a: a**2 / 2),
    "leaky relu": (LeakyReLU(0.2), lambda a: a * (a.clamp(min=0) - 0.2 * (-a).clamp(min=0)) / 2),
    "relu": (ReLU(), lambda a: a * a.clamp(min=0) / 2),
    "sigmoid": (Sigmoid(), lambda a: a + torch.log(1 + torch.exp(-a))),
    "tanh": (Tanh(), lambda a: torch.log(torch.cosh(a))),
    "arctan": (Arctan(), lambda a: a * torch.arctan(a) - torch.log(torch.sqrt(1 + a**2))),
    # scipy's spence(z) is Li₂(1 − z).
    "softplus": (Softplus(), lambda a: -torch.from_numpy(spence(1 + np.exp(a.numpy())))),
    "elu": (ELU(0.7), lambda a: torch.where(a < 0, 0.7 * (torch.exp(a) - a - 1), a**2 / 2)),
}


@pytest.mark.parametrize("row", TABLE_2)
def test_table_2_has_the_integral_up_to_a_constant(row):
    transfer, printed = TABLE_2[row]
    a = torch.linspace(-6, 6, 49, dtype=torch.float64)
    found = transfer.integral(a) - transfer.integral(tensor(0.3))
    torch.testing.assert_close(found, printed(a) - printed(tensor(0.3)), rtol=1e-12, atol=1e-12)


def test_table_2_softmax():
    a = 3 * torch.randn(5, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    torch.testing.assert_close(Softmax().integral(a), torch.log(torch.exp(a).sum(-1)))
    expected = torch.exp(a) / torch.exp(a).sum(-1, keepdim=True)
    torch.testing.assert_close(Softmax().f(a), expected)


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
        assert eval(repr(transfer), vars(transfers)) == transfer
    with pytest.raises(dataclasses.FrozenInstanceError):
        LeakyReLU().slope = 0.5


@pytest.mark.parametrize("name", ["nope", "", "softmax2", 3, None])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match=r"Invalid transfer=.*step, linear, relu.*squared_relu"):
        get(name)


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_entropies_next_to_the_end_of_the_domain(dtype):
    """The two numbers above −1 are −1 + eps/2 and −1 + eps."""
    eps = torch.finfo(dtype).eps
    t = torch.tensor([-1.0, -1 + eps / 2, -1 + eps], dtype=dtype)
    expected = [0.0, eps / 2 * math.log(eps / 2), eps * math.log(eps)]
    found = xlogx_1p(t)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=dtype), rtol=4 * eps, atol=0)


def test_the_dual_of_softmax_is_infinite_outside_the_simplex():
    """The tolerance of float16 is √(1/1024) = 1/32, and a point at that distance is within."""
    outside = tensor([0.5, 0.6], [-0.1, 1.1], [0.5, 0.4])
    assert torch.equal(Softmax().dual(outside), torch.full((3,), math.inf).double())
    near = torch.tensor([[0.5, 0.53125], [-0.03125, 1.03125]], dtype=torch.float16)
    assert Softmax().dual(near).isfinite().all()
    assert Softmax().dual(near + near.sign() * 2**-10).isinf().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_saturated_values_have_an_inverse_in_every_dtype(dtype):
    """The end of the domain of SELU may round to a number below it."""
    for transfer in (SELU(), ELU(0.7), CELU(0.3)):
        end = transfer.f(torch.tensor([-1000.0], dtype=dtype))
        assert torch.equal(transfer.inverse(end), torch.full((1,), -math.inf, dtype=dtype))
        assert not transfer.dual(end).isnan().any()


def test_quotients_of_rounding_stay_within_the_domain():
    """A quotient computed as a product with the reciprocal may be a little below −1."""
    below = torch.tensor([-0.7 * (1 + 1e-6)], dtype=torch.float64)
    assert ELU(0.7)._fraction(below).item() == -1


@pytest.mark.parametrize("kind", [ReLU, ReLU6, SELU])
def test_fixed_numbers_are_no_parameters(kind):
    assert repr(kind()) == f"{kind.__name__}()"
    with pytest.raises(TypeError):
        kind(1.0)


def test_celu_has_one_parameter():
    assert repr(CELU(0.5)) == "CELU(alpha=0.5)"
    with pytest.raises(TypeError):
        CELU(0.5, 1.0)


def test_an_elu_may_be_steepest_below_zero():
    steep = ELU(1.0, 1.0, 2.0)
    assert steep.max_slope == 2.0
    slope = steep.derivative(tensor(-1e-9, 1.0))
    torch.testing.assert_close(slope, tensor(2.0, 1.0))


def test_the_outputs_of_softmax_come_close_to_both_ends_of_its_domain() -> None:
    y = Softmax().f(tensor(50.0, 0.0))
    assert (y.min(), y.max()) == pytest.approx(Softmax().domain, abs=1e-20)


def test_a_hardtanh_of_one_value_is_constant() -> None:
    assert Hardtanh(2.0, 2.0).f(tensor(-3.0, 5.0)).tolist() == [2.0, 2.0]
