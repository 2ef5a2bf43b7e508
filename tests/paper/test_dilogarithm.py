"""The integral of softplus and its dual, against mpmath's polylogarithm."""

import mpmath
import pytest
import torch

from torch_locoprop.paper.dilogarithm import _COEFFICIENTS, softplus_dual, softplus_integral

GRID = torch.cat([torch.linspace(-50, 50, 101), torch.linspace(-1, 1, 21)]).double()


def reference_integral(a):
    """``−Li₂(−eᵃ)`` in 40 digits."""
    with mpmath.workdps(40):
        return [float(-mpmath.polylog(2, -mpmath.exp(x)).real) for x in a.tolist()]


def reference_dual(y):
    """``y a + Li₂(−eᵃ)`` at ``a = log(eʸ − 1)`` in 40 digits."""
    with mpmath.workdps(40):
        return [
            float(x * mpmath.log(mpmath.expm1(x)) + mpmath.polylog(2, -mpmath.expm1(x)).real)
            for x in map(mpmath.mpf, y.tolist())
        ]


def test_integral_matches_polylog():
    expected = torch.tensor(reference_integral(GRID), dtype=torch.float64)
    torch.testing.assert_close(softplus_integral(GRID), expected, rtol=2e-15, atol=0)


def test_integral_in_float32():
    expected = torch.tensor(reference_integral(GRID.float()), dtype=torch.float32)
    torch.testing.assert_close(softplus_integral(GRID.float()), expected, rtol=1e-6, atol=0)


def test_integral_keeps_the_shape():
    a = GRID[:120].reshape(2, 3, 20)
    assert torch.equal(softplus_integral(a).flatten(), softplus_integral(a.flatten()))


def test_gradient_is_softplus_and_curvature_is_sigmoid():
    a = GRID.clone().requires_grad_()
    (first,) = torch.autograd.grad(softplus_integral(a).sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), a)
    softplus = [float(mpmath.log1p(mpmath.exp(x))) for x in GRID.tolist()]
    torch.testing.assert_close(
        first, torch.tensor(softplus, dtype=torch.float64), rtol=2e-15, atol=0
    )
    torch.testing.assert_close(second, GRID.sigmoid(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_derivatives_exactly_at_zero(dtype):
    a = torch.zeros((), dtype=dtype, requires_grad=True)
    value = softplus_integral(a)
    (first,) = torch.autograd.grad(value, a, create_graph=True)
    (second,) = torch.autograd.grad(first, a, create_graph=True)
    (third,) = torch.autograd.grad(second, a)
    for result, expected in [
        (value, mpmath.pi**2 / 12),
        (first, mpmath.log(2)),
        (second, 0.5),
        (third, 0.25),
    ]:
        assert result.item() == pytest.approx(float(expected), rel=8 * torch.finfo(dtype).eps)


def test_gradgradcheck():
    a = torch.tensor([-3.0, -0.2, 0.3, 4.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(softplus_integral, a)
    assert torch.autograd.gradgradcheck(softplus_integral, a)


def test_dual_matches_polylog():
    # Both branches and the seam between them at log 2.
    y = torch.cat([torch.logspace(-12, 1.5, 60), torch.linspace(0.6, 1.2, 41)]).double()
    expected = torch.tensor(reference_dual(y), dtype=torch.float64)
    torch.testing.assert_close(softplus_dual(y), expected, rtol=2e-15, atol=2e-15)


def test_dual_at_zero_and_its_gradient():
    y = torch.tensor([0.0, 1e-6, 0.3, 0.6931, 0.6932, 5.0, 1e4], dtype=torch.float64)
    y.requires_grad_()
    value = softplus_dual(y)
    assert value[0] == 0
    (gradient,) = torch.autograd.grad(value.sum(), y)
    assert gradient.isfinite().all()
    inverse = [float(x + mpmath.log(-mpmath.expm1(-x))) for x in y[1:].tolist()]
    torch.testing.assert_close(
        gradient[1:], torch.tensor(inverse, dtype=torch.float64), rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_finite_far_out(dtype):
    a = torch.tensor([-1e4, -500.0, 500.0, 1e4], dtype=dtype, requires_grad=True)
    value = softplus_integral(a)
    (first,) = torch.autograd.grad(value.sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), a)
    constant = float(mpmath.pi**2 / 6)
    expected = torch.tensor([0, 0, 500.0**2 / 2 + constant, 1e8 / 2 + constant], dtype=dtype)
    torch.testing.assert_close(value, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-30)
    torch.testing.assert_close(first, a.detach().relu())
    torch.testing.assert_close(second, (a > 0).to(dtype))


def test_the_slope_of_the_dual_has_all_digits_on_both_sides_of_log_2():
    """It is ``log(eʸ − 1)``; the series loses digits of the slope soon after log 2."""
    y = torch.linspace(0.3, 1.25, 401, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(softplus_dual(y).sum(), y)
    torch.testing.assert_close(slope, y.detach().expm1().log(), rtol=0, atol=2e-15)


def test_coefficients_are_those_of_bernoulli():
    """The last of them change no result by more than its rounding."""
    with mpmath.workdps(40):
        expected = [
            float(mpmath.bernoulli(2 * k) / mpmath.factorial(2 * k + 1)) for k in range(1, 9)
        ]
    assert pytest.approx(expected, rel=1e-15, abs=0) == list(_COEFFICIENTS)
