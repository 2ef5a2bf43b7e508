"""Parts of a local problem that several processes or a GPU need, on one process and by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from torch_locoprop.paper.gram import Gram
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import Before, LocalProblem
from torch_locoprop.paper.losses import Matching, Squared
from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.targets import GradientDescent
from torch_locoprop.paper.transfers import Tanh

D, N = 5, 7


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def problem(rows: int = 40, **changes: Any) -> LocalProblem:
    tensors = {"weight": draw(D, N, seed=1), "bias": draw(D, seed=2)}
    own = LocalProblem(
        linear_map=Dense(),
        x=draw(rows, N),
        start=tensors,
        fixed={},
        backprop={name: draw(*t.shape, seed=3) for name, t in tensors.items()},
        target=GradientDescent(),
        loss=Squared(),
        transfer=Tanh(),
        gamma=3.0,
        eta=0.1,
        regularizer=REGULARIZERS["none"],
        row_weight=0.25,
    )
    return replace(own, **changes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("members", [0, 3])
def test_pre_activations_after_weight_decay(members: int, bias: bool) -> None:
    """The weight shrinks by ``1 − lr · weight_decay``, and the bias does not."""
    leading = (members,) if members else ()
    x, weight = draw(*leading, 6, N), draw(*leading, D, N, seed=1)
    b = draw(*leading, D, seed=2) if bias else None
    lr: Any = torch.linspace(0.1, 0.3, members).double() if members else 0.2
    decay: Any = torch.linspace(0.5, 2.0, members).double() if members else 0.4
    shift: Any = 0 if b is None else b.unsqueeze(-2)
    shrunk = (1 - lr * decay)[:, None, None] * weight if members else (1 - 0.08) * weight
    found = Before(x @ weight.mT + shift, lr, decay).at_start(b)
    torch.testing.assert_close(found, x @ shrunk.mT + shift)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_problem_starts_from_the_outputs_of_the_forward_pass(frozen: bool) -> None:
    own = problem()
    tensors = own.start
    shrunk = {"weight": (1 - 0.08) * tensors["weight"], "bias": tensors["bias"]}
    a = own.x @ tensors["weight"].mT + tensors["bias"]
    start = {"weight": shrunk["weight"]} if frozen else shrunk
    own = replace(
        own,
        before=Before(a, 0.2, 0.4),
        start=start,
        fixed={"bias": tensors["bias"]} if frozen else {},
    )
    torch.testing.assert_close(own.a0, own.x @ shrunk["weight"].mT + tensors["bias"])


def test_iterates_relative_to_a_base() -> None:
    plain = problem()
    base = {name: draw(*t.shape, seed=5) for name, t in plain.start.items()}
    relative = {name: t - base[name] for name, t in plain.start.items()}
    own = replace(plain, base=base, start=relative)
    torch.testing.assert_close(own.a0, plain.a0)
    at = {name: draw(*t.shape, seed=6) for name, t in plain.start.items()}
    found = own.gradient({name: t - base[name] for name, t in at.items()})
    for name, expected in plain.gradient(at).items():
        torch.testing.assert_close(found[name], expected)


def saves(rows: int, gradients: int, d: int = D) -> bool:
    """Count multiplications: XᵀX and a product with it for each gradient, or two products by rows."""
    return rows * N * N + gradients * d * N * N < gradients * 2 * rows * d * N


@pytest.mark.parametrize("trained", [("weight", "bias"), ("weight",), ("bias",)])
def test_from_which_number_of_iterations_products_are_used(trained: tuple[str, ...]) -> None:
    """An iteration after the first costs a gradient; with the bias alone, d is its length."""
    tensors = problem().start
    for rows in range(1, 30):
        own = problem(rows, start={name: tensors[name] for name in trained})
        for steps in range(1, 6):
            expected = saves(rows, steps - 1)
            assert (own.through_gram(steps) is not None) == expected, (rows, steps)


def test_losses_that_are_not_quadratic_use_the_rows() -> None:
    assert problem(loss=Matching()).through_gram(10) is None
    assert problem(x=Gram.of(draw(40, N)), loss=Matching()).through_gram(10) is None


def test_products_are_not_used_for_a_single_iteration() -> None:
    own = problem(x=Gram.of(draw(40, N)))
    assert own.through_gram(1) is None
    assert own.through_gram(2) is own.x


class Twice:
    """Another process with the same rows as this one."""

    def __init__(self, rows: int, some_have_gram: bool = False) -> None:
        self.rows, self.some_have_gram = 2 * rows, some_have_gram

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.mul_(2)


def expected_gram(x: Tensor, weights: Tensor) -> Gram:
    weighted = weights * x
    return Gram(2 * weighted.mT @ x, 2 * weighted.sum(-2), 2 * weights.expand(len(x), 1).sum())


@pytest.mark.parametrize(("condensed", "of_rows"), [(False, False), (False, True), (True, False)])
def test_products_of_the_rows_of_all_processes(condensed: bool, of_rows: bool) -> None:
    """Squares, sums and the number of rows have the weights of the rows."""
    weights = draw(40, 1, seed=4).abs() if of_rows else torch.full((40, 1), 0.25).double()
    x = draw(40, N)
    own = problem(row_weight=weights if of_rows else 0.25, others=cast(Any, Twice(40)))
    own = replace(own, x=Gram.of(x)) if condensed else own
    found, expected = own.through_gram(10), expected_gram(x, weights)
    assert found is not None
    torch.testing.assert_close(found.square, expected.square)
    torch.testing.assert_close(found.total, expected.total)
    torch.testing.assert_close(found.rows, expected.rows)
    # The weights are in the products, and are not multiplied again.
    at = {name: t + 1 for name, t in own.start.items()}
    moved = {name: torch.ones_like(t) for name, t in own.start.items()}
    change = expected.gradient(moved)
    for name, gradient in own.gradient(at, found).items():
        torch.testing.assert_close(gradient, 3.0 * own.backprop[name] + change[name])


def test_the_rows_of_all_processes_decide_for_each_population() -> None:
    """The rows are the last dimension but one, whatever stands before them."""
    stacked = {name: t.expand(3, *t.shape) for name, t in problem().start.items()}
    for rows in range(1, 20):
        for processes in (1, 2):
            own = problem(rows, start=stacked)
            own = replace(own, x=own.x.expand(3, rows, N))
            if processes == 2:
                own = replace(own, others=cast(Any, Twice(rows)))
            bias = replace(own, start={"bias": stacked["bias"]})
            for steps in (2, 5):
                expected = saves(processes * rows, steps - 1)
                assert (own.through_gram(steps) is not None) == expected
                assert (bias.through_gram(steps) is not None) == expected


@pytest.mark.parametrize("weight", [0.25, 1.0, 2.0])
def test_rows_count_as_often_as_their_weight(weight: float) -> None:
    """``γ G + w (X ΔWᵀ + Δb)ᵀ [X 1]``, through the rows and through their products."""
    own = problem(row_weight=weight)
    moved = {name: draw(*t.shape, seed=6) for name, t in own.start.items()}
    at = {name: t + moved[name] for name, t in own.start.items()}
    change = weight * (own.x @ moved["weight"].mT + moved["bias"])
    for gram in (None, Gram.of(own.x)):
        found = own.gradient(at, gram)
        torch.testing.assert_close(found["weight"], 3 * own.backprop["weight"] + change.mT @ own.x)
        torch.testing.assert_close(found["bias"], 3 * own.backprop["bias"] + change.sum(0))


def test_the_rows_of_all_processes_decide_whether_products_are_used() -> None:
    for rows in range(1, 20):
        for steps in range(2, 6):
            own = problem(rows, others=cast(Any, Twice(rows)))
            assert (own.through_gram(steps) is not None) == saves(2 * rows, steps - 1)


def test_products_are_made_where_another_process_has_nothing_else() -> None:
    own = problem(1, others=cast(Any, Twice(1, some_have_gram=True)))
    assert not saves(2, 1)
    assert own.through_gram(2) is not None
    alone = replace(own, others=cast(Any, Twice(1)))
    assert alone.through_gram(2) is None


def test_the_first_problem_has_number_zero() -> None:
    assert problem().number == 0


class Halves:
    """Another process with as many outputs, of the same norm."""

    d = 2 * D

    def add_up(self, of_rows: Tensor) -> Tensor:
        return 2 * of_rows


def test_norms_over_the_outputs_of_all_processes() -> None:
    matrix = draw(D, N)
    root = matrix.square().sum().sqrt()
    torch.testing.assert_close(problem().norm([matrix]), root)
    torch.testing.assert_close(problem(outputs=cast(Any, Halves())).norm([matrix]), 2**0.5 * root)
