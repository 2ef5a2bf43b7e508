"""What backward passes record. Whole training loops are in tests/promises/loops."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.paper.targets import Target
from torch_locoprop.paper.variants import VARIANTS, Variant

X, Y = batch(8, 6), batch(8, 3, seed=2)


def plain(model: nn.Module, opt: LocoProp) -> None:
    cross_entropy(model(X), Y).backward()


def test_an_optimizer_that_never_steps_does_not_collect_rows() -> None:
    model = network()
    idle = LocoProp(model, output_transfer="sigmoid")
    opt = LocoProp(model, output_transfer="sigmoid")
    for _ in range(3):
        plain(model, opt)
        opt.step()
        opt.zero_grad()
    assert all(len(layer.calls) == 1 for layer in idle._layers)


def for_inputs(loss: Tensor, x: Tensor) -> None:
    torch.autograd.grad(loss, x)


def into_inputs(loss: Tensor, x: Tensor) -> None:
    loss.backward(inputs=[x])


@pytest.mark.parametrize("ask", [for_inputs, into_inputs])
def test_passes_that_only_ask_for_other_gradients_leave_nothing(
    ask: Callable[[Tensor, Tensor], None],
) -> None:
    """Saliency maps or attacks may run for a whole epoch without a step: nothing accumulates."""
    model, hidden = network(), []
    opt = LocoProp(model, output_transfer="sigmoid")
    model[1].register_forward_hook(lambda module, args, out: hidden.append(weakref.ref(out)))
    for _ in range(3):
        x = X.clone().requires_grad_()
        ask(cross_entropy(model(x), Y), x)
    assert all(ref() is None for ref in hidden)
    assert not any(layer.calls or layer._pending for layer in opt._layers)


@pytest.mark.parametrize("variant", [*VARIANTS, "own"])
def test_maximize_is_the_negated_loss(variant: str) -> None:
    class Own(Target):
        def __call__(self, a, transfer, g, v, gamma):  # type: ignore[no-untyped-def]
            return transfer.f(a) - gamma * g

    results = []
    for sign in (1, -1):
        model = network()
        opt = LocoProp(
            model,
            lr=1e-3,
            gamma=2.0,
            variant=Variant("own", Own(), VARIANTS["locoprop-m"].loss)
            if variant == "own"
            else variant,
            maximize=sign == 1,
            output_transfer="sigmoid",
        )
        for _ in range(3):
            (sign * cross_entropy(model(X), Y)).backward()
            opt.step()
            opt.zero_grad()
        results.append(weights(model))
    assert_close(*results)


def test_a_layer_whose_gradient_is_none() -> None:
    """A function that returns no gradient for its input stops the pass without an error."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            return None

    model = network()
    opt = LocoProp(model, lr=1e-2, output_transfer="sigmoid")
    before = weights(model)
    hidden = Stop.apply(model[:2](X))
    cross_entropy(model[2:](hidden), Y).backward()
    opt.step()
    assert_close(weights(model)[:2], before[:2], 0.0)
    assert not torch.equal(weights(model)[2], before[2])


@pytest.mark.parametrize("retain", [False, True])
def test_inputs_are_freed_with_the_step_even_while_the_loss_is_kept(retain: bool) -> None:
    model = network()
    opt = LocoProp(model, variant="locoprop-m", lr=1e-2, output_transfer="sigmoid")
    hidden: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda module, args, out: hidden.append(weakref.ref(out)))
    loss = cross_entropy(model(X), Y)
    loss.backward(retain_graph=retain)
    storage = opt._layers[1].calls[0].x.untyped_storage()
    pending = list(opt._hooks._pending_calls)
    assert all((each.call is not None) == retain for each in pending)
    opt.step()
    assert all(each.call is None for each in pending)
    assert storage.nbytes() == 8 * 5 * 8
    if not retain:
        assert hidden[0]() is None  # autograd has freed it, and no other object holds it
    assert loss.grad_fn is not None
