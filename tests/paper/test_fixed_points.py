"""The objectives and fixed points of the four variants, as printed, at the solution of the solver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import ACTIVATIONS, batch
from torch import Tensor
from torch.autograd import grad
from torch.autograd.functional import jacobian

from torch_locoprop.paper import transfers
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.regularizers import L2
from torch_locoprop.paper.variants import VARIANTS
from torch_locoprop.solvers import SOLVERS, Numbers

ETA, GAMMA = 0.3, 0.4
each_transfer = pytest.mark.parametrize("name", ["tanh", "sigmoid", "softmax"])


def weight_of(problem: LocalProblem) -> Tensor:
    """Return the weight after enough plain iterations to converge."""
    numbers = {"weight": Numbers(ETA)}
    found, _ = SOLVERS["sgd"].solve(problem, {"weight": {}}, numbers, 400, "constant")
    return found["weight"]


def rows_of(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return X ``[5, 4]``, W ``[3, 4]``, and ∂L/∂a and ∂L/∂y ``[5, 3]`` of one loss."""
    x, w = batch(5, 4) - 0.5, batch(3, 4, seed=2) - 0.5
    a = (x @ w.mT).requires_grad_()
    y = ACTIVATIONS[name](a)
    v = batch(5, 3, seed=3) - 0.5
    (g,) = grad((y * v).sum(), a)
    return x, w, g, v


def problem_of(variant: str, name: str) -> LocalProblem:
    x, w, g, v = rows_of(name)
    return LocalProblem(
        linear_map=Dense(),
        x=x,
        start={"weight": w},
        fixed={},
        backprop={"weight": g.mT @ x},
        target=VARIANTS[variant].target,
        loss=VARIANTS[variant].loss,
        transfer=transfers.get(name),
        gamma=GAMMA,
        eta=ETA,
        regularizer=L2(),
        g=g,
        v=v,
    )


def dual_divergence(name: str, p: Tensor, q: Tensor) -> Tensor:
    """Return ``D_F*(p, q)`` written out: relative entropies, with (1 ± y)/2 as the two for tanh."""
    if name == "tanh":
        return dual_divergence("sigmoid", (1 + p) / 2, (1 + q) / 2)
    if name == "sigmoid":
        return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum()
    return (p * (p / q).log() - p + q).sum()


def objective_of(variant: str, name: str) -> Callable[[Tensor], Tensor]:
    """Return the objective of Eqs. 3, 7, 16 and 18 as printed."""
    f = ACTIVATIONS[name]
    x, w, g, v = rows_of(name)
    a0 = x @ w.mT
    distance: dict[str, Callable[[Tensor], Tensor]] = {
        "locoprop-s": lambda a: 0.5 * (a - (a0 - GAMMA * g)).square().sum(),
        "locoprop-m": lambda a: dual_divergence(name, f(a0) - GAMMA * g, f(a)),
        "pocoprop-s": lambda a: 0.5 * (f(a) - (f(a0) - GAMMA * v)).square().sum(),
        "pocoprop-m": lambda a: dual_divergence(name, f(a), f(a0 - GAMMA * v)),
    }
    return lambda new: distance[variant](x @ new.mT) + (new - w).square().sum() / (2 * ETA)


def assert_minimized(variant: str, name: str) -> None:
    objective = objective_of(variant, name)
    found = weight_of(problem_of(variant, name)).requires_grad_()
    value = objective(found)
    (slope,) = grad(value, found)
    assert slope.abs().max() < 1e-12
    for seed in range(5):
        other = found + 0.2 * (batch(3, 4, seed=30 + seed) - 0.5)
        assert objective(other) > value + 1e-5
    assert objective(rows_of(name)[1]) > value + 1e-5  # the weights before the step


@each_transfer
def test_iterations_minimize_equation_3(name: str) -> None:
    assert_minimized("locoprop-s", name)


@each_transfer
def test_iterations_minimize_equation_7(name: str) -> None:
    assert_minimized("locoprop-m", name)


@each_transfer
def test_iterations_minimize_equation_16(name: str) -> None:
    assert_minimized("pocoprop-s", name)


@each_transfer
def test_iterations_minimize_equation_18(name: str) -> None:
    assert_minimized("pocoprop-m", name)


def assert_fixed_point(new: Tensor, residuals: Tensor, name: str) -> None:
    """``W_new = W − η δᵀX`` with the printed residuals δ."""
    x, w, _, _ = rows_of(name)
    torch.testing.assert_close(new, w - ETA * residuals.mT @ x, rtol=1e-12, atol=1e-13)
    assert (new - w).abs().max() > 1e-3


def through_jacobian(name: str, a: Tensor, v: Tensor) -> Tensor:
    """Return ``J_f(a)ᵀ v`` for each row, with autograd's Jacobian of torch's own f."""
    jacobians = [jacobian(ACTIVATIONS[name], row) for row in a]
    return torch.stack([j.mT @ row for j, row in zip(jacobians, v, strict=True)])


@each_transfer
def test_iterations_reach_the_fixed_point_of_equation_4(name: str) -> None:
    x, w, g, _ = rows_of(name)
    new = weight_of(problem_of("locoprop-s", name))
    assert_fixed_point(new, x @ new.mT - (x @ w.mT - GAMMA * g), name)


@each_transfer
def test_iterations_reach_the_fixed_point_of_equation_8(name: str) -> None:
    f = ACTIVATIONS[name]
    x, w, g, _ = rows_of(name)
    new = weight_of(problem_of("locoprop-m", name))
    assert_fixed_point(new, f(x @ new.mT) - (f(x @ w.mT) - GAMMA * g), name)


@each_transfer
def test_the_displacement_satisfies_equation_9(name: str) -> None:
    f = ACTIVATIONS[name]
    x, w, g, _ = rows_of(name)
    problem = problem_of("locoprop-m", name)
    delta = problem.displacement({"weight": weight_of(problem)})["weight"]
    residuals = f(x @ (w + delta).mT) - (f(x @ w.mT) - GAMMA * g)
    torch.testing.assert_close(delta, -ETA * residuals.mT @ x, rtol=1e-11, atol=1e-13)
    assert delta.abs().max() > 1e-3


@each_transfer
def test_iterations_reach_the_fixed_point_of_equation_17(name: str) -> None:
    f = ACTIVATIONS[name]
    x, w, _, v = rows_of(name)
    new = weight_of(problem_of("pocoprop-s", name))
    a = x @ new.mT
    residuals = through_jacobian(name, a, f(a) - (f(x @ w.mT) - GAMMA * v))
    assert_fixed_point(new, residuals, name)


@each_transfer
def test_iterations_reach_the_fixed_point_of_equation_19(name: str) -> None:
    x, w, _, v = rows_of(name)
    new = weight_of(problem_of("pocoprop-m", name))
    a = x @ new.mT
    assert_fixed_point(new, through_jacobian(name, a, a - (x @ w.mT - GAMMA * v)), name)
