"""The local losses of the four variants against their definitions and autograd."""

from __future__ import annotations

import pytest
import torch
from cases import ACTIVATIONS, batch
from torch import Tensor
from torch.autograd import grad

from torch_locoprop.paper import transfers
from torch_locoprop.paper.divergences import bregman, matching_loss
from torch_locoprop.paper.losses import DualMatching, LocalLoss, Matching, PostSquared, Squared

each_name = pytest.mark.parametrize("name", [n for n in transfers.NAMES if n != "step"])


def rows(seed: int) -> Tensor:
    """Pre-activations ``[2, 4, 3]`` on both sides of zero, with no entry at a kink."""
    return 4 * batch(2, 4, 3, seed=seed) - 2


@pytest.mark.parametrize("loss", [Squared(), Matching(), PostSquared(), DualMatching()], ids=repr)
@each_name
def test_residual_is_the_gradient_of_the_value(loss: LocalLoss, name: str) -> None:
    """``δ = ∂D/∂a`` by autograd; one value for each row."""
    transfer = transfers.get(name)
    a, target = rows(1).requires_grad_(), rows(2)
    value = loss.value(a, target, transfer)
    assert value.shape == (2, 4)
    (expected,) = grad(value.sum(), a)
    torch.testing.assert_close(
        loss.residual(a.detach(), target, transfer), expected, rtol=1e-10, atol=1e-12
    )


def test_squared_value() -> None:
    a, target = rows(1), rows(2)
    distances = torch.linalg.vector_norm(a - target, dim=-1)
    torch.testing.assert_close(Squared().value(a, target, transfers.Linear()), distances**2 / 2)


@each_name
def test_matching_value_is_the_matching_loss_less_its_constant(name: str) -> None:
    """Eq. 7: ``D_F(a, f⁻¹(y*))`` for a target in the range of f, up to ``F*(y*)``."""
    transfer = transfers.get(name)
    a, a_star = rows(1), rows(2)
    y_star = transfer.f(a_star)
    loss, divergence = matching_loss(transfer, y_star, a), bregman(transfer, a, a_star)
    dual = transfer.dual(y_star)
    if transfer.elementwise:
        loss, divergence, dual = (t.sum(-1) for t in (loss, divergence, dual))
    value = Matching().value(a, y_star, transfer)
    torch.testing.assert_close(value + dual, loss, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(value + dual, divergence, rtol=1e-10, atol=1e-11)


@each_name
def test_post_squared_value(name: str) -> None:
    """Eq. 16: the squared distance of torch's own f from the target."""
    a, y_star = rows(1), rows(2)
    expected = torch.linalg.vector_norm(ACTIVATIONS[name](a) - y_star, dim=-1) ** 2 / 2
    found = PostSquared().value(a, y_star, transfers.get(name))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "name", [n for n in transfers.NAMES if transfers.get(n).strictly_increasing]
)
def test_dual_matching_value_is_the_divergence_of_the_dual(name: str) -> None:
    """Eq. 18: ``D_F*(f(a), f(a*))`` from F* and its gradient f⁻¹, which autograd gives."""
    transfer = transfers.get(name)
    a, a_star = rows(1), rows(2)
    y, y_star = transfer.f(a), transfer.f(a_star).requires_grad_()
    at_target = transfer.dual(y_star)
    (slope,) = grad(at_target.sum(), y_star)
    if name == "softmax":
        # On the simplex the gradient is determined up to a constant, which y − y* annihilates.
        assert (y - y_star).sum(-1).abs().max() < 1e-12
    linear = slope * (y - y_star)
    expected = transfer.dual(y) - at_target - (linear if transfer.elementwise else linear.sum(-1))
    expected = expected.sum(-1) if transfer.elementwise else expected
    found = DualMatching().value(a, a_star, transfer)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert (found > 1e-3).all()


@each_name
def test_curvature_is_the_mean_hessian(name: str) -> None:
    """``H = ∇²F`` by autograd's Hessian of F, averaged over the rows."""
    transfer = transfers.get(name)
    a = rows(1)[0]

    def integral(row: Tensor) -> Tensor:
        return transfer.integral(row).sum()

    hessians = [torch.autograd.functional.hessian(integral, row) for row in a]
    expected = torch.stack(hessians).mean(0)
    found = Matching().curvature(a, transfer)
    assert found is not None
    dense = torch.diag(found) if transfer.elementwise else found
    torch.testing.assert_close(dense, expected, rtol=1e-10, atol=1e-12)
    assert Squared().curvature(a, transfer) is None


def test_a_loss_of_ones_own_promises_nothing_that_it_has_not_said() -> None:
    assert LocalLoss.uses_transfer
    assert not LocalLoss.closed_form
    assert not LocalLoss.convex
