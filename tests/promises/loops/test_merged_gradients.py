"""Loops that take gradients out of ``p.grad`` after each backward pass and put others in at the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp

Model = nn.Sequential
PARTS = [(batch(8, 6, seed=s), batch(8, 3, seed=s + 10)) for s in range(2)]
S: dict[str, Any] = {"variant": "locoprop-s", "solver": "sgd", "lr": 0.05, "gamma": 4.0}
SETTINGS: dict[str, dict[str, Any]] = {"S": S, "M": {**S, "variant": "locoprop-m"}}


def backward(model: Model, part: int) -> None:
    x, y = PARTS[part]
    cross_entropy(model(x), y).backward()


def own_zero_grad(model: Model, opt: LocoProp) -> None:
    """As PCGrad does: the gradient of each task is copied, and the sum put in at the end."""
    found = []
    for part in range(2):
        opt.zero_grad()
        backward(model, part)
        found.append([p.grad.clone() for p in model.parameters()])
    for p, one, other in zip(model.parameters(), *found, strict=True):
        p.grad = one + other


def in_hooks(model: Model, opt: LocoProp) -> None:
    """As trainers with ``main_grad`` do: gradients are added up in another place."""
    sums = {p: torch.zeros_like(p) for p in model.parameters()}

    def take(p: Tensor) -> None:
        sums[p] += p.grad  # type: ignore[index, operator]
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(take) for p in model.parameters()]
    for part in range(2):
        backward(model, part)
    for handle in handles:
        handle.remove()
    for p in model.parameters():
        p.grad = sums[p]


def set_to_zero(model: Model, opt: LocoProp) -> None:
    kept = []
    for part in range(2):
        model.zero_grad(set_to_none=False)
        backward(model, part)
        kept.append([p.grad.clone() for p in model.parameters()])
    for p, one, other in zip(model.parameters(), *kept, strict=True):
        p.grad = one + other


MERGED: dict[str, Callable[[Model, LocoProp], None]] = {
    "zero_grad": own_zero_grad,
    "hooks": in_hooks,
    "zeros": set_to_zero,
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("how", MERGED)
def test_such_layers_take_backprop_steps(how: str, name: str) -> None:
    model = network()
    opt = LocoProp(model, output_transfer="sigmoid", **SETTINGS[name])
    backward(model, 0)
    opt.step()
    opt.zero_grad()
    for told in (True, False):
        losses = [cross_entropy(model(x), y) for x, y in PARTS]
        gradients = torch.autograd.grad(sum(losses), list(model.parameters()))  # type: ignore[arg-type]
        expected = [
            p.detach() - 0.2 * g for p, g in zip(model.parameters(), gradients, strict=True)
        ]
        MERGED[how](model, opt)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step()
        assert [("PCGrad" in str(w.message)) for w in caught] == [True] * told
        opt.zero_grad()
        assert_close(weights(model), expected)
    # Afterwards, ordinary steps have local problems again.
    twin = network()
    twin.load_state_dict(model.state_dict())
    fresh = LocoProp(twin, output_transfer="sigmoid", **SETTINGS[name])
    for each, optimizer in ((model, opt), (twin, fresh)):
        backward(each, 0)
        optimizer.step()
    assert_close(weights(model), weights(twin))


def clipped(model: Model, opt: LocoProp) -> None:
    backward(model, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def replaced(model: Model, opt: LocoProp) -> None:
    backward(model, 0)
    for p in model.parameters():
        p.grad = 0.5 * p.grad  # type: ignore[operator]


def discarded(model: Model, opt: LocoProp) -> None:
    """As SAM does: the first pass is for other purposes."""
    backward(model, 1)
    opt.zero_grad()
    clipped(model, opt)


def accumulated(model: Model, opt: LocoProp) -> None:
    backward(model, 0)
    backward(model, 1)
    for p in model.parameters():
        p.grad = 0.5 * p.grad  # type: ignore[operator]


@pytest.mark.parametrize("loop", [clipped, replaced, discarded, accumulated])
def test_other_loops_have_local_problems(loop: Callable[[Model, LocoProp], None]) -> None:
    model = network()
    opt = LocoProp(model, output_transfer="sigmoid", local_steps=4, **S)
    for _ in range(2):
        before = weights(model)
        loop(model, opt)
        plain = [b - 0.2 * p.grad for b, p in zip(before, model.parameters(), strict=True)]
        opt.step()
        opt.zero_grad()
        moved = zip(before, weights(model), plain, strict=True)
        assert all((a - p).norm() > 1e-3 * (p - b).norm() for b, a, p in moved)


def test_a_second_pass_through_an_earlier_step() -> None:
    """Its inputs are not kept any more: the layer takes BackProp steps, but only then."""
    model = network(sizes=(6, 3))
    opt = LocoProp(model, output_transfer="sigmoid", local_steps=4, **S)
    (x, y), (other, labels) = PARTS
    loss = cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    opt.step()
    opt.zero_grad()
    for order in ((0, 1), (1, 0)):
        before = weights(model)
        for own in order:
            if own:
                cross_entropy(model(other), labels).backward()
            else:
                loss.backward(retain_graph=True)
        plain = [b - 0.2 * p.grad for b, p in zip(before, model.parameters(), strict=True)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step()
        assert [("before the last step" in str(w.message)) for w in caught] == [True] * (
            order[0] == 0
        )
        opt.zero_grad()
        assert_close(weights(model), plain)
    for discard in (opt.zero_grad, model.zero_grad):  # such a pass alone is no part of the step
        loss.backward(retain_graph=True)
        discard()
        twin = network(sizes=(6, 3))
        twin.load_state_dict(model.state_dict())
        fresh = LocoProp(twin, output_transfer="sigmoid", local_steps=4, **S)
        for each, optimizer in ((model, opt), (twin, fresh)):
            cross_entropy(each(other), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(weights(model), weights(twin))


def test_a_layer_with_nothing_but_an_earlier_pass() -> None:
    """The others have local problems; one warning names the layer and the reason."""
    model = network(sizes=(6, 5, 3))
    opt = LocoProp(model, output_transfer="sigmoid", local_steps=4, **S)
    first, transfer, last = model
    x, y = PARTS[0]
    h = transfer(first(x))
    cross_entropy(last(h), y).backward(retain_graph=True)
    opt.step()
    opt.zero_grad()
    before = weights(model)
    cross_entropy(last(h), y).backward()
    plain = [b - 0.2 * p.grad for b, p in zip(before, model.parameters(), strict=True)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    assert ["gradients of '0' come in part" in str(w.message) for w in caught] == [True]
    assert_close(weights(first), plain[:2])
    assert (last.weight - plain[2]).norm() > 1e-3 * (plain[2] - before[2]).norm()
