"""Shapes, norms and random numbers of tensors, and what is known of those without values."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_locoprop.paper.tensors import has_values, holds, norm, seeded, spread


def test_numbers_take_the_dimensions_of_what_they_multiply() -> None:
    like = torch.zeros(2, 3, 4)
    scalar = torch.tensor(0.1, dtype=torch.float64)
    for number in (0.1, scalar):
        assert spread(number, like) is number
    of_members = spread(torch.tensor([0.1, 0.2]), like)
    assert isinstance(of_members, torch.Tensor)
    assert of_members.shape == (2, 1, 1)


def test_tensors_without_values() -> None:
    with FakeTensorMode():
        fake = torch.ones(())
    assert has_values(torch.ones(()))
    assert not has_values(torch.ones((), device="meta"))
    assert not has_values(fake)
    for unknown in (True, False):
        assert holds(torch.ones((), dtype=torch.bool, device="meta"), unknown=unknown) == unknown
        assert holds(torch.tensor(not unknown), unknown=unknown) is not unknown


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_seeds_of_generators(device: str) -> None:
    """The device ``meta`` has no generator; the one of the host serves."""
    found = seeded(torch.device(device), 3)
    expected = torch.Generator().manual_seed(3)
    assert torch.equal(torch.rand(4, generator=found), torch.rand(4, generator=expected))


def test_norms_of_several_tensors_in_half_precision() -> None:
    """200² is 40,000 and the sum of two is above the largest number of float16."""
    tensors = [torch.full((1,), 200.0).half(), torch.full((1, 1), -200.0).half()]
    found = norm(tensors)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(200.0 * 2**0.5))
    torch.testing.assert_close(norm(tensors[:1]), torch.tensor(200.0))
