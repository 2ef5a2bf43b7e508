"""Finite solutions are written, for each member: on a GPU, or by Triton's interpreter."""

import pytest
import torch

from torch_locoprop.fast import dispatch
from torch_locoprop.fast.triton import availability, guarded_writes


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (1, 4999), (3, 1)])
def test_one_number_that_is_not_finite(device: str, value: float, place: tuple[int, int]) -> None:
    tensors = [torch.randn(2, 2500, device=device) for _ in range(2)]
    tensors += [torch.randn(2, 3, device=device) for _ in range(2)]
    assert availability.supports(tensors)
    assert guarded_writes.finite(tensors).tolist() == [True]
    assert guarded_writes.finite(tensors, members=2).tolist() == [True, True]
    tensors[place[0]].view(-1)[place[1]] = value
    assert guarded_writes.finite(tensors).tolist() == [False]
    second = place[1] >= tensors[place[0]].shape[1]
    assert guarded_writes.finite(tensors, members=2).tolist() == [second, not second]


def test_writing(device: str) -> None:
    new = [torch.randn(3, 700, device=device), torch.randn(3, 2, device=device)]
    new.append(torch.randn(3, 700, device=device))
    old = [torch.zeros_like(tensor) for tensor in new]
    ok = torch.tensor([True, False, True], device=device)
    guarded_writes.write(ok, list(zip(new, old, strict=True)))
    for one, other in zip(new, old, strict=True):
        torch.testing.assert_close(other[[0, 2]], one[[0, 2]], rtol=0, atol=0)
        assert not other[1].any()


def test_the_largest_numbers_are_finite(device: str) -> None:
    assert guarded_writes.finite([torch.full((9,), 3.4e38, device=device)]).tolist() == [True]


def test_nothing_at_all(device: str) -> None:
    assert not availability.supports([])
    assert guarded_writes.finite([torch.empty(0, device=device)]).tolist() == [True]


def test_autograd_hears_of_it(device: str) -> None:
    new, old = torch.ones(7, device=device), torch.zeros(7, device=device)
    before = old._version
    dispatch.write(torch.tensor(True, device=device), [(new, old)])
    assert old._version > before
    assert old.all()
