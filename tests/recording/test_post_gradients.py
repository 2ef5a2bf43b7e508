"""∂L/∂y of layers for which some calls, or some backward passes, show no transfer.

There ∂L/∂y is computed from ∂L/∂a. The transfer tanh is strictly increasing, so the numbers are the
same, and a run in which the transfer is sometimes hidden equals a run in which it never is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_close, cross_entropy
from promises.loops.plain import data, distance, loco, train
from torch import Tensor, nn

Function = Callable[[Tensor], Tensor]

each_variant = pytest.mark.parametrize("variant", ["pocoprop-s", "pocoprop-m"])
each_kind = pytest.mark.parametrize("kind", ["linear", "conv"])
each_setting = pytest.mark.parametrize("options", [{}, {"max_rows": 3}], ids=["all", "some"])


class _Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):  # type: ignore[no-untyped-def]
        y = torch.tanh(a)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, v):  # type: ignore[no-untyped-def]
        (y,) = ctx.saved_tensors
        return v * (1 - y.square())


def hidden(a: Tensor) -> Tensor:
    """Return tanh by an operation that the search does not know."""
    return _Tanh.apply(a)  # type: ignore[no-untyped-call]


class Twice(nn.Module):
    """Calls one layer on each part of the rows, with another function after each call."""

    def __init__(self, kind: str, first: Function = torch.tanh, second: Function = torch.tanh):
        super().__init__()
        torch.manual_seed(0)
        grouped = nn.Conv2d(2, 4, 3, groups=2)
        self.one = nn.Linear(6, 4) if kind == "linear" else grouped
        self.two = nn.Linear(4 if kind == "linear" else 36, 3)
        self.functions = (first, second)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.functions, x.split([5, 3]), strict=True)
        return self.two(torch.cat([f(self.one(part)) for f, part in parts]).flatten(1))  # type: ignore[no-any-return]


FIRST, SECOND, BOTH = (hidden, torch.tanh), (torch.tanh, hidden), (hidden, hidden)


def clipped(model: nn.Module) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm > 0.06


@each_variant
@each_kind
@each_setting
@pytest.mark.parametrize("functions", [FIRST, SECOND, BOTH], ids=["first", "second", "both"])
@pytest.mark.parametrize("before_step", [None, clipped])
def test_calls_that_hide_the_transfer(
    variant: str,
    kind: str,
    options: dict[str, Any],
    functions: tuple[Function, Function],
    before_step: Callable[[nn.Module], None] | None,
) -> None:
    own = {"before_step": before_step, "transfers": {"one": "tanh"}, **options}
    found = train(variant, kind, model=Twice(kind, *functions), **own)
    expected = train(variant, kind, model=Twice(kind), **own)
    assert_close(found, expected, 1e-10)
    assert distance(expected, train("locoprop-m", kind, model=Twice(kind), **own)) > 1e-6


@each_variant
def test_a_call_that_hides_it_once_it_is_known(variant: str) -> None:
    """A transfer that was found is used for later calls too."""
    results = []
    for later in (hidden, torch.tanh):
        model = Twice("linear")
        opt = loco(model, variant)
        for seed in range(3):
            x, y = data(seed=seed)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            model.functions = (torch.tanh, later)
        results.append([p.detach() for p in model.parameters()])
    assert_close(*results, 1e-10)


def test_only_one_of_both_gradients_is_kept_of_a_call() -> None:
    model = Twice("linear", *SECOND)
    opt = loco(model, "pocoprop-s", transfers={"one": "tanh"})
    x, y = data()
    cross_entropy(model(x), y).backward()
    kept = {
        layer.name: {(call.g is not None, call.v is not None) for call in layer.calls}
        for layer in opt._layers
    }
    assert kept == {"one": {(False, True), (True, False)}, "two": {(True, False)}}


@each_variant
@each_setting
@pytest.mark.parametrize("visible_first", [True, False])
def test_one_of_two_passes_through_a_call_misses_the_transfer(
    variant: str, options: dict[str, Any], visible_first: bool
) -> None:
    def passes(aside: Function) -> Callable[[Twice, Tensor, Tensor], None]:
        def backward(model: Twice, x: Tensor, y: Tensor) -> None:
            a = model.one(x)
            h = torch.tanh(a)
            beside = h if aside is torch.tanh else aside(a)
            losses = [cross_entropy(model.two(h), y), 0.5 * beside.square().sum()]
            one, other = losses if visible_first else losses[::-1]
            one.backward(retain_graph=True)
            other.backward()

        return backward

    own = {"transfers": {"one": "tanh"}, **options}
    found, expected = (
        train(variant, backward=passes(aside), model=Twice("linear"), **own)  # type: ignore[arg-type]
        for aside in (hidden, torch.tanh)
    )
    assert_close(found, expected, 1e-10)
