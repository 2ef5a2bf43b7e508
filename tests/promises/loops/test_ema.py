"""Averaged copies of the model do not train, record, or keep the optimizer alive."""

from __future__ import annotations

import copy
import gc
import weakref

import torch
from cases import assert_close, cross_entropy, weights
from promises.loops.plain import STEPS, data, each_model, each_variant, loco, make, plain, train
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@each_variant
@each_model
def test_an_average_beside_the_training(variant: str, kind: str) -> None:
    """Updates of the copy, and backward passes through it, do not change the training."""
    model = make(kind)
    opt = loco(model, variant)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    by_hand: list[torch.Tensor] = []
    for seed in range(STEPS):
        x, y = data(kind, seed)
        loss = cross_entropy(model(x), y)
        cross_entropy(ema(x), y).backward()
        loss.backward()
        opt.step()
        opt.zero_grad()
        ema.zero_grad()
        ema.update_parameters(model)
        now = weights(model)
        pairs = zip(by_hand, now, strict=True) if by_hand else ()
        by_hand = [0.8 * a + 0.2 * w for a, w in pairs] or now
    assert_close(weights(model), train(variant, kind), 0.0)
    assert_close(weights(ema.module), by_hand)


@each_variant
def test_swapping_averaged_weights_in_and_out(variant: str) -> None:
    """Other values are in the parameters during an evaluation between two steps."""
    model = make()
    opt = loco(model, variant)
    average = weights(model)
    for seed in range(STEPS):
        plain(model, *data(seed=seed))
        opt.step()
        opt.zero_grad()
        kept = weights(model)
        average = [0.5 * a + 0.5 * w for a, w in zip(average, kept, strict=True)]
        for values in (average, kept):
            for p, value in zip(model.parameters(), values, strict=True):
                p.data.copy_(value)
            cross_entropy(model(data(seed=9)[0]), data(seed=9)[1])
    assert_close(weights(model), train(variant), 0.0)


def test_a_copy_is_not_recorded_and_can_be_trained_by_itself() -> None:
    model = make()
    opt = loco(model)
    plain(model, *data())
    opt.step()
    opt.zero_grad()
    twin = copy.deepcopy(model)
    before = weights(model)
    other = loco(twin)
    for seed in range(STEPS):
        plain(twin, *data(seed=seed))
        assert all(not layer.calls for layer in opt._layers)
        other.step()
        other.zero_grad()
    assert_close(weights(model), before, 0.0)
    assert sum(len(module._forward_hooks) for module in twin) == 3  # those of the copy are gone


def test_a_copy_does_not_keep_the_optimizer_alive() -> None:
    model = make()
    opt = loco(model)
    plain(model, *data())
    opt.step()
    ema = AveragedModel(model)
    gone = weakref.ref(opt)
    del opt
    gc.collect()
    assert gone() is None
    plain(ema, *data())
    torch.save(ema, "/dev/null")


def test_an_average_is_restored_into_the_model() -> None:
    """``load_state_dict`` keeps the parameters and changes their values: training continues."""
    model = make()
    opt = loco(model, "locoprop-s", solver="sgd")
    plain(model, *data())
    opt.step()
    opt.zero_grad()
    model.load_state_dict(make().state_dict())
    for seed in range(STEPS):
        plain(model, *data(seed=seed))
        opt.step()
        opt.zero_grad()
    assert_close(weights(model), train("locoprop-s", solver="sgd"), 0.0)


@each_variant
def test_a_call_with_other_weights_is_none_of_the_layers(variant: str) -> None:
    """``functional_call`` replaces the weights; its rows are not part of the local problem."""
    model = make()
    opt = loco(model, variant)
    others = {name: 0.5 * p.detach() for name, p in model.named_parameters()}
    for seed in range(STEPS):
        x, y = data(seed=seed)
        beside = (3 * x).requires_grad_()
        loss = cross_entropy(model(x), y)
        (loss + 0 * functional_call(model, others, (beside,)).sum()).backward()
        opt.step()
        opt.zero_grad()
    assert_close(weights(model), train(variant), 1e-12)
