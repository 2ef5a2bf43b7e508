"""The rows of a local problem are those whose gradients are in ``p.grad``, whatever the loop does."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.targets import Target
from torch_locoprop.variants import VARIANTS, Variant

X, Y = batch(8, 6), batch(8, 3, seed=2)
OTHER = batch(5, 6, seed=3), batch(5, 3, seed=4)


def run(
    backward: Callable[[nn.Module, LocoProp], None], variant: str = "locoprop-m"
) -> list[Tensor]:
    """Two steps, each after the given way of computing gradients."""
    model = network()
    opt = LocoProp(
        model, lr=1e-2, gamma=2.0, variant=variant, momentum=0.9, output_transfer="sigmoid"
    )
    for _ in range(2):
        backward(model, opt)
        opt.step()
        opt.zero_grad()
    return weights(model)


def plain(model: nn.Module, opt: LocoProp) -> None:
    cross_entropy(model(X), Y).backward()


def after_asking_for_another_gradient(model: nn.Module, opt: LocoProp) -> None:
    x = X.clone().requires_grad_()
    torch.autograd.grad(cross_entropy(model(x), Y), x)
    plain(model, opt)


def before_asking_for_another_gradient(model: nn.Module, opt: LocoProp) -> None:
    plain(model, opt)
    x = X.clone().requires_grad_()
    torch.autograd.grad(cross_entropy(model(x), Y), x)


def asking_in_the_same_graph(model: nn.Module, opt: LocoProp) -> None:
    x = X.clone().requires_grad_()
    loss = cross_entropy(model(x), Y)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def after_a_batch_that_was_dropped(model: nn.Module, opt: LocoProp) -> None:
    cross_entropy(model(OTHER[0]), OTHER[1]).backward()
    model.zero_grad()
    plain(model, opt)


def after_a_batch_whose_gradients_were_zeroed(model: nn.Module, opt: LocoProp) -> None:
    cross_entropy(model(OTHER[0]), OTHER[1]).backward()
    model.zero_grad(set_to_none=False)
    plain(model, opt)


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m"])
@pytest.mark.parametrize(
    "backward",
    [
        after_asking_for_another_gradient,
        before_asking_for_another_gradient,
        asking_in_the_same_graph,
        after_a_batch_that_was_dropped,
        after_a_batch_whose_gradients_were_zeroed,
    ],
)
def test_rows_that_are_not_in_the_gradient_do_not_count(
    backward: Callable[[nn.Module, LocoProp], None], variant: str
) -> None:
    assert_close(run(backward, variant), run(plain, variant))


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m"])
def test_two_losses_on_one_graph(variant: str) -> None:
    """Backward twice through one forward pass is backward through the sum."""

    def twice(model: nn.Module, opt: LocoProp) -> None:
        out = model(X)
        cross_entropy(out, Y).backward(retain_graph=True)
        (0.5 * out.square().sum()).backward()

    def once(model: nn.Module, opt: LocoProp) -> None:
        out = model(X)
        (cross_entropy(out, Y) + 0.5 * out.square().sum()).backward()

    assert_close(run(twice, variant), run(once, variant), 1e-11)


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m"])
def test_two_batches_before_a_step(variant: str) -> None:
    """Their gradients add up in ``p.grad``, and their rows stand one below the other."""

    def separate(model: nn.Module, opt: LocoProp) -> None:
        (cross_entropy(model(X), Y) * 8 / 13).backward()
        (cross_entropy(model(OTHER[0]), OTHER[1]) * 5 / 13).backward()

    def together(model: nn.Module, opt: LocoProp) -> None:
        cross_entropy(model(torch.cat([X, OTHER[0]])), torch.cat([Y, OTHER[1]])).backward()

    assert_close(run(separate, variant), run(together, variant), 1e-11)


def test_an_optimizer_that_never_steps_does_not_collect_rows() -> None:
    model = network()
    idle = LocoProp(model, output_transfer="sigmoid")
    opt = LocoProp(model, output_transfer="sigmoid")
    for _ in range(3):
        plain(model, opt)
        opt.step()
        opt.zero_grad()
    assert all(len(layer.calls) == 1 for layer in idle._layers)


def test_a_closure_that_is_called_several_times() -> None:
    def closure_twice(model: nn.Module, opt: LocoProp) -> None:
        for _ in range(2):
            opt.zero_grad()
            plain(model, opt)

    assert_close(run(closure_twice), run(plain))


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


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m"])
@pytest.mark.parametrize("explicit", [None, {"0": "tanh", "2": "tanh"}])
def test_mean_reduction_for_every_variant(variant: str, explicit: dict[str, str] | None) -> None:
    results = []
    for reduction in ("mean", "sum"):
        model, criterion = network(), nn.MSELoss(reduction=reduction)
        opt = LocoProp(
            model,
            lr=1e-2,
            gamma=2.0,
            variant=variant,
            local_reduction="mean",
            loss_fn=criterion,
            transfers=explicit,
        )
        for _ in range(3):
            criterion(model(X), Y).backward()
            opt.step()
            opt.zero_grad()
        results.append(weights(model))
    assert_close(*results, 1e-11)


def test_a_layer_whose_gradient_is_none() -> None:
    """A function that returns no gradient for its input stops the pass; nothing breaks."""

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


def test_clipping_between_two_batches_keeps_both() -> None:
    """A gradient that was changed in place, but not to zero, is still added to."""
    model = network()
    opt = LocoProp(model, lr=1e-2, output_transfer="sigmoid")
    plain(model, opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    cross_entropy(model(OTHER[0]), OTHER[1]).backward()
    assert [len(layer.inputs()) for layer in opt._layers] == [13, 13, 13]


def test_inputs_are_let_go_with_the_step_even_while_the_loss_is_kept() -> None:
    model = network()
    opt = LocoProp(model, lr=1e-2, output_transfer="sigmoid")
    hidden: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda module, args, out: hidden.append(weakref.ref(out)))
    loss = cross_entropy(model(X), Y)
    loss.backward()
    storage = opt._layers[1].calls[0].x.untyped_storage()
    cells = list(opt._capture._cells)
    assert all(cell.call is not None for cell in cells)
    opt.step()
    assert all(cell.call is None for cell in cells)
    assert storage.nbytes() == 8 * 5 * 8
    assert hidden[0]() is None  # autograd has freed it, and nobody else holds it
    assert loss.grad_fn is not None
