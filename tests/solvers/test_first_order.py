"""TensorFlow's optimizer semantics, on sequences computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from cases import FIRST_ORDER
from torch import Tensor

from torch_locoprop.solvers import SOLVERS, FirstOrder, Numbers, local_rate

GRADIENTS = (2.0, -1.0, 0.5)
NUMBERS = Numbers(lr=0.1, momentum=0.9, decay=0.8, eps=0.3)


def run(name: str, numbers: Numbers = NUMBERS) -> list[float]:
    """The weight after each of the gradients, from zero."""
    solver = SOLVERS[name]
    assert isinstance(solver, FirstOrder)
    w = torch.zeros((), dtype=torch.float64)
    state: dict[str, Tensor] = solver.init(w, numbers)
    path = []
    for g in GRADIENTS:
        change, state = solver.step(torch.tensor(g, dtype=torch.float64), state, numbers)
        w = w - change
        path.append(w.item())
    return path


def test_sgd() -> None:
    assert run("sgd") == pytest.approx([-0.2, -0.1, -0.15])


def test_momentum() -> None:
    # m: 2, 0.8, 1.22
    assert run("momentum") == pytest.approx([-0.2, -0.28, -0.402])


def test_nesterov_looks_ahead() -> None:
    # g + 0.9 m: 3.8, -0.28, 1.598
    assert run("nesterov") == pytest.approx([-0.38, -0.352, -0.5118])


def test_adagrad_starts_its_accumulator_at_eps_and_adds_no_eps() -> None:
    # v: 4.3, 5.3, 5.55
    steps = [0.2 / math.sqrt(4.3), -0.1 / math.sqrt(5.3), 0.05 / math.sqrt(5.55)]
    assert run("adagrad") == pytest.approx([-sum(steps[: k + 1]) for k in range(3)])


def test_rmsprop_starts_at_one_with_eps_inside_the_root_and_the_rate_inside_the_momentum() -> None:
    # v: 0.8·1 + 0.2·4 = 1.6; 0.8·1.6 + 0.2·1 = 1.48; 0.8·1.48 + 0.2·0.25 = 1.234
    m1 = 0.2 / math.sqrt(1.6 + 0.3)
    m2 = 0.9 * m1 - 0.1 / math.sqrt(1.48 + 0.3)
    m3 = 0.9 * m2 + 0.05 / math.sqrt(1.234 + 0.3)
    assert run("rmsprop") == pytest.approx([-m1, -m1 - m2, -m1 - m2 - m3])


def test_rmsprop_keeps_moving_at_a_zero_rate() -> None:
    """The trap of a schedule that reaches zero: the rate is inside the momentum."""
    solver = SOLVERS["rmsprop"]
    assert isinstance(solver, FirstOrder)
    one = torch.ones((), dtype=torch.float64)
    _, state = solver.step(one, solver.init(one, NUMBERS), NUMBERS)
    change, _ = solver.step(one, state, Numbers(lr=0.0, momentum=0.9, decay=0.8, eps=0.3))
    assert change.item() == pytest.approx(0.9 * 0.1 / math.sqrt(1.3))


def test_adam_puts_eps_outside_the_root_and_corrects_the_rate() -> None:
    m = v = w = 0.0
    expected = []
    for t, g in enumerate(GRADIENTS, start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.8 * v + 0.2 * g * g
        w -= 0.1 * math.sqrt(1 - 0.8**t) / (1 - 0.9**t) * m / (math.sqrt(v) + 0.3)
        expected.append(w)
    assert run("adam") == pytest.approx(expected)
    assert expected[0] == pytest.approx(-0.1 * math.sqrt(0.2) * 2 / (math.sqrt(0.8) + 0.3))


def test_local_rate_decays_to_a_quarter() -> None:
    linear = [local_rate(t, 10, "linear") for t in range(10)]
    assert linear == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.25])
    assert [local_rate(t, 3, "constant") for t in range(3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", [n for n, s in SOLVERS.items() if isinstance(s, FirstOrder)])
def test_a_population_is_stepped_as_its_members_are(name: str) -> None:
    """Leading dimensions are free: K problems at once equal K problems one by one."""
    solver = SOLVERS[name]
    assert isinstance(solver, FirstOrder)
    w, g = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=torch.manual_seed(0))
    together, state = solver.step(g, solver.init(w, NUMBERS), NUMBERS)
    for k in range(len(w)):
        alone, own = solver.step(g[k], solver.init(w[k], NUMBERS), NUMBERS)
        assert torch.equal(together[k], alone)
        assert all(torch.equal(state[key][k], own[key]) for key in own if key != "step")


def test_local_iterations_are_a_fixed_sequence_of_work() -> None:
    for name in FIRST_ORDER:
        assert SOLVERS[name].is_fixed_work(0, torch.zeros(2, 3), False)
        assert SOLVERS[name].is_fixed_work(5, torch.zeros(2, 3), True)
