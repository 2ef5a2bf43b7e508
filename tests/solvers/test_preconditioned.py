"""The preconditioned solver: it never raises the local loss, and needs few iterations."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cases import batch, cross_entropy, network, weights
from paper.transfer_cases import CASES
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.layers import layer_kind
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import LocalLoss, Matching, Squared
from torch_locoprop.paper.objective import objective
from torch_locoprop.paper.preconditioning import (
    descending_fraction,
    preconditioned,
    regularized_inverse,
)
from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.targets import GradientDescent, MirrorDescent
from torch_locoprop.paper.transfers import (
    Hardtanh,
    Linear,
    ReLU,
    Sigmoid,
    Softmax,
    SquaredReLU,
    Step,
    Tanh,
    Transfer,
)
from torch_locoprop.solvers import SOLVERS, Numbers, Preconditioned, Solver

TRANSFERS = [case[0] for case in CASES] + [Softmax()]
BOUNDED = [transfer for transfer in TRANSFERS if transfer.max_slope < math.inf]
each_transfer = pytest.mark.parametrize("transfer", TRANSFERS, ids=repr)
each_bounded = pytest.mark.parametrize("transfer", BOUNDED, ids=repr)


def random_problem(
    transfer: Transfer, seed: int, *, rows: int = 60, n: int = 12, d: int = 5, scale: float = 1.0
) -> LocalProblem:
    """Return a problem with correlated inputs, and with noisy targets of other weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    spectrum = torch.logspace(0, -1.5, n, dtype=torch.float64)
    x = (normal(rows, n) * spectrum) @ torch.linalg.qr(normal(n, n))[0] + 0.3
    start = {"weight": normal(d, n), "bias": 0.5 * normal(d)}
    a = x @ start["weight"].mT + start["bias"]
    other = x @ normal(d, n).mT + 0.5 * normal(d) + 0.3 * normal(rows, d)
    g = transfer.f(a) - transfer.f(scale * other)
    return LocalProblem(
        linear_map=Dense(),
        x=x,
        start=start,
        fixed={},
        backprop={"weight": g.mT @ x, "bias": g.sum(0)},
        target=MirrorDescent(),
        loss=Matching(),
        transfer=transfer,
        gamma=1.0,
        eta=1.0,
        regularizer=REGULARIZERS["none"],
        g=g,
    )


def solved(
    problem: LocalProblem, solver: Solver, steps: int, lr: float = 1.0, momentum: float = 0.0
) -> dict[str, Tensor]:
    numbers = {name: Numbers(lr, momentum, 0.9, 1e-5) for name in problem.start}
    return solver.solve(problem, {name: {} for name in problem.start}, numbers, steps, "linear")[0]


def change(
    problem: LocalProblem, solver: Solver, steps: int, lr: float = 1.0, momentum: float = 0.0
) -> float:
    """Return by how much the local loss changes, by the values of F and not by its slopes."""
    return objective(problem, solved(problem, solver, steps, lr, momentum)).item()


# ---- what is promised ----------------------------------------------------------------------------


@pytest.mark.parametrize("slope", ["mean", "bound"])
@each_transfer
def test_the_local_loss_never_rises(transfer: Transfer, slope: str) -> None:
    if slope == "bound" and transfer not in BOUNDED:
        pytest.skip("no bound")
    for seed in range(3):
        problem = random_problem(transfer, seed, scale=(0.3, 1.0, 3.0)[seed])
        losses = [0.0]
        losses += [change(problem, Preconditioned(slope=slope), t) for t in range(1, 13)]
        scale = abs(losses[-1])
        assert all(b <= a + 1e-13 * scale for a, b in pairwise(losses))
        assert losses[4] < 0
        part = [change(problem, Preconditioned(slope=slope), 3, lr) for lr in (0.0, 0.01, 0.3, 1.0)]
        assert part[0] == 0
        assert all(b < a for a, b in pairwise(part))


@each_transfer
def test_three_iterations_get_lower_than_ten_of_rmsprop_at_its_best_rate(
    transfer: Transfer,
) -> None:
    for seed in range(3):
        problem = random_problem(transfer, seed)
        rates = [10 ** (e / 4) for e in range(-16, 5)]
        found = [
            change(problem, SOLVERS["rmsprop"], 10, lr, momentum)
            for lr in rates
            for momentum in (0.0, 0.9)
        ]
        best = min(value for value in found if math.isfinite(value))
        assert best < 0
        assert change(problem, Preconditioned(), 3) < best


@each_bounded
def test_full_steps_with_the_bound_never_raise_the_loss_nor_pass_the_minimum(
    transfer: Transfer,
) -> None:
    """The proof in ``paper/preconditioning.py``, without momentum or check, at several rates."""
    for seed in range(3):
        problem = random_problem(transfer, seed, scale=2.0)
        gram = problem.square(torch.float64)
        inverse = regularized_inverse(gram, 1e-6)
        for eta in (0.3, 1.0):
            at = problem.start
            loss = 0.0
            for _ in range(8):
                gradient = joined(problem.gradient(at))
                step = -eta * preconditioned(gradient, inverse, transfer.max_slope)
                new = {"weight": at["weight"] + step[:, :-1], "bias": at["bias"] + step[:, -1]}
                decrease = (eta - eta**2 / 2) * (gradient * -step / eta).sum()
                value = objective(problem, new).item()
                assert value <= loss - decrease.item() + 1e-9 * abs(loss)
                assert (joined(problem.gradient(new)) * step).sum() <= 1e-9
                at, loss = new, value


def joined(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors["weight"], tensors["bias"].unsqueeze(-1)], -1)


@each_bounded
def test_max_slope_bounds_the_hessian(transfer: Transfer) -> None:
    a = torch.randn(400, 4, dtype=torch.float64) * 3
    a[0] = 0.0
    hessian = transfer.derivative(a)
    if transfer.elementwise:
        hessian = torch.diag_embed(hessian)
    largest = torch.linalg.eigvalsh(hessian)[..., -1]
    assert largest.max() <= transfer.max_slope * (1 + 1e-12)


@each_bounded
def test_max_slope_is_reached(transfer: Transfer) -> None:
    """A larger bound would make steps shorter than they may be."""
    if transfer.elementwise:
        a = torch.linspace(-60, 60, 24001, dtype=torch.float64)
        assert transfer.derivative(a).max() > 0.999 * transfer.max_slope


def test_softmax_reaches_half_and_sigmoid_a_quarter() -> None:
    """The bounds are no larger than they must be."""
    two = Softmax().derivative(torch.tensor([0.0, 0.0, -50.0], dtype=torch.float64))
    assert torch.linalg.eigvalsh(two)[-1].item() == pytest.approx(Softmax().max_slope)
    assert Sigmoid().derivative(torch.zeros(())).item() == Sigmoid().max_slope


@pytest.mark.parametrize("transfer", [Tanh(), Sigmoid(), ReLU(), Softmax()], ids=repr)
def test_many_iterations_reach_the_minimum(transfer: Transfer) -> None:
    problem = random_problem(transfer, 1)
    found = solved(problem, Preconditioned(), 400)
    first, last = problem.first_gradient, problem.gradient(found)
    for name in found:
        assert last[name].norm() < 1e-5 * first[name].norm()


@pytest.mark.parametrize("loss", [Matching(), Squared()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rounding_does_not_grow_after_the_minimum(loss: LocalLoss, dtype: torch.dtype) -> None:
    whole = random_problem(Tanh(), 1)
    whole = replace(whole, loss=loss, target=GradientDescent(), g=None, gamma=0.5)
    problem = replace(
        whole,
        x=whole.x.to(dtype),
        start={k: t.to(dtype) for k, t in whole.start.items()},
        backprop={k: t.to(dtype) for k, t in whole.backprop.items()},
    )
    if isinstance(loss, Matching):
        problem, whole = (replace(p, target=MirrorDescent()) for p in (problem, whole))
    near, far = (
        objective(
            whole, {k: t.double() for k, t in solved(problem, Preconditioned(), steps).items()}
        )
        for steps in (30, 500)
    )
    assert far - near <= 1e2 * torch.finfo(dtype).eps * abs(near)


@pytest.mark.parametrize("slope", ["mean", "bound"])
def test_one_iteration_solves_a_squared_problem(slope: str) -> None:
    """With λ near zero, a squared loss is at its minimum after one step, which is that of Eq. 4."""
    problem = replace(
        random_problem(Linear(), 0), loss=Squared(), target=GradientDescent(), gamma=0.7
    )
    found = solved(problem, Preconditioned(damping=1e-12, slope=slope), 1)
    rows = torch.cat([problem.x, torch.ones(60, 1, dtype=torch.float64)], 1)
    expected = torch.linalg.lstsq(rows, -0.7 * problem.g).solution.mT
    moved = joined(found) - joined(problem.start)
    torch.testing.assert_close(moved, expected, rtol=1e-7, atol=1e-8)


def test_the_learning_rate_is_the_part_of_the_way() -> None:
    problem = random_problem(Tanh(), 0)
    whole, half = (solved(problem, Preconditioned(), 3, lr)["weight"] for lr in (1.0, 0.5))
    start = problem.start["weight"]
    torch.testing.assert_close(half - start, 0.5 * (whole - start), rtol=1e-12, atol=1e-13)


def in_weights(problem: LocalProblem, steps: int) -> tuple[Tensor, list[float]]:
    """Return the solution of the documented iteration, and the fractions of its steps.

    It is written in weights, with autograd for the gradients and slopes. FISTA's counts
    ``t ← (1 + √(1 + 4 t²))/2`` give its momentum ``(t₋ − 1)/t``; an output whose step was shortened
    starts again.
    """
    wide = torch.cat([problem.x, torch.ones_like(problem.x[:, :1])], 1)
    start = joined(problem.start)
    slopes = problem.transfer.derivative(wide @ start.mT).mean(0)
    h = slopes.clamp_min(0.4)
    c = wide.mT @ wide
    inverse = torch.linalg.inv(c + 1e-2 * c.diagonal().mean() * torch.eye(len(c)).double())
    goal = wide.mT @ (problem.transfer.f(wide @ start.mT) - problem.gamma * problem.g)

    def gradient(moved: Tensor) -> Tensor:
        at = (start + moved).requires_grad_()
        loss = problem.transfer.integral(wide @ at.mT).sum() - (at * goal.mT).sum()
        return torch.autograd.grad(loss, at)[0]

    moved = velocity = torch.zeros_like(start)
    count, momentum, scale = torch.ones(3, len(start)).double()
    momentum = 0 * momentum
    fractions: list[float] = []
    for _ in range(steps):
        step = velocity - scale[:, None] * gradient(moved + velocity) @ inverse / h[:, None]

        def slope(t: Tensor, at: Tensor = moved, along: Tensor = step) -> tuple[Tensor, Tensor]:
            found = (gradient(at + t[:, None] * along) * along).sum(1)
            return found, found[None]

        part = descending_fraction(slope, slope(torch.zeros_like(h)), 3)
        moved = moved + part.t[:, None] * step
        stuck = (part.t == 0) & (momentum == 0)
        scale = torch.where(stuck, scale * part.untried, scale)
        after = (1 + (1 + 4 * count.square()).sqrt()) / 2
        momentum = torch.where(part.t < 1, 0.0, (count - 1) / after)
        count = torch.where(part.t < 1, 1.0, after)
        velocity = momentum[:, None] * step
        fractions += part.t.tolist()
    return moved, fractions


@pytest.mark.parametrize(("transfer", "shift"), [(Tanh(), 0.0), (SquaredReLU(), -6.0)], ids=str)
def test_iterations_are_those_of_nesterov_with_restarts(transfer: Transfer, shift: float) -> None:
    """Outputs far in the flat part of a squared ReLU find no step short enough at first."""
    seen: list[float] = []
    for seed in range(3):
        problem = replace(
            random_problem(transfer, seed, scale=2.0), gamma=0.7 if shift == 0 else 100
        )
        start = {**problem.start, "bias": problem.start["bias"] + shift}
        problem = replace(problem, start=start)
        for steps in (1, 2, 3, 7):
            found = joined(solved(problem, Preconditioned(), steps)) - joined(start)
            expected, fractions = in_weights(problem, steps)
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
        seen += fractions
    assert any(0 < t < 1 for t in seen)
    assert max(seen) > 1
    assert (min(seen) == 0) == (shift != 0)


def test_a_step_of_exactly_its_length_keeps_its_momentum() -> None:
    """The kinks of hardtanh make all longer steps too long."""
    problem = random_problem(Hardtanh(), 3, rows=12)
    expected, fractions = in_weights(problem, 7)
    assert fractions[4 * 5 : 5 * 5].count(1.0) == 1  # of the five outputs, in the fifth iteration
    found = joined(solved(problem, Preconditioned(), 7)) - joined(problem.start)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


class Coupled(Transfer):
    """The identity, as a function of all outputs together, and without a bound of its slope."""

    name = "coupled"
    elementwise = False

    def f(self, a: Tensor) -> Tensor:
        return a

    def derivative(self, a: Tensor) -> Tensor:
        return torch.eye(a.shape[-1]).to(a).expand(*a.shape, a.shape[-1])

    def integral(self, a: Tensor) -> Tensor:
        return 0.5 * a.square().sum(-1)


def test_a_coupled_transfer_without_a_bound_counts_as_half_as_steep_as_one() -> None:
    """A step of twice Newton's: the secant finds its half, of which 0.95 is taken."""
    problem = random_problem(Coupled(), 0)
    rows = torch.cat([problem.x, torch.ones_like(problem.x[:, :1])], 1)
    newton = torch.linalg.lstsq(rows, -problem.g).solution.mT
    moved = joined(solved(problem, Preconditioned(damping=1e-12), 1)) - joined(problem.start)
    torch.testing.assert_close(moved, 0.95 * newton, rtol=1e-6, atol=1e-8)


def test_a_minimum_that_rounding_cannot_tell_is_not_reached() -> None:
    """X is the identity and all numbers are whole, so the slope at the minimum is zero exactly."""
    gradient = torch.tensor([[3.0, -2.0], [1.0, 4.0]]).double()
    problem = replace(
        random_problem(Linear(), 0),
        x=torch.eye(2).double(),
        start={"weight": torch.zeros(2, 2).double()},
        backprop={"weight": gradient},
        loss=Squared(),
        target=GradientDescent(),
        g=None,
    )
    part = solved(problem, Preconditioned(damping=1e-30), 1)["weight"] / -gradient
    torch.testing.assert_close(part, part[:, :1].expand(2, 2))
    assert (part > 0.9).all()
    assert (part < 1).all()


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e12])
def test_the_size_of_gradients_changes_no_direction(size: float) -> None:
    """A squared loss has no scale, so that the margin for rounding is relative to the slope."""
    given = random_problem(Linear(), 0)
    start = {name: torch.zeros_like(tensor) for name, tensor in given.start.items()}
    problem = replace(given, loss=Squared(), target=GradientDescent(), start=start, g=None)
    scaled = replace(problem, backprop={name: size * g for name, g in problem.backprop.items()})
    for steps in (1, 4):
        one, other = (solved(each, Preconditioned(), steps) for each in (problem, scaled))
        for name in start:
            torch.testing.assert_close(other[name] / size, one[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_gradient_of_zero_moves_nothing(dtype: torch.dtype) -> None:
    """Targets relative to the start are rounded in half precision; that is no residual."""
    whole = random_problem(Tanh(), 0)
    problem = replace(
        whole,
        x=whole.x.to(dtype),
        start={name: t.to(dtype) for name, t in whole.start.items()},
        backprop={name: torch.zeros_like(t, dtype=dtype) for name, t in whole.start.items()},
        g=None,
    )
    for name, tensor in solved(problem, Preconditioned(), 3).items():
        assert torch.equal(tensor, problem.start[name])


@pytest.mark.parametrize("transfer", [Tanh(), Softmax()], ids=repr)
def test_a_bias_alone_moves_to_a_lower_loss(transfer: Transfer) -> None:
    whole = random_problem(transfer, 0)
    problem = replace(
        whole,
        start={"bias": whole.start["bias"]},
        fixed={"weight": whole.start["weight"]},
        backprop={"bias": whole.backprop["bias"]},
    )
    losses = [objective(problem, solved(problem, Preconditioned(), t)).item() for t in (1, 2, 4)]
    assert 0 > losses[0] >= losses[1] >= losses[2]


def test_every_solution_is_a_fixed_sequence_of_work() -> None:
    weight = torch.zeros(3, 4)
    assert Preconditioned().is_fixed_work(0, weight, False)
    assert Preconditioned().is_fixed_work(5, weight, True)


# ---- the check -----------------------------------------------------------------------------------


def test_the_fraction_is_near_the_minimum_and_never_beyond() -> None:
    """Quartics with minima at fractions that differ by orders of magnitude."""
    minima = torch.tensor([1e-4, 0.03, 0.4, 1.0, 1.7, 9.0, 1e6], dtype=torch.float64)

    def slope(t: Tensor) -> tuple[Tensor, Tensor]:
        found = (t - minima) + (t - minima) ** 3 / minima**2
        return found, found.unsqueeze(-2)

    part = descending_fraction(slope, slope(torch.zeros_like(minima)), 3)
    assert (part.t <= minima).all()
    assert (part.t[2:6] > 0.3 * minima[2:6]).all()
    assert 3 < part.t[-1] < 4  # about twice as long with each trial
    torch.testing.assert_close(part.residual.squeeze(-2), slope(part.t)[0])
    more = descending_fraction(slope, slope(torch.zeros_like(minima)), 40)
    torch.testing.assert_close(more.t[1:-1], minima[1:-1], rtol=1e-2, atol=0)

    def tiny(t: Tensor) -> tuple[Tensor, Tensor]:
        return 1e-9 * slope(t)[0], slope(t)[1]

    small = descending_fraction(tiny, tiny(torch.zeros_like(minima)), 3)
    torch.testing.assert_close(small.t, part.t)  # a loss has no unit


def test_a_slope_that_does_not_change_lets_steps_grow_as_far_as_they_may() -> None:
    """To 0.95 more than the last in each of the two trials after the first."""

    def slope(t: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones_like(t), t.unsqueeze(-2)

    part = descending_fraction(slope, slope(torch.zeros(2)), 3)
    torch.testing.assert_close(part.t, torch.full((2,), 1.95**2))


def test_the_secant_leaves_a_twentieth_of_the_way_to_the_minimum_of_a_quadratic() -> None:
    """In every trial after the full step; a step that ends at the minimum is taken."""
    minima = torch.tensor([1.0, 1.2, 1.7]).double()

    def slope(t: Tensor) -> tuple[Tensor, Tensor]:
        return t - minima, t.unsqueeze(-2)

    part = descending_fraction(slope, slope(torch.zeros(3).double()), 3)
    torch.testing.assert_close(part.t, minima - 0.05**2 * (minima - 1))

    def near(t: Tensor) -> tuple[Tensor, Tensor]:
        return t - 0.99, t.unsqueeze(-2)

    # A shorter step than the last is at most nine tenths of what lies between.
    part = descending_fraction(near, near(torch.zeros(1)), 2)
    torch.testing.assert_close(part.t, torch.tensor([0.95 * 0.9]))


def test_a_direction_that_ascends_is_not_taken() -> None:
    def slope(t: Tensor) -> tuple[Tensor, Tensor]:
        return 1 + t, (1 + t).unsqueeze(-2)

    assert descending_fraction(slope, slope(torch.zeros(3)), 3).t.tolist() == [0, 0, 0]


def test_an_inverse_that_cannot_be_factored_is_replaced_by_one_that_bounds_it() -> None:
    indefinite = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    torch.testing.assert_close(regularized_inverse(indefinite, 1e-3), 0.5 * torch.eye(2))
    both = torch.stack([indefinite, torch.zeros(2, 2), 3 * torch.eye(2)])
    found = regularized_inverse(both, 1e-3)
    assert not found[1].any()
    torch.testing.assert_close(found[2], torch.eye(2) / 3.003)
    assert regularized_inverse(torch.full((2, 2), torch.nan), 1e-3).isnan().any()


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)], ids=str)
def test_each_matrix_is_regularized_by_its_own_diagonal(leading: tuple[int, ...]) -> None:
    root = batch(*leading, 4, 4)
    gram = root @ root.mT
    shift = 0.1 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    expected = torch.linalg.inv(gram + shift * torch.eye(4).double())
    torch.testing.assert_close(regularized_inverse(gram, 0.1), expected)


# ---- shapes, layers, processes -------------------------------------------------------------------


@pytest.mark.parametrize("transfer", [Tanh(), Softmax()], ids=repr)
def test_leading_dimensions_are_free_and_may_have_their_own_rates(transfer: Transfer) -> None:
    members = [random_problem(transfer, seed) for seed in range(3)]

    def stacked(name: str) -> dict[str, Tensor]:
        return {k: torch.stack([getattr(m, name)[k] for m in members]) for k in ("weight", "bias")}

    population = replace(
        members[0],
        x=torch.stack([m.x for m in members]),
        start=stacked("start"),
        backprop=stacked("backprop"),
        g=torch.stack([m.g for m in members]),
    )
    rates = [1.0, 0.3, 0.0]
    found = solved(population, Preconditioned(), 3, torch.tensor(rates, dtype=torch.float64))
    for k, member in enumerate(members):
        alone = solved(member, Preconditioned(), 3, rates[k])
        for name in alone:
            torch.testing.assert_close(found[name][k], alone[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_tensors_stay_and_the_loss_of_the_others_falls(frozen: str) -> None:
    whole = random_problem(Tanh(), 0)
    trained = {"weight": "bias", "bias": "weight"}[frozen]
    problem = replace(
        whole,
        start={trained: whole.start[trained]},
        fixed={frozen: whole.start[frozen]},
        backprop={trained: whole.backprop[trained]},
    )
    found = solved(problem, Preconditioned(), 300)
    assert list(found) == [trained]
    assert objective(problem, found) < 0
    last = problem.gradient(found)[trained].norm()
    assert last < 1e-5 * problem.first_gradient[trained].norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_other_precisions_come_to_the_same(dtype: torch.dtype) -> None:
    problem = random_problem(Tanh(), 0)
    rounded = replace(
        problem,
        x=problem.x.to(dtype),
        start={k: t.to(dtype) for k, t in problem.start.items()},
        backprop={k: t.to(dtype) for k, t in problem.backprop.items()},
        g=None,
    )
    found = solved(rounded, Preconditioned(), 3)
    assert all(t.dtype == dtype for t in found.values())
    reached = objective(problem, {k: t.double() for k, t in found.items()})
    tolerance = {torch.float32: 1e-3}.get(dtype, 0.1)
    assert reached.item() == pytest.approx(change(problem, Preconditioned(), 3), rel=tolerance)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_solve_the_problem_of_their_patches(groups: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, padding=1, groups=groups).double()
    kind, images = layer_kind(conv), batch(3, 4, 5, 5) - 0.5
    assert kind is not None
    x = kind.collect([images], [(3, 6, 5, 5)], conv.weight)
    start = {name: kind.matrix(name, p.detach()) for name, p in conv.named_parameters()}
    plain = random_problem(Tanh(), 0)
    g = kind.rows(batch(3, 6, 5, 5, seed=3) - 0.5)
    backprop = kind.linear_map.weight_grad(x, g)
    problem = replace(plain, linear_map=kind.linear_map, x=x, start=start, backprop=backprop, g=g)
    rows = kind.linear_map.inputs(x, True, False)
    dense = replace(problem, linear_map=Dense(), x=rows)
    found, expected = (solved(each, Preconditioned(), 3) for each in (problem, dense))
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-8, atol=1e-9)
    assert objective(problem, found) < 0


class TwoProcesses:
    """Stands for other processes that have the same rows as this one."""

    rows, some_have_gram = 120, False

    def add_up(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            tensor.mul_(2)

    def average(self, mean: Tensor) -> Tensor:
        return mean


@pytest.mark.parametrize("transfer", [Tanh(), Softmax()], ids=repr)
def test_rows_of_other_processes_count(transfer: Transfer) -> None:
    """Two processes with the same rows have the problem of one with every row twice."""
    problem = random_problem(transfer, 0)
    doubled = {k: 2 * t for k, t in problem.backprop.items()}
    whole = replace(
        problem, x=torch.cat([problem.x] * 2), g=torch.cat([problem.g] * 2), backprop=doubled
    )
    shared = replace(problem, backprop=doubled, others=TwoProcesses())
    weighted = replace(
        problem, backprop=doubled, row_weight=torch.full((60, 1), 2.0, dtype=torch.float64)
    )
    expected = solved(whole, Preconditioned(), 3)
    for other in (shared, weighted):
        found = solved(other, Preconditioned(), 3)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-8, atol=1e-9)


# ---- in the optimizer ----------------------------------------------------------------------------


def autoencoder(**settings: object) -> tuple[nn.Module, LocoProp, Tensor]:
    model, x = network("tanh", sizes=(12, 8, 4, 12)), batch(50, 12)
    return model, LocoProp(model, output_transfer="sigmoid", **settings), x


def losses(steps: int, **settings: object) -> list[float]:
    model, opt, x = autoencoder(**settings)
    found = []
    for _ in range(steps):
        loss = cross_entropy(model(x), x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        found.append(loss.item())
    return found


def test_without_other_settings_it_trains() -> None:
    ours = losses(60, variant="locoprop-m", solver="preconditioned")
    assert ours[-1] < ours[0] - 0.8 * (
        ours[0] - min(losses(200, lr=1e-3, momentum=0.9, gamma=10.0))
    )


def test_its_defaults_are_used_where_no_other_value_is_given() -> None:
    names = ("lr", "gamma", "local_steps", "local_reduction")

    def found(**settings: object) -> list[object]:
        return [autoencoder(**settings)[1].param_groups[0][name] for name in names]

    assert found(solver="preconditioned") == [1.0, 0.05, 3, "mean"]
    assert found(solver=Preconditioned(damping=0.1), lr=0.5, local_steps=4) == [
        0.5,
        0.05,
        4,
        "mean",
    ]
    assert found(solver="sgd") == found(preset="paper-m") == [1e-5, 10.0, 10, "sum"]


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "natural-s"])
def test_each_layer_lowers_its_local_loss(variant: str) -> None:
    model, opt, x = autoencoder(variant=variant, solver="preconditioned", diagnose=True)
    for _ in range(5):
        opt.zero_grad()
        cross_entropy(model(x), x).backward()
        opt.step()
        assert all(layer.local_loss < 0 for layer in opt.diagnostics())


def test_it_keeps_no_state() -> None:
    model, opt, x = autoencoder(solver="preconditioned")
    cross_entropy(model(x), x).backward()
    opt.step()
    assert all(not state for state in opt.state_dict()["state"].values())


def test_a_layer_without_rows_moves_by_one_percent_along_its_gradient() -> None:
    """Layer 2 is not called: its weight is used by a function."""
    model, opt, x = autoencoder(solver="preconditioned", lr=0.5)
    hidden = nn.functional.linear(model[:2](x), model[2].weight, model[2].bias)
    cross_entropy(model[3:](hidden), x).backward()
    before, gradients = weights(model), [p.grad.clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="its forward was not called"):
        opt.step()
    after = weights(model)
    for i in (2, 3):
        expected = before[i] - 0.005 * before[i].norm() * gradients[i] / gradients[i].norm()
        torch.testing.assert_close(after[i], expected)
    assert all(not torch.equal(after[i], before[i]) for i in (0, 1, 4, 5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "pocoprop-s"}, "has no closed form"),
        ({"variant": "pocoprop-m"}, "has no closed form"),
        ({"variant": "proxprop"}, "takes no plain gradient steps"),
        ({"every": 2}, "takes no plain gradient steps"),
        ({"regularizer": "l2"}, "without a regularizer"),
        ({"lr": 1.5}, "lr=1.5. Must be <= 1"),
    ],
)
def test_what_it_refuses(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        autoencoder(solver="preconditioned", **settings)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"damping=0"):
        Preconditioned(damping=0.0)
    with pytest.raises(ValueError, match=r"slope='sup'"):
        Preconditioned(slope="sup")
    with pytest.raises(ValueError, match=r"Step\(\)"):
        solved(random_problem(Step(), 0), Preconditioned(slope="bound"), 1)


def test_nothing_is_kept_between_steps() -> None:
    model = network()
    opt = LocoProp(model, solver="preconditioned", output_transfer="sigmoid")
    for seed in range(2):
        cross_entropy(model(batch(7, 6, seed=seed)), batch(7, 3)).backward()
        opt.step()
        opt.zero_grad()
    assert not any(opt.state[p] for p in model.parameters())
    solver = Preconditioned()
    assert solver.stateless
    assert solver.without_rows().stateless
