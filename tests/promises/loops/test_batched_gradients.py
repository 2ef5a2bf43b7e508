"""Gradients of several outputs in one backward pass, as of a Jacobian, leave the step alone."""

import pytest
import torch
from torch import Tensor, nn

from torch_locoprop import LocoProp


def weights_after_a_step(variant: str, jacobian: bool) -> list[Tensor]:
    """Return the weights after a step; a Jacobian of the same outputs may be computed before it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.rand(7, 4).double(), torch.rand(7, 3).double()
    opt = LocoProp(model, variant=variant, output_transfer="linear")
    out = model(x)
    if jacobian:
        directions = torch.eye(out.numel()).double().reshape(-1, *out.shape)
        weights = list(model.parameters())
        rows = torch.autograd.grad(
            out, weights, directions, retain_graph=True, is_grads_batched=True
        )
        assert rows[0].shape == (21, 5, 4)
    (out - y).square().sum().backward()
    opt.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
def test_a_jacobian_before_the_step_changes_nothing(variant: str) -> None:
    plain = weights_after_a_step(variant, jacobian=False)
    for one, other in zip(plain, weights_after_a_step(variant, jacobian=True), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
