"""The RMSProp kernel equals the plain version: on a GPU, or by Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from torch_locoprop.fast import dispatch
from torch_locoprop.fast.triton import rmsprop
from torch_locoprop.solvers import SOLVERS
from torch_locoprop.solvers.base import Numbers
from torch_locoprop.solvers.first_order import RmsProp


def numbers(members: int | None, device: str, dtype: torch.dtype = torch.float32) -> Numbers:
    if members is None:
        return Numbers(1e-3, 0.9, 0.99, 1e-5)
    spread = torch.linspace(1.0, 2.0, members, device=device, dtype=dtype)
    return Numbers(1e-3 * spread, 0.4 * spread, 0.45 * spread, 1e-5 * spread)


def plain(start: Tensor, gradients: list[Tensor], numbers: Numbers, rate: float) -> list[Tensor]:
    """Return the plain version's result, step by step."""
    solver, tensor = RmsProp(), start.clone()
    state = solver.init(tensor, numbers.at(1.0, tensor))
    for gradient in gradients:
        change, state = solver.step(gradient, state, numbers.at(rate, tensor))
        tensor = tensor - change
    return [tensor, state["square"], state["momentum"]]


@pytest.mark.parametrize(("members", "shape"), [(None, (7, 331)), (None, (5,)), (3, (3, 40, 50))])
def test_equals_the_plain_steps(device: str, members: int | None, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(shape, generator=generator).to(device) for _ in range(4))
    own = numbers(members, device)
    tensor, solver = start.clone(), RmsProp()
    state = solver.init(tensor, own.at(1.0, tensor))
    assert rmsprop.fits([tensor, *gradients, *state.values()], [own.lr, own.eps])
    for gradient in gradients:
        dispatch.advance_(solver, tensor, gradient, state, own, 0.75)
    for ours, theirs in zip(
        (tensor, state["square"], state["momentum"]),
        plain(start, gradients, own, 0.75),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


def test_a_rate_on_the_device_is_read_when_the_step_runs(device: str) -> None:
    tensor, gradient = torch.zeros(10, device=device), torch.ones(10, device=device)
    rate = torch.tensor(0.0, device=device)
    own = Numbers(rate, 0.0, 0.0, 1e-12)
    state = RmsProp().init(tensor, own)
    dispatch.advance_(RmsProp(), tensor, gradient, state, own, 1.0)
    assert not tensor.any()
    rate.fill_(0.5)
    dispatch.advance_(RmsProp(), tensor, gradient, state, own, 1.0)
    torch.testing.assert_close(tensor, torch.full_like(tensor, -0.5))


def test_other_dtypes_and_layouts_take_the_plain_way(device: str) -> None:
    double = torch.zeros(4, 4, dtype=torch.float64, device=device)
    assert not rmsprop.fits([double], [])
    assert not rmsprop.fits([double.float().T[:, 1:]], [])
    assert not rmsprop.fits([double.float()], [torch.ones(2, dtype=torch.float64)])


def test_the_cpu_takes_the_plain_way() -> None:
    assert not rmsprop.fits([torch.zeros(3)], [1.0])


@pytest.mark.parametrize("members", [None, 3])
def test_in_place_on_the_cpu_equals_the_plain_steps(members: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (
        torch.randn(3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    own = numbers(members, "cpu", torch.float64)
    tensor, solver = start.clone(), SOLVERS["rmsprop"]
    assert isinstance(solver, RmsProp)
    state = solver.init(tensor, own.at(1.0, tensor))
    for gradient in gradients:
        dispatch.advance_(solver, tensor, gradient, state, own, 0.75)
    expected = plain(start, gradients, own, 0.75)
    found = [tensor, state["square"], state["momentum"]]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


class Twice(RmsProp):
    """A user's solver that uses RMSProp's state."""

    def step(
        self, gradient: Tensor, state: dict[str, Tensor], numbers: Numbers
    ) -> tuple[Tensor, dict[str, Tensor]]:
        change, state = super().step(gradient, state, numbers)
        return 2 * change, state


def test_a_subclass_keeps_its_own_rule() -> None:
    tensor, own = torch.zeros(3), numbers(None, "cpu")
    state = Twice().init(tensor, own)
    dispatch.advance_(Twice(), tensor, torch.ones(3), state, own, 1.0)
    once = torch.zeros(3)
    dispatch.advance_(RmsProp(), once, torch.ones(3), RmsProp().init(once, own), own, 1.0)
    torch.testing.assert_close(tensor, 2 * once)
