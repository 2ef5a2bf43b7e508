"""The library equals `reference.py`: the same weights after two hundred steps in float64.

First the reference is compared with results it was not written from (finite differences, plain SGD,
scipy's minimiser), then every variant and solver of the library with the reference. Options and other
networks are compared over fewer steps, with smaller tolerances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
import reference
import torch
from numpy.testing import assert_allclose
from reference import Reference
from scipy.optimize import minimize
from torch import nn
from torch.nn import functional

from torch_locoprop import LocoProp
from torch_locoprop.paper.regularizers import L1

STEPS, TOLERANCE = 200, 1e-10
FEW_STEPS, TIGHT_TOLERANCE = 60, 1e-12
BATCH = 16
BATCHES = 4

VARIANTS = ["locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m", "proxprop"]
EXACT_VARIANTS = ["locoprop-s", "locoprop-m", "proxprop"]

# Rates at which the loss falls, and a perturbation of the first weights grows less than a few
# thousandfold in 200 steps: rounding stays far below the tolerance, a wrong formula far above it.
SOLVERS = {
    "sgd": {"lr": 4e-3},
    "momentum": {"lr": 5e-4},
    "nesterov": {"lr": 5e-4},
    "adagrad": {"lr": 1e-2, "eps": 0.1},
    "rmsprop": {"lr": 2e-4},
    "adam": {"lr": 1e-3},
}
EXACT = {"lr": 1e-2}


def settings(solver: str, **changes) -> dict:
    """Return the keyword arguments that `LocoProp` and `Reference` share."""
    common = {"gamma": 10.0, "local_steps": 5, "momentum": 0.9, "decay": 0.99, "eps": 1e-5}
    rates = EXACT if solver == "exact" else SOLVERS[solver]
    return {**common, "solver": solver, **rates, **changes}


# Problems


@dataclass(frozen=True)
class Problem:
    """A network and its data; the last transfer is inside the loss."""

    sizes: tuple[int, ...] = (12, 9, 5, 3, 5, 9, 12)
    transfers: tuple[str, ...] = ("tanh", "tanh", "linear", "tanh", "tanh", "sigmoid")
    bias: bool = True
    positions: int = 1  # > 1: three-dimensional inputs [batch / positions, positions, features]

    def weights(self) -> list[np.ndarray]:
        """Return Glorot-uniform weights, a random bias as the last column."""
        rng = np.random.default_rng(0)
        result = []
        for n, d in zip(self.sizes[:-1], self.sizes[1:], strict=True):
            W = rng.uniform(-1.0, 1.0, (d, n)) * np.sqrt(6.0 / (n + d))
            b = rng.uniform(-0.3, 0.3, (d, 1))
            result.append(np.hstack([W, b]) if self.bias else W)
        return result

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return random inputs in [0, 1] that depend on two latent numbers, and their targets."""
        rng = np.random.default_rng(1)
        latent = rng.normal(size=(BATCHES, BATCH, 2))
        inputs = reference.sigmoid(2.0 * latent @ rng.normal(size=(2, self.sizes[0])))
        if self.transfers[-1] == "softmax":
            labels = (latent @ rng.normal(size=(2, self.sizes[-1]))).argmax(axis=-1)
            return list(zip(inputs, np.eye(self.sizes[-1])[labels], strict=True))
        return list(zip(inputs, inputs, strict=True))

    @property
    def gamma(self) -> float:
        return 20.0 if self.positions == 1 else 2.5

    @property
    def divisor(self) -> int:
        """The number of samples, by which the loss is divided."""
        return BATCH // self.positions


def shallow(transfer: str, positions: int = 1) -> Problem:
    names = (transfer, "linear", transfer, "sigmoid")
    return Problem((12, 9, 3, 9, 12), names, positions=positions)


AUTOENCODER = Problem()
SMALL = shallow("tanh")


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "leaky_relu": lambda: nn.LeakyReLU(reference.LEAKY_SLOPE),
    "softplus": nn.Softplus,
}


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def torch_model(problem: Problem) -> nn.Sequential:
    modules: list[nn.Module] = []
    names = [*problem.transfers[:-1], "inside the loss"]
    for n, d, name in zip(problem.sizes[:-1], problem.sizes[1:], names, strict=True):
        modules.append(nn.Linear(n, d, bias=problem.bias, dtype=torch.float64))
        if name in MODULES:
            modules.append(MODULES[name]())
    model = nn.Sequential(*modules)
    with torch.no_grad():
        for layer, W in zip(linear_layers(model), problem.weights(), strict=True):
            inputs = layer.in_features
            layer.weight.copy_(torch.from_numpy(W[:, :inputs]))
            if layer.bias is not None:
                layer.bias.copy_(torch.from_numpy(W[:, inputs]))
    return model


def torch_weights(model: nn.Module) -> list[np.ndarray]:
    """Return weights and biases in the reference's layout."""
    return [
        np.column_stack([p.detach().numpy() for p in layer.parameters()])
        for layer in linear_layers(model)
    ]


def torch_loss(problem: Problem, a: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    match problem.transfers[-1]:
        case "sigmoid":
            total = functional.binary_cross_entropy_with_logits(a, target, reduction="sum")
        case "softmax":
            total = functional.cross_entropy(a, target.argmax(dim=-1), reduction="sum")
        case "linear":
            total = 0.5 * (a - target).square().sum()
    return total / problem.divisor


# Training


def train_reference(problem: Problem, steps: int = STEPS, **options) -> tuple[Reference, list]:
    """Return the trained reference and its losses."""
    model = Reference(problem.weights(), list(problem.transfers), problem.bias, **options)
    batches = problem.batches()
    return model, [
        model.step(*batches[step % BATCHES], batch=problem.divisor) for step in range(steps)
    ]


def assert_loss_falls(losses: list[float]) -> None:
    """Check that the loss decreases: equal weights mean little if they hardly move."""
    assert np.mean(losses[-BATCHES:]) < 0.95 * np.mean(losses[:BATCHES])


def assert_library_equals_reference(
    problem: Problem,
    steps: int = FEW_STEPS,
    tolerance: float = TIGHT_TOLERANCE,
    rate: Callable[[int], float] = lambda step: 1.0,
    **options,
) -> None:
    """Train both side by side, with learning rate times ``rate(step)``, and compare all steps."""
    ours = Reference(problem.weights(), list(problem.transfers), problem.bias, **options)
    model = torch_model(problem)
    if isinstance(strength := options.get("regularizer"), float):
        options = {**options, "regularizer": L1(strength=strength)}
    optimizer = LocoProp(model, output_transfer=problem.transfers[-1], **options)
    batches, lr, losses = problem.batches(), options["lr"], []
    for step in range(steps):
        x, target = batches[step % BATCHES]
        ours.lr = lr * rate(step)
        losses.append(ours.step(x, target, batch=problem.divisor))

        optimizer.param_groups[0]["lr"] = lr * rate(step)
        shape = (-1, problem.positions) if problem.positions > 1 else (-1,)
        x, target = (torch.from_numpy(v).reshape(*shape, v.shape[-1]) for v in (x, target))
        loss = torch_loss(problem, model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        assert loss.item() == pytest.approx(losses[-1], rel=tolerance), f"loss of step {step}"
        for m, (theirs, W) in enumerate(zip(torch_weights(model), ours.weights, strict=True)):
            error = np.abs(theirs - W) / np.maximum(1.0, np.abs(W))
            assert error.max() < tolerance, f"layer {m} is {error.max():.1e} off in step {step}"
    assert_loss_falls(losses)


# The reference by itself


def numerical_gradient(function: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    """Return central differences of a scalar function."""
    gradient, h = np.empty_like(at), 1e-6
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += h
        down[index] -= h
        gradient[index] = (function(up) - function(down)) / (2.0 * h)
    return gradient


GRADIENT_CASES = [
    Problem((4, 3, 5, 3), ("tanh", "linear", "sigmoid")),
    Problem((4, 3, 5, 3), ("relu", "sigmoid", "softmax")),
    Problem((4, 3, 5, 3), ("leaky_relu", "softplus", "linear"), bias=False),
]


@pytest.mark.parametrize("problem", GRADIENT_CASES, ids=lambda p: "-".join(p.transfers))
def test_reference_backward_is_the_derivative_of_its_forward(problem):
    rng = np.random.default_rng(2)
    weights, names, bias = problem.weights(), list(problem.transfers), problem.bias
    x, target = rng.normal(size=(6, 4)), rng.uniform(size=(6, 3))
    target /= target.sum(axis=1, keepdims=True)
    passed = reference.forward_backward(weights, names, bias, x, target, batch=6)

    def loss_above(m: int, y: np.ndarray) -> float:
        for W, name in zip(weights[m + 1 :], names[m + 1 :], strict=True):
            y = reference.transfer(name, reference.with_ones(y, bias) @ W.T)
        return reference.loss_value(names[-1], y, target, batch=6)

    for m, (W, name) in enumerate(zip(weights, names, strict=True)):
        X = passed.X[m]
        by_y = numerical_gradient(lambda y, m=m: loss_above(m, y), passed.y[m])
        by_a = numerical_gradient(
            lambda a, m=m, name=name: loss_above(m, reference.transfer(name, a)), passed.a[m]
        )
        by_W = numerical_gradient(
            lambda W, m=m, name=name, X=X: loss_above(m, reference.transfer(name, X @ W.T)), W
        )
        assert_allclose(passed.dy[m], by_y, atol=1e-8)
        assert_allclose(passed.g[m], by_a, atol=1e-8)
        assert_allclose(passed.weight_gradient(m), by_W, atol=1e-8)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("problem", [AUTOENCODER, *GRADIENT_CASES[1:]], ids=["ae", "cls", "reg"])
def test_reference_with_one_iteration_is_plain_sgd(problem, variant, reduction):
    weights, names = problem.weights(), list(problem.transfers)
    options = {"lr": 0.03, "gamma": 7.0, "local_steps": 1, "local_reduction": reduction}
    model = Reference(weights, names, problem.bias, variant=variant, **options)
    for x, _ in problem.batches():
        target = np.eye(problem.sizes[-1])[np.arange(BATCH) % problem.sizes[-1]]
        passed = reference.forward_backward(weights, names, problem.bias, x, target, BATCH)
        weights = [W - 0.03 * 7.0 * passed.weight_gradient(m) for m, W in enumerate(weights)]
        model.step(x, target)
    for ours, plain in zip(model.weights, weights, strict=True):
        assert_allclose(ours, plain, rtol=1e-11, atol=1e-13)


def test_reference_residuals_are_the_derivatives_of_the_papers_objectives():
    """The objectives of the four variants for tanh, with F = Σ log cosh and F* its dual."""
    rng = np.random.default_rng(3)
    a0, a, g, dy = (0.3 * rng.normal(size=(4, 3)) for _ in range(4))
    gamma = 0.5

    def F(a):
        return np.log(np.cosh(a)).sum()

    def F_dual(y):
        return (y * np.arctanh(y) + 0.5 * np.log1p(-(y**2))).sum()

    def bregman(function, slope, p, q):
        return function(p) - function(q) - (slope(q) * (p - q)).sum()

    y0, a_dual = np.tanh(a0), a0 - gamma * dy
    a_md = np.arctanh(y0 - gamma * g)
    D = np.diag([1.0, 2.0, 4.0]) + 0.5
    natural = a0 - gamma * np.linalg.solve(D, g.T).T
    objectives = {
        "locoprop-s": lambda a: 0.5 * ((a - a0 + gamma * g) ** 2).sum(),
        "locoprop-m": lambda a: bregman(F, np.tanh, a, a_md),
        "pocoprop-s": lambda a: 0.5 * ((np.tanh(a) - y0 + gamma * dy) ** 2).sum(),
        "pocoprop-m": lambda a: bregman(F_dual, np.arctanh, np.tanh(a), np.tanh(a_dual)),
        "natural-s": lambda a: 0.5 * ((a - natural) ** 2).sum(),
    }
    for variant, objective in objectives.items():
        residual = reference.residual_at_target(variant, "tanh", a0, g, dy, gamma, D)
        assert_allclose(residual(a), numerical_gradient(objective, a), atol=1e-8, err_msg=variant)


def one_layer():
    """Return the arrays of a random local problem with four inputs and three neurons."""
    rng = np.random.default_rng(4)
    X = reference.with_ones(rng.normal(size=(7, 4)), bias=True)
    W, g = rng.normal(size=(3, 5)), rng.normal(size=(7, 3))
    return X, W, g, X @ W.T


def assert_minimises(W_new: np.ndarray, objective, gradient) -> None:
    found = minimize(
        lambda w: objective(w.reshape(W_new.shape)),
        np.zeros(W_new.size),
        jac=lambda w: gradient(w.reshape(W_new.shape)).ravel(),
        method="BFGS",
        options={"gtol": 1e-9},
    )
    assert_allclose(W_new, found.x.reshape(W_new.shape), atol=1e-7)


@pytest.mark.parametrize("variant", ["locoprop-s", "natural-s"])
def test_reference_exact_minimises_the_squared_objective(variant):
    eta, gamma = 0.2, 3.0
    X, W, g, a0 = one_layer()
    D = np.diag([1.0, 2.0, 4.0]) + 0.5
    step = g if variant == "locoprop-s" else np.linalg.solve(D, g.T).T
    target = a0 - gamma * step
    W_new = W + reference.exact_displacement(variant, "tanh", a0, g.T @ X, X.T @ X, gamma, eta, D)
    assert_minimises(
        W_new,
        lambda V: 0.5 * ((X @ V.T - target) ** 2).sum() + ((V - W) ** 2).sum() / (2 * eta),
        lambda V: (X @ V.T - target).T @ X + (V - W) / eta,
    )


@pytest.mark.parametrize("transfer", ["tanh", "relu", "sigmoid", "softmax"])
def test_reference_exact_minimises_the_quadratic_model_of_the_matching_objective(transfer):
    eta, gamma = 0.2, 3.0
    X, W, g, a0 = one_layer()
    H = reference.jacobians(transfer, a0).mean(axis=0)
    arguments = ("locoprop-m", transfer, a0, g.T @ X, X.T @ X, gamma, eta, None)

    def objective(V):
        change = X @ (V - W).T
        quadratic = 0.5 * np.einsum("ri,ij,rj", change, H, change)
        return quadratic + gamma * (g * change).sum() + ((V - W) ** 2).sum() / (2 * eta)

    assert_minimises(
        W + reference.exact_displacement(*arguments),
        objective,
        lambda V: (X @ (V - W).T @ H + gamma * g).T @ X + (V - W) / eta,
    )


def test_reference_iterations_reach_the_exact_solution():
    """With the L2 regularizer, many iterations of gradient descent reach the solution of ``exact``."""
    fishers = [np.eye(d) + 0.1 for d in AUTOENCODER.sizes[1:]]
    for variant in ("locoprop-s", "natural-s"):
        common = {"variant": variant, "fishers": fishers, "lr": 2e-2, "gamma": 3.0}
        for reduction in ("sum", "mean"):
            exact = {"solver": "exact", "local_reduction": reduction}
            iterated = {
                "regularizer": "l2",
                "local_steps": 2000,
                "local_decay": "constant",
                "local_reduction": reduction,
            }
            jumped, _ = train_reference(AUTOENCODER, steps=1, **common, **exact)
            # The rate inside an iteration is lr, too; momentum 0 and λmax(XᵀX) + 1/lr ask for
            # less, which Adagrad's accumulator provides.
            walked, _ = train_reference(
                AUTOENCODER, steps=1, **common, **iterated, solver="adagrad", eps=25.0
            )
            for a, b in zip(jumped.weights, walked.weights, strict=True):
                assert_allclose(a, b, atol=1e-9)


# Sensitivity: what is compared below to 1e-10 or closer differs by far more


def distance(one: Reference, other: Reference) -> float:
    return max(np.abs(a - b).max() for a, b in zip(one.weights, other.weights, strict=True))


@pytest.mark.parametrize("solver", [*SOLVERS, "exact"])
def test_variants_differ(solver):
    variants = EXACT_VARIANTS if solver == "exact" else VARIANTS
    changes = settings(solver)
    trained = [train_reference(SMALL, FEW_STEPS, variant=v, **changes)[0] for v in variants]
    assert min(distance(a, b) for a, b in combinations(trained, 2)) > 1e-5


def test_solvers_differ():
    same = {"lr": 2e-4, "eps": 1e-2}
    trained = [train_reference(SMALL, FEW_STEPS, **settings(s, **same))[0] for s in SOLVERS]
    assert min(distance(a, b) for a, b in combinations(trained, 2)) > 1e-5


OPTIONS = {
    "constant": {"local_decay": "constant"},
    "weight decay": {"weight_decay": 1e-1},
    "l2": {"regularizer": "l2"},
    "l1": {"regularizer": 0.05},
    "mean": {"local_reduction": "mean"},
    "eight steps": {"local_steps": 8},
}


def settings_with(option: str, solver: str, **changes) -> dict:
    # The pull back to W₀ shortens the steps, most with the adaptive solvers' large 1/η.
    gamma = {"gamma": 40.0 if solver == "sgd" else 100.0} if option == "l2" else {}
    return settings(solver, **OPTIONS[option], **gamma, **changes)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("solver", ["sgd", "rmsprop", "adam"])
def test_options_differ(option, solver):
    plain, _ = train_reference(
        SMALL, FEW_STEPS, **settings(solver, gamma=settings_with(option, solver)["gamma"])
    )
    changed, _ = train_reference(SMALL, FEW_STEPS, **settings_with(option, solver))
    assert distance(plain, changed) > 1e-5


# The library


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_autoencoder(variant, solver):
    assert_library_equals_reference(
        AUTOENCODER, STEPS, TOLERANCE, variant=variant, **settings(solver, local_steps=3)
    )


@pytest.mark.parametrize("variant", EXACT_VARIANTS)
def test_autoencoder_exact(variant):
    assert_library_equals_reference(
        AUTOENCODER, STEPS, TOLERANCE, variant=variant, **settings("exact")
    )


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_options(variant, option):
    changed = settings_with(option, "rmsprop")
    assert_library_equals_reference(SMALL, variant=variant, **changed)


@pytest.mark.parametrize("solver", ["sgd", "adam"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_with_other_solvers(solver, option):
    changed = settings_with(option, solver)
    assert_library_equals_reference(SMALL, variant="locoprop-m", **changed)


@pytest.mark.parametrize("option", ["weight decay", "mean"])
@pytest.mark.parametrize("variant", EXACT_VARIANTS)
def test_exact_options(variant, option):
    changed = settings_with(option, "exact")
    assert_library_equals_reference(SMALL, variant=variant, **changed)


PROBLEMS = {
    "relu": shallow("relu"),
    "leaky_relu": shallow("leaky_relu"),
    "sigmoid": Problem((12, 9, 12), ("sigmoid", "sigmoid")),
    "softplus": shallow("softplus"),
    "no bias": Problem(SMALL.sizes, SMALL.transfers, bias=False),
    "regression": Problem((12, 9, 12), ("tanh", "linear")),
    "classifier": Problem((12, 9, 7, 4), ("tanh", "relu", "softmax")),
    "three-dimensional": shallow("tanh", positions=4),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_problems(variant, problem):
    changed = settings("rmsprop", lr=5e-4, gamma=PROBLEMS[problem].gamma)
    assert_library_equals_reference(PROBLEMS[problem], variant=variant, **changed)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("variant", EXACT_VARIANTS)
def test_exact_problems(variant, problem):
    changed = settings("exact", lr=2e-2, gamma=PROBLEMS[problem].gamma)
    assert_library_equals_reference(PROBLEMS[problem], variant=variant, **changed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_mean_over_samples_and_positions(variant):
    """``local_reduction="mean"`` divides by all rows; the loss is divided by the samples."""
    changed = settings("rmsprop", lr=3e-4, gamma=2.5, local_reduction="mean")
    assert_library_equals_reference(shallow("tanh", positions=4), variant=variant, **changed)


@pytest.mark.parametrize("solver", ["rmsprop", "exact"])
@pytest.mark.parametrize("variant", EXACT_VARIANTS)
def test_learning_rate_schedule(variant, solver):
    """Warm-up, then decay: L2's 1/η, weight decay and momentum use the present learning rate."""
    if solver == "exact":
        options = settings("exact", weight_decay=1e-2)
    else:
        options = settings_with("l2", solver, lr=5e-4, weight_decay=1e-2)
    assert_library_equals_reference(
        SMALL, rate=lambda s: min((s + 1) / 10, 1.5 - s / FEW_STEPS), variant=variant, **options
    )


NATURAL_GAMMA = {
    "sgd": 0.2,
    "momentum": 0.2,
    "nesterov": 0.2,
    "adagrad": 0.2,
    "rmsprop": 1.0,
    "adam": 1.0,
    "exact": 0.2,
}


@pytest.mark.parametrize("solver", NATURAL_GAMMA)
def test_natural_targets_over_200_steps(solver: str) -> None:
    """The Fisher matrices are sampled by the library; everything computed from them is compared."""
    # D⁻¹ is large where the sampled gradients are small: γ makes up for it
    options = settings(solver, variant="natural-s", gamma=NATURAL_GAMMA[solver], local_steps=3)
    ours = Reference(AUTOENCODER.weights(), list(AUTOENCODER.transfers), True, **options)
    model = torch_model(AUTOENCODER)
    optimizer = LocoProp(model, output_transfer="sigmoid", **options)
    batches, losses = AUTOENCODER.batches(), []
    for step in range(STEPS):
        x, target = batches[step % BATCHES]
        loss = torch_loss(AUTOENCODER, model(torch.from_numpy(x)), torch.from_numpy(target))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fishers = [optimizer.state[p.weight]["fisher"].numpy() for p in linear_layers(model)]
        ours.fishers = [D + 1e-2 * D.diagonal().mean() * np.eye(len(D)) for D in fishers]
        losses.append(ours.step(x, target, batch=AUTOENCODER.divisor))
        for m, (theirs, W) in enumerate(zip(torch_weights(model), ours.weights, strict=True)):
            error = np.abs(theirs - W) / np.maximum(1.0, np.abs(W))
            assert error.max() < TOLERANCE, f"layer {m} is {error.max():.1e} off in step {step}"
    assert_loss_falls(losses)
