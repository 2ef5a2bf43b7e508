"""Numbers of one local iteration, and what all solvers say of themselves."""

import torch

from torch_locoprop.solvers import Numbers
from torch_locoprop.solvers.base import Checked, Solver


def test_a_rate_multiplies_the_learning_rate_alone() -> None:
    found = Numbers(0.4, momentum=0.9, decay=0.8, eps=1e-3).at(0.25, torch.zeros(3, 4))
    assert (found.lr, found.momentum, found.decay, found.eps) == (0.1, 0.9, 0.8, 1e-3)


def test_a_rate_multiplies_each_learning_rate_of_a_population() -> None:
    lr = torch.tensor([0.4, 0.8])
    found = Numbers(lr, lr + 1, lr + 2, lr + 3).at(0.25, torch.zeros(2, 3, 4))
    assert torch.equal(torch.as_tensor(found.lr), lr.reshape(2, 1, 1) * 0.25)
    for i, number in enumerate((found.momentum, found.decay, found.eps), 1):
        assert torch.equal(torch.as_tensor(number), lr.reshape(2, 1, 1) + i)


def test_numbers_are_zero_unless_given() -> None:
    numbers = Numbers(0.4)
    assert (numbers.momentum, numbers.decay, numbers.eps) == (0.0, 0.0, 0.0)


def test_checked_tensors_are_those_given() -> None:
    tensors, finite = {"weight": torch.ones(2)}, torch.tensor([True])
    checked = Checked(tensors, finite)
    assert checked == tensors
    assert checked.finite is finite


def test_a_solver_of_ones_own_is_not_replayed_and_has_one_phase() -> None:
    solver = Solver()
    assert not solver.is_fixed_work(0, torch.zeros(2, 3), False)
    assert {solver.phase(number) for number in range(4)} == {0}
    assert not solver.closed_form  # nothing is promised that it has not said
    assert not solver.stateless
