"""Closed form, spectral step and polar factor: by Kronecker products, by autograd, and by LocoProp."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functional_cases import (
    assert_equal_weights,
    eye,
    given,
    random,
    structured,
    train_by_hand,
    train_with,
)
from torch import Tensor

from torch_locoprop.functional import closed_form, polar, spectral
from torch_locoprop.solvers import Exact, Spectral

SHAPES = [(4, 3), (3, 6), (1, 6), (2, 4, 3), (2, 3, 2, 6)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("structure", ["dense", "block", "diagonal"])
def test_closed_form_is_the_dense_kronecker_solve(shape: tuple[int, ...], structure: str) -> None:
    grad, gram = given(*shape)
    own, full = structured(gram, structure)
    d, n = shape[-2:]
    found = closed_form(grad, own, damping=0.1, lr=0.5, gamma=2.0).reshape(-1, d, n)
    for delta, g, c in zip(found, grad.reshape(-1, d, n), full.reshape(-1, n, n), strict=True):
        system = c + 0.1 * c.trace() / n * eye(n)
        by_columns = torch.linalg.solve(torch.kron(system, eye(d)), g.T.flatten())
        expected = -0.5 * 2.0 * by_columns.reshape(n, d).T
        torch.testing.assert_close(delta, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("structure", ["dense", "block", "diagonal"])
def test_without_damping_the_objective_of_equation_3_is_minimal(
    shape: tuple[int, ...], structure: str
) -> None:
    grad, gram = given(*shape)
    own, full = structured(gram, structure)
    delta = closed_form(grad, own, damping=None, lr=0.3, gamma=2.0).requires_grad_()
    squared = (delta @ full * delta).sum() / 2  # ‖X Δᵀ‖²/2
    objective = squared + 2.0 * (grad * delta).sum() + delta.square().sum() / (2 * 0.3)
    (slope,) = torch.autograd.grad(objective, delta)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-10)


def test_the_inverse_that_the_docstring_keeps_for_several_steps() -> None:
    grad, gram = given(4, 3)
    inverse = -closed_form(eye(3), gram, damping=0.1)
    torch.testing.assert_close(-0.5 * grad @ inverse, closed_form(grad, gram, damping=0.1, lr=0.5))


def test_a_gram_that_is_not_positive_definite_gives_nan() -> None:
    grad, gram = given(4, 3)
    assert closed_form(grad, -gram, damping=0.1).isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_polar_by_singular_values(shape: tuple[int, ...]) -> None:
    matrix = random(*shape)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(polar(matrix), u @ (s.unsqueeze(-1) * v), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("structure", ["dense", "block", "diagonal"])
def test_spectral_step_by_its_formula(structure: str) -> None:
    grads, grams = [random(4, 6, seed=s) for s in (3, 4)], [given(4, 6)[1], 3 * given(4, 6)[1]]
    grams[1] = grams[1] + 7 * eye(6)
    state: dict[str, Tensor] | None = None
    average, rows, c = torch.zeros(4, 6).double(), torch.zeros(4, 1).double(), torch.zeros(6, 6)
    common = square = torch.zeros(())
    growth, moved = torch.ones(()), torch.zeros(4, 6).double()
    for t in range(3):
        own, full = structured(grams[min(t, 1)], structure)
        gram = own if t < 2 else None  # the third step keeps C
        grad = grads[t % 2]
        found, state = spectral(grad, gram, state, lr=0.1, fall=5.0, averaging=0.6, agreement=0.5)
        if t < 2:
            unit = full * 6 / full.trace()
            c = unit if t == 0 else 0.6 * c + 0.4 * unit
            inverse = torch.linalg.inv(c + 1 / (1 + t / 5) * eye(6))
        before = grad if t == 0 else average / (1 - 0.9**t)
        average = 0.9 * average + 0.1 * grad
        direction = polar((0.9 * average + 0.1 * grad) @ inverse)
        rows = 0.95 * rows + 0.05 * direction.square().mean(1, keepdim=True)
        equal = direction / rows.sqrt()
        equal = equal * direction.norm() / equal.norm()
        common = 0.97 * common + (grad * before).sum()
        square = 0.97 * square + grad.square().sum()
        start = 0.97 ** (t + 1)
        agreed = (start + (1 - start) * common / square).clamp(0.15**2, 1) ** 0.5
        if t > 0:
            left = -(grad * moved).sum() / (before * moved).sum().abs()
            rise = left.clamp(-1, 1) - 0.2
            growth = (growth * (0.1 * rise * (1 - start if rise > 0 else 1)).exp()).clamp(1, 16)
        expected = -0.1 * 0.2 * 6**0.5 * (agreed * growth) ** 0.5 * equal
        moved = expected
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


# ---- equal to LocoProp ---------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [None, 0.1])
def test_closed_form_equals_locoprop(damping: float | None) -> None:
    numbers: dict[str, Any] = {"lr": 0.1, "gamma": 2.0}
    by_hand = train_by_hand(
        lambda _, grad, gram: closed_form(grad, gram, damping=damping, **numbers)
    )
    solver = Exact(damping=damping)
    assert_equal_weights(by_hand, train_with(variant="locoprop-s", solver=solver, **numbers))


@pytest.mark.parametrize("rate", [0.0, 0.7])
@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_spectral_step_equals_locoprop(agreement: float, rate: float) -> None:
    states: dict[str, Any] = {}
    calls: dict[str, int] = {}

    def step(name: str, grad: Tensor, gram: Tensor) -> Tensor:
        calls[name] = calls.get(name, 0) + 1
        bias_rate = 0.0 if "bias=False" in name else rate
        moved, states[name] = spectral(
            grad, gram, states.get(name), lr=0.02, agreement=agreement, bias_rate=bias_rate
        )
        return moved

    solver = Spectral(agreement=agreement, bias_rate=rate)
    assert_equal_weights(train_by_hand(step), train_with(solver=solver, lr=0.02))


# ---- stacks, dtypes, compilation -----------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "closed_form": lambda grad, gram: closed_form(grad, gram, damping=0.1, lr=0.3),
    "proximal": lambda grad, gram: closed_form(grad, gram, damping=None, lr=0.3),
    "spectral": lambda grad, gram: spectral(grad, gram, None, lr=0.3)[0],
    "polar": lambda grad, _: polar(grad),
}


@pytest.mark.parametrize("structure", ["dense", "block", "diagonal"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_stacked_matrices_and_vmap_equal_a_loop(name: str, structure: str) -> None:
    function = FUNCTIONS[name]
    grad, gram = given(3, 4, 6)
    gram, _ = structured(gram, structure)
    before = grad.clone(), gram.clone()
    by_loop = torch.stack([function(g, c) for g, c in zip(grad, gram, strict=True)])
    torch.testing.assert_close(function(grad, gram), by_loop, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(
        torch.func.vmap(function)(grad, gram), by_loop, rtol=1e-11, atol=1e-13
    )
    one = function(grad, gram[:1])  # one C for all
    torch.testing.assert_close(one[2], function(grad[2], gram[0]), rtol=1e-11, atol=1e-13)
    assert torch.equal(grad, before[0])
    assert torch.equal(gram, before[1])


def test_each_matrix_may_have_numbers_of_its_own() -> None:
    grad, gram = given(2, 4, 6)
    lr, gamma = random(2).abs(), random(2, seed=1).abs()
    for damping in (None, 0.1):
        found = closed_form(grad, gram, damping=damping, lr=lr, gamma=gamma)
        for i in range(2):
            numbers = {"lr": float(lr[i]), "gamma": float(gamma[i])}
            expected = closed_form(grad[i], gram[i], damping=damping, **numbers)
            torch.testing.assert_close(found[i], expected)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    grad, gram = given(4, 6)
    grad, gram = grad.to(dtype), gram.to(dtype)
    found = FUNCTIONS[name](grad, gram)
    assert found.dtype == dtype
    expected = FUNCTIONS[name](grad.float(), gram.float()).to(dtype)
    assert torch.equal(found, expected)


def test_states_of_half_precision_are_float32() -> None:
    grad, gram = given(4, 6)
    _, state = spectral(grad.bfloat16(), gram.float(), None, lr=0.1)
    assert {entry.dtype for entry in state.values()} == {torch.float32}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiles_without_graph_breaks(name: str) -> None:
    grad, gram = given(2, 4, 6)
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(grad, gram), FUNCTIONS[name](grad, gram))


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(4,), (5, 5), (2, 2, 2), (3, 4, 4), (1, 2, 3, 3), (), (6, 5), (4, 1, 1)]
)
def test_a_gram_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"does not fit a gradient of shape \[4, 6\]"):
        closed_form(random(4, 6), torch.ones(shape).double(), damping=0.1)


def test_other_bad_arguments() -> None:
    grad, gram = given(4, 6)
    with pytest.raises(ValueError, match=r"Invalid damping=0\. Must be > 0, or None"):
        closed_form(grad, gram, damping=0)
    with pytest.raises(ValueError, match=r"Invalid lr=-1\. Must be finite and >= 0"):
        closed_form(grad, gram, damping=0.1, lr=-1)
    with pytest.raises(ValueError, match=r"Invalid gradient of shape \[6\]"):
        closed_form(grad[0], gram, damping=0.1)
    with pytest.raises(ValueError, match=r"dtype torch.int64. Must be floating point"):
        closed_form(grad.long(), gram, damping=0.1)
    with pytest.raises(ValueError, match=r"Invalid matrix of shape \[6\]"):
        polar(grad[0])
    with pytest.raises(ValueError, match=r"Invalid averaging=1.5"):
        spectral(grad, gram, None, lr=0.1, averaging=1.5)
    _, state = spectral(grad, gram, None, lr=0.1)
    with pytest.raises(ValueError, match=r"a gradient of shape \[4, 6\], not \[5, 6\]"):
        spectral(random(5, 6), gram, state, lr=0.1)
    with pytest.raises(ValueError, match=r"a Gram matrix of shape \[6, 6\], not \[6\]"):
        spectral(grad, gram.diagonal(), state, lr=0.1)
    with pytest.raises(
        ValueError, match=r"the entries \['square'\], which are not those of the spec"
    ):
        spectral(grad, gram, {"square": grad}, lr=0.1)
