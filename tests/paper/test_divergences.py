"""Bregman divergences and matching losses against quadrature, autograd and torch's losses."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paper.transfer_cases import (
    CASES,
    each_case,
    each_strict,
    each_transfer,
    numbers,
    quick,
    tensor,
    vectors,
    within,
)
from torch.autograd import grad
from torch.nn import functional

from torch_locoprop.paper import transfers
from torch_locoprop.paper.divergences import bregman, matching_loss
from torch_locoprop.paper.transfers import Transfer

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


@pytest.mark.parametrize("name", [*sorted(transfers.NON_MONOTONE), "GELU"])
def test_non_monotone_names_say_so(name):
    with pytest.raises(ValueError, match="not non-decreasing, so it has no matching loss"):
        bregman(name, tensor(0.0), tensor(1.0))


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
