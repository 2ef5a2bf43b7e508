"""Targets: their formulas, and the first local gradient against ``δ₀ᵀX`` from the rows."""

from __future__ import annotations

import pytest
import torch
from cases import BACKPROP_VARIANTS, batch
from torch import Tensor

from torch_locoprop.paper import transfers
from torch_locoprop.paper.targets import (
    DualMirrorDescent,
    GradientDescent,
    MirrorDescent,
    NaturalGradient,
    PostGradientDescent,
    Target,
)
from torch_locoprop.paper.tensors import Number
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.paper.variants import VARIANTS


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Return a, g and v, ``[2, 5, 3]``: two problems of five rows."""
    a, g, v = (batch(2, 5, 3, seed=seed) - 0.5 for seed in (1, 2, 3))
    return a, g, v


A, G, V = tensors()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (GradientDescent(), A - 0.7 * G),
        (MirrorDescent(), torch.tanh(A) - 0.7 * G),
        (PostGradientDescent(), torch.tanh(A) - 0.7 * V),
        (DualMirrorDescent(), A - 0.7 * V),
    ],
    ids=repr,
)
def test_targets_of_the_four_algorithms(target: Target, expected: Tensor) -> None:
    found = target(A, transfers.Tanh(), G, V, 0.7)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("target", [GradientDescent(), NaturalGradient()], ids=repr)
def test_without_gradients_of_rows_the_target_is_the_pre_activation(target: Target) -> None:
    assert target.starts_at_zero
    assert torch.equal(target(A, transfers.Tanh(), None, None, 0.7), A)


def test_without_gradients_of_rows_the_mirror_target_is_the_post_activation() -> None:
    assert MirrorDescent().starts_at_zero
    assert torch.equal(MirrorDescent()(A, transfers.Tanh(), None, None, 0.7), torch.tanh(A))


@pytest.mark.parametrize("gamma", [0.7, torch.tensor([0.7, 1.9]).double()], ids=["one", "each"])
@pytest.mark.parametrize("name", ["tanh", "softmax", "softplus"])
@pytest.mark.parametrize("variant", BACKPROP_VARIANTS)
def test_first_gradient_is_that_of_the_rows(variant: str, name: str, gamma: float | Tensor) -> None:
    """``γ G`` equals ``δ₀ᵀX`` for any rows X, where ``g = Jᵀv``; also with one γ for each problem."""
    transfer, chosen = transfers.get(name), VARIANTS[variant]
    x = batch(2, 5, 4, seed=4)
    g = transfer.vjp(A, V)
    ordinary = {"weight": g.mT @ x, "bias": g.sum(-2)}
    found = chosen.target.first_gradient(ordinary, gamma, None)
    assert found is not None
    delta = chosen.loss.residual(A, chosen.target(A, transfer, g, V, gamma), transfer)
    torch.testing.assert_close(found["weight"], delta.mT @ x, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found["bias"], delta.sum(-2), rtol=1e-11, atol=1e-12)
    assert chosen.target.knows_first_gradient


def test_first_natural_gradient_against_a_dense_inverse() -> None:
    """``γ D⁻¹ G`` for weight and bias, with D damped by a tenth of its mean diagonal."""
    root = batch(3, 3, seed=5)
    fisher = root @ root.mT
    gradient = {"weight": batch(3, 4, seed=6), "bias": batch(3, seed=7)}
    found = NaturalGradient(damping=0.1).first_gradient(gradient, 2.0, fisher)
    assert found is not None
    inverse = torch.linalg.inv(fisher + 0.1 * fisher.trace() / 3 * torch.eye(3).double())
    for key, value in gradient.items():
        torch.testing.assert_close(found[key], 2.0 * inverse @ value, rtol=1e-11, atol=1e-12)


def test_a_target_of_ones_own_takes_its_first_gradient_from_the_rows() -> None:
    class Halfway(Target):
        def __call__(
            self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Number
        ) -> Tensor:
            assert g is not None
            return a - gamma / 2 * g

    assert Halfway().first_gradient({"weight": A}, 1.0, None) is None
    assert not Halfway().knows_first_gradient


def test_a_target_of_ones_own_promises_nothing_that_it_has_not_said() -> None:
    assert not Target.starts_at_zero
