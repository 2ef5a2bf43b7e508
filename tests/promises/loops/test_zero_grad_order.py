"""``zero_grad`` of the model or the optimizer, to None or zero, may be called anywhere in the loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import assert_close, cross_entropy, weights
from promises.loops.plain import STEPS, data, each_model, each_variant, loco, make, plain, train
from torch import Tensor, nn

from torch_locoprop import LocoProp

Zero = Callable[[nn.Module, LocoProp], object]

ZERO: dict[str, Zero] = {
    "optimizer": lambda model, opt: opt.zero_grad(),
    "optimizer, to zero": lambda model, opt: opt.zero_grad(set_to_none=False),
    "model": lambda model, opt: model.zero_grad(),
    "model, to zero": lambda model, opt: model.zero_grad(set_to_none=False),
    "by hand": lambda model, opt: [setattr(p, "grad", None) for p in model.parameters()],
    "by hand, to zero": lambda model, opt: [
        p.grad.zero_() for p in model.parameters() if p.grad is not None
    ],
    "by hand, other zeros": lambda model, opt: [
        setattr(p, "grad", torch.zeros_like(p)) for p in model.parameters() if p.grad is not None
    ],
}
ORDER = ("before forward", "before backward", "after step", "everywhere")


@each_variant
@each_model
@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("order", ORDER)
def test_any_order(variant: str, kind: str, zero: str, order: str) -> None:
    model = make(kind)
    opt = loco(model, variant)

    def maybe(place: str) -> None:
        if order in (place, "everywhere"):
            ZERO[zero](model, opt)

    for seed in range(STEPS):
        x, y = data(kind, seed)
        maybe("before forward")
        loss = cross_entropy(model(x), y)
        maybe("before backward")
        loss.backward()
        opt.step()
        maybe("after step")
    assert_close(weights(model), train(variant, kind), 0.0)


@each_variant
@pytest.mark.parametrize("zero", ZERO)
def test_a_batch_that_was_dropped(variant: str, zero: str) -> None:
    """Its rows are dropped with its gradients."""
    model = make()
    opt = loco(model, variant)
    for seed in range(STEPS):
        x, y = data(seed=99, rows=5)
        plain(model, x, y)
        ZERO[zero](model, opt)
        plain(model, *data(seed=seed))
        opt.step()
        ZERO[zero](model, opt)
    assert_close(weights(model), train(variant), 0.0)


@each_variant
@each_model
@pytest.mark.parametrize("zero", ZERO)
def test_between_two_passes_through_a_graph(variant: str, kind: str, zero: str) -> None:
    """The second pass counts, the first does not."""
    model = make(kind)
    opt = loco(model, variant)
    for seed in range(STEPS):
        x, y = data(kind, seed)
        opt.zero_grad()
        out = model(x)
        out.square().sum().backward(retain_graph=True)
        ZERO[zero](model, opt)
        cross_entropy(out, y).backward()
        opt.step()
    assert_close(weights(model), train(variant, kind), 1e-12)


@each_variant
@pytest.mark.parametrize("calls", [1, 3])
def test_a_closure_that_clears(variant: str, calls: int) -> None:
    model = make()
    opt = loco(model, variant)
    for seed in range(STEPS):

        def closure(seed: int = seed) -> Tensor:
            for _ in range(calls):
                opt.zero_grad()
                x, y = data(seed=seed)
                loss = cross_entropy(model(x), y)
                loss.backward()
            return loss

        opt.step(closure)
    assert_close(weights(model), train(variant), 0.0)


def test_without_zero_grad_gradients_add_up_and_the_next_step_says_no_more_than_they_do() -> None:
    """As with any optimizer. The rows are those of the passes since the last step."""
    model = make()
    opt = loco(model, "locoprop-s", solver="sgd", local_steps=1)
    for seed in range(STEPS):
        before = weights(model)
        plain(model, *data(seed=seed))
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        opt.step()
        expected = [w - 1e-2 * 2.0 * g for w, g in zip(before, gradients, strict=True)]
        assert_close(weights(model), expected)
