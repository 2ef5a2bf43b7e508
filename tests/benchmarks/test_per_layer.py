"""The simple loop over layers equals `LocoProp` with variant locoprop-m and the same solver."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.per_layer import PerLayerLoop, stages
from torch_locoprop import LocoProp
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss


@pytest.mark.parametrize("local_steps", [1, 4])
@pytest.mark.parametrize("transfer", ["tanh", "relu"])
def test_it_equals_ours(local_steps: int, transfer: str) -> None:
    model = architectures.build("12-8-5-3", transfer).double()
    twin = copy.deepcopy(model)
    images = torch.rand(20, 12, dtype=torch.float64)
    loop = PerLayerLoop(
        model,
        images,
        lambda params: torch.optim.SGD(params, lr=0.02),
        gamma=3.0,
        local_steps=local_steps,
    )
    ours = LocoProp(
        twin, 0.02, gamma=3.0, local_steps=local_steps, solver="sgd", output_transfer="sigmoid"
    )
    start = [p.detach().clone() for p in twin.parameters()]
    for _ in range(3):
        loop.backprop()
        loop.update()
        ours.zero_grad()
        reconstruction_loss(twin(images), images).backward()
        ours.step()
    for mine, theirs, before in zip(model.parameters(), twin.parameters(), start, strict=True):
        assert not torch.equal(theirs, before)
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_the_code_is_linear_and_the_output_has_a_sigmoid_in_its_local_loss_only() -> None:
    found = stages(architectures.build("6-5-4"))
    assert [stage.linear.out_features for stage in found] == [5, 4, 5, 6]
    kinds = [(type(stage.then), type(stage.local)) for stage in found]
    assert kinds[0] == kinds[2] == (nn.Tanh, nn.Tanh)
    assert kinds[1] == (nn.Identity, nn.Identity)
    assert kinds[3] == (nn.Identity, nn.Sigmoid)
