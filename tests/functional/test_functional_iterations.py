"""Local iterations as functions: by autograd on the objective, by plain loops, and by LocoProp."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functional_cases import (
    assert_equal_weights,
    network,
    random,
    structured,
    train_by_hand,
    train_with,
)
from torch import Tensor

from torch_locoprop.functional import as_matrix, closed_form, from_matrix, locoprop_m, locoprop_s
from torch_locoprop.solvers import Momentum

NUMBERS: dict[str, Any] = {"lr": 0.01, "gamma": 2.0, "local_steps": 4, "momentum": 0.7}
SOLVERS = ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam"]


def rates(local_decay: str) -> list[float]:
    return [0.01 * (max(1 - t / 4, 0.25) if local_decay == "linear" else 1) for t in range(4)]


def rmsprop(gradient: Tensor, state: dict[str, Tensor], lr: float) -> Tensor:
    """Return what RMSProp subtracts, as TensorFlow defines it, with decay 0.9 and ε 1e-5."""
    state["v"] = 0.9 * state.get("v", torch.ones_like(gradient)) + 0.1 * gradient**2
    state["m"] = 0.7 * state.get("m", 0) + lr * gradient / (state["v"] + 1e-5) ** 0.5
    return state["m"]


def sgd(gradient: Tensor, state: dict[str, Tensor], lr: float) -> Tensor:
    return lr * gradient


def minimized(
    objective: Callable[[Tensor], Tensor], start: Tensor, solver: str, local_decay: str, calls: int
) -> list[Tensor]:
    """Return the displacements of several calls from one start, with gradients by autograd."""
    state: dict[str, Tensor] = {}
    found = []
    for _ in range(calls):
        delta = torch.zeros_like(start)
        for lr in rates(local_decay):
            at = delta.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(objective(at), at)
            delta = delta - {"sgd": sgd, "rmsprop": rmsprop}[solver](gradient, state, lr)
        found.append(delta)
    return found


@pytest.mark.parametrize("structure", ["dense", "block", "diagonal"])
@pytest.mark.parametrize("solver", ["sgd", "rmsprop"])
@pytest.mark.parametrize("local_decay", ["linear", "constant"])
def test_locoprop_s_descends_its_objective(structure: str, solver: str, local_decay: str) -> None:
    grad, x = random(2, 4, 6), random(2, 20, 6, seed=1)
    own, full = structured(x.mT @ x, structure)

    def objective(delta: Tensor) -> Tensor:
        return 2.0 * (grad * delta).sum() + (delta @ full * delta).sum() / 2

    expected = minimized(objective, grad, solver, local_decay, calls=2)
    state = None
    for each in expected:
        settings = {**NUMBERS, "solver": solver, "local_decay": local_decay}
        found, state = locoprop_s(grad, own, state, **settings)
        torch.testing.assert_close(found, each, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("trains_bias", [True, False])
@pytest.mark.parametrize("local_reduction", ["sum", "mean"])
def test_locoprop_m_descends_its_objective(trains_bias: bool, local_reduction: str) -> None:
    weight, bias, x = random(2, 4, 3), random(2, 4, seed=1), random(2, 20, 3, seed=2)
    grad = random(2, 4, 4 if trains_bias else 3, seed=3)
    per_row = 1 if local_reduction == "sum" else 1 / 20
    a = x @ weight.mT + bias.unsqueeze(-2)

    def objective(delta: Tensor) -> Tensor:
        moved = a + x @ delta[..., :3].mT
        if trains_bias:
            moved = moved + delta[..., 3].unsqueeze(-2)
        # The Bregman divergence of F = log cosh, the integral of tanh, relative to the start.
        bregman = moved.cosh().log() - a.cosh().log() - a.tanh() * (moved - a)
        return 2.0 * (grad * delta).sum() + per_row * bregman.sum()

    expected = minimized(objective, grad, "rmsprop", "linear", calls=2)
    state = None
    for each in expected:
        settings = {**NUMBERS, "local_reduction": local_reduction}
        found, state = locoprop_m(weight, bias, x, grad, "tanh", state, **settings)
        torch.testing.assert_close(found, each, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
def test_locoprop_s_equals_locoprop(solver: str) -> None:
    states: dict[str, Any] = {}
    settings = {**NUMBERS, "solver": solver}

    def step(name: str, grad: Tensor, gram: Tensor) -> Tensor:
        moved, states[name] = locoprop_s(grad, gram, states.get(name), **settings)
        return moved

    assert_equal_weights(train_by_hand(step), train_with(variant="locoprop-s", **settings))


@pytest.mark.parametrize("solver", SOLVERS)
def test_locoprop_m_equals_locoprop(solver: str) -> None:
    settings = {**NUMBERS, "solver": solver}
    model = network()
    states: dict[Any, Any] = {}
    for seed in range(4):
        x, y = random(9, 5, seed=seed), random(9, 3, seed=seed + 10)
        hidden = torch.tanh(model[0](x)).detach()
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        for layer, rows, transfer in ((model[0], x, "tanh"), (model[2], hidden, "linear")):
            bias = None if layer.bias is None else layer.bias.grad
            grad = as_matrix(layer, layer.weight.grad, bias)
            moved, states[layer] = locoprop_m(
                layer.weight, layer.bias, rows, grad, transfer, states.get(layer), **settings
            )
            weight, moved_bias = from_matrix(layer, moved)
            layer.weight.data += weight
            if moved_bias is not None:
                layer.bias.data += moved_bias
    theirs = train_with(variant="locoprop-m", output_transfer="linear", **settings)
    assert_equal_weights(model, theirs)


def test_one_iteration_is_backprop() -> None:
    grad, gram = random(4, 6), torch.eye(6, dtype=torch.float64)
    found, state = locoprop_s(grad, gram, None, lr=0.1, gamma=3.0, local_steps=1, solver="sgd")
    torch.testing.assert_close(found, -0.1 * 3.0 * grad)
    assert state == {}


def test_iterations_with_the_proximal_term_reach_the_closed_form() -> None:
    grad, x = random(4, 6), random(20, 6, seed=1)
    found, _ = locoprop_s(
        grad, x.T @ x, None, lr=0.02, gamma=2.0, local_steps=2000, solver="sgd",
        local_decay="constant", regularizer="l2",
    )  # fmt: skip
    expected = closed_form(grad, x.T @ x, damping=None, lr=0.02, gamma=2.0)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def calls(weight: Tensor, x: Tensor, grad: Tensor, lr: Any) -> list[Callable[..., Any]]:
    settings = {**NUMBERS, "lr": lr}
    return [
        lambda w, r, g: locoprop_s(g, r.mT @ r, None, **settings),
        lambda w, r, g: locoprop_m(w, None, r, g, "sigmoid", None, **settings),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_stacked_matrices_and_vmap_equal_a_loop(which: int) -> None:
    weight, x, grad = random(3, 4, 5), random(3, 9, 5, seed=1), random(3, 4, 5, seed=2)
    lr = torch.tensor([0.01, 0.02, 0.03], dtype=torch.float64)
    given = weight, x, grad
    before = [tensor.clone() for tensor in given]
    found, state = calls(*given, lr)[which](*given)
    by_vmap, _ = torch.func.vmap(calls(*given, 0.02)[which])(*given)
    for i in range(3):
        own = [tensor[i] for tensor in given]
        expected, expected_state = calls(*own, float(lr[i]))[which](*own)
        torch.testing.assert_close(found[i], expected, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(state["momentum"][i], expected_state["momentum"])
        if i == 1:
            torch.testing.assert_close(by_vmap[i], expected, rtol=1e-11, atol=1e-13)
    for tensor, old in zip(given, before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("which", [0, 1])
def test_half_precision_is_computed_in_float32(which: int) -> None:
    given = [t.bfloat16() for t in (random(4, 5), random(9, 5, seed=1), random(4, 5, seed=2))]
    if which == 0:  # the product in the test's own function is half precision otherwise
        given[1] = given[1].float()
    found, state = calls(*given, 0.01)[which](*given)
    expected, _ = calls(*given, 0.01)[which](*[tensor.float() for tensor in given])
    assert found.dtype == torch.bfloat16
    assert {entry.dtype for entry in state.values()} == {torch.float32}
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("which", [0, 1])
def test_compiles_without_graph_breaks(which: int) -> None:
    given = random(4, 5), random(9, 5, seed=1), random(4, 5, seed=2)
    function = calls(*given, 0.01)[which]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), function(*given))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_with_a_state_and_a_rate_on_the_device() -> None:
    grad, gram = random(4, 6), torch.eye(6, dtype=torch.float64)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(grad: Tensor, gram: Tensor, state: dict[str, Tensor], lr: Tensor) -> Any:
        return locoprop_s(grad, gram, state, **{**NUMBERS, "solver": "adam", "lr": lr})

    settings = {**NUMBERS, "solver": "adam"}
    _, state = locoprop_s(grad, gram, None, **settings)
    for lr in (0.01, 0.5):
        found = step(grad, gram, state, torch.tensor(lr, dtype=torch.float64))
        torch.testing.assert_close(found, locoprop_s(grad, gram, state, **{**settings, "lr": lr}))


def test_some_rows_of_the_weights_have_those_rows_of_the_solution() -> None:
    weight, x, grad = random(6, 5), random(9, 5, seed=1), random(6, 5, seed=2)
    gram, rows = x.T @ x, slice(2, 5)
    whole, _ = locoprop_s(grad, gram, None, **NUMBERS)
    torch.testing.assert_close(locoprop_s(grad[rows], gram, None, **NUMBERS)[0], whole[rows])
    whole, _ = locoprop_m(weight, None, x, grad, "tanh", None, **NUMBERS)
    found, _ = locoprop_m(weight[rows], None, x, grad[rows], "tanh", None, **NUMBERS)
    torch.testing.assert_close(found, whole[rows])
    whole = closed_form(grad, gram, damping=0.1)
    torch.testing.assert_close(closed_form(grad[rows], gram, damping=0.1), whole[rows])


def test_an_instance_of_a_solver() -> None:
    grad, gram = random(4, 6), torch.eye(6, dtype=torch.float64)
    one = locoprop_s(grad, gram, None, **NUMBERS, solver=Momentum())
    other = locoprop_s(grad, gram, None, **NUMBERS, solver="momentum")
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lr": math.nan}, r"Invalid lr=nan. Must be finite and >= 0"),
        ({"gamma": 0.0}, r"Invalid gamma=0.0. Must be finite and > 0"),
        ({"local_steps": 0}, r"Invalid local_steps=0. Must be an integer >= 1"),
        ({"momentum": 1.0}, r"Invalid momentum=1.0. Must be finite and >= 0 and < 1"),
        ({"local_decay": "cosine"}, r"Unknown local_decay 'cosine'"),
        ({"solver": "rmspop"}, r"Unknown solver 'rmspop'. Did you mean 'rmsprop'"),
        ({"solver": "exact"}, r"Unknown solver 'exact'"),
        ({"solver": 3}, r"Invalid solver=3. Must be a first-order solver"),
        ({"solver": "adagrad", "eps": 0.0}, r"Invalid eps=0.0. Must be > 0 with solver='adagrad'"),
        ({"regularizer": "fisher"}, r"Invalid regularizer='fisher'"),
        ({"regularizer": "l3"}, r"Unknown regularizer 'l3'"),
    ],
)
def test_bad_settings(changed: dict[str, Any], message: str) -> None:
    settings = {**NUMBERS, **changed}
    weight, x, grad = random(4, 5), random(9, 5, seed=1), random(4, 5, seed=2)
    with pytest.raises(ValueError, match=message):
        locoprop_s(grad, x.T @ x, None, **settings)
    with pytest.raises(ValueError, match=message):
        locoprop_m(weight, None, x, grad, "tanh", None, **settings)


def test_a_state_that_does_not_fit_is_refused() -> None:
    grad, gram = random(4, 5), torch.eye(5, dtype=torch.float64)
    _, state = locoprop_s(grad, gram, None, **NUMBERS, solver="adam")
    with pytest.raises(ValueError, match=r"solver='rmsprop' keeps \['momentum', 'square'\]"):
        locoprop_s(grad, gram, state, **NUMBERS)
    with pytest.raises(ValueError, match=r"has shape \[4, 5\], the gradient \[3, 5\]"):
        locoprop_s(grad[:3], gram, state, **NUMBERS, solver="adam")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("inputs", (9, 4)),
        ("inputs", (2, 9, 5)),
        ("grad", (9, 4)),
        ("grad", (4, 7)),
        ("bias", (5,)),
        ("weight", (4,)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...]) -> None:
    given = {
        "weight": random(4, 5),
        "bias": random(4),
        "inputs": random(9, 5),
        "grad": random(4, 6),
    }
    given[name] = random(*shape)
    with pytest.raises(ValueError, match="Shapes do not fit a weight of shape") as error:
        locoprop_m(**given, transfer="tanh", state=None, **NUMBERS)
    assert str(list(shape)) in str(error.value)
