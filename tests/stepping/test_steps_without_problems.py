"""Steps in which no layer has a local problem: allowed for a known reason, otherwise an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import nn

from torch_locoprop import LocoProp


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()


def made(model: nn.Module, **options: Any) -> LocoProp:
    given = {"lr": 1e-2, "gamma": 2.0, "output_transfer": "sigmoid", **options}
    return LocoProp(model, fallback=lambda ps: torch.optim.AdamW(ps, lr=1e-2), **given)


def loss_of(model: nn.Module) -> torch.Tensor:
    return cross_entropy(model(batch(8, 6)), batch(8, 3, seed=1))


def test_frozen_layers_leave_the_others_to_train() -> None:
    model, other = normed(), normed()
    opt, plain = made(model), torch.optim.AdamW(other[1].parameters(), lr=1e-2)
    for net, optimizer in ((model, opt), (other, plain)):
        for module in (net[0], net[3]):
            module.requires_grad_(False)
        for _ in range(3):
            loss_of(net).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(weights(model), weights(other), 0.0)
    model.requires_grad_(True)  # and on with all
    before = weights(model)
    loss_of(model).backward()
    opt.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_a_closure_without_a_loss_skips_the_batch() -> None:
    model = network()
    opt = made(model)
    before = weights(model)
    assert opt.step(lambda: None) is None
    assert_close(weights(model), before, 0.0)
    with pytest.raises(RuntimeError, match="No layer recorded"):
        opt.step()  # no reason to skip a step


def test_gradients_of_zero_raise_unless_rates_are_zero_too() -> None:
    model = network()
    opt = made(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="No layer recorded"):
        opt.step()
    for group in opt.param_groups:
        group["lr"] = 0.0
    before = weights(model)
    opt.step()
    assert_close(weights(model), before, 0.0)
    next(model.parameters()).grad.fill_(1.0)
    with pytest.raises(RuntimeError, match="No layer recorded"):
        opt.step()


def test_one_rate_of_zero_is_no_reason_to_skip_a_step() -> None:
    model = network()
    groups = [{"params": list(model[0].parameters()), "lr": 0.0}]
    groups.append({"params": list(model[2:].parameters())})
    opt = made(model, param_groups=groups)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="No layer recorded"):
        opt.step()


def test_a_layer_of_which_only_the_bias_is_used_elsewhere() -> None:
    """Its weight has a gradient of zero; its bias takes a BackProp step."""
    model = normed()
    model.add_module("unused", nn.Linear(3, 3).double())
    opt = made(model, solver="sgd", momentum=0.0, layers=["0", "unused"])
    before = weights(model.unused)
    hidden = model[:4](batch(8, 6))
    loss = (hidden + model.unused.bias + 0 * model.unused.weight.sum()).square().mean()
    loss.backward()
    gradient = model.unused.bias.grad.clone()
    with pytest.warns(UserWarning, match="'unused' has a gradient, but its forward was not called"):
        opt.step()
    assert_close(weights(model.unused), [before[0], before[1] - 1e-2 * 2.0 * gradient])


def test_distributed_checkpoints_ask_for_a_state_and_give_it_back() -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, other = normed(), normed()
    opt, fresh = made(model), made(other)
    get_state_dict(model, opt)  # before the first step
    for _ in range(2):
        loss_of(model).backward()
        opt.step()
        opt.zero_grad()
    state, own = copy.deepcopy(get_state_dict(model, opt))
    set_state_dict(other, fresh, model_state_dict=state, optim_state_dict=own)
    for net, optimizer in ((model, opt), (other, fresh)):
        loss_of(net).backward()
        optimizer.step()
    assert_close(weights(model), weights(other), 0.0)


@pytest.mark.parametrize("outer", [False, True])
def test_a_control_run_trains_nothing_by_itself(outer: bool) -> None:
    model = normed()
    own = {"outer": lambda ps: torch.optim.SGD(ps, lr=0.1)} if outer else {}
    opt = made(model, apply="nothing", **own)
    before = weights(model)
    loss_of(model).backward()
    opt.step()
    stayed = [torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    assert stayed == [not outer] * len(before)


def test_a_control_run_of_frozen_layers_trains_nothing_either() -> None:
    model = normed()
    opt = made(model, apply="nothing")
    for module in (model[0], model[3]):
        module.requires_grad_(False)
    before = weights(model)
    loss_of(model).backward()
    opt.step()
    assert_close(weights(model), before, 0.0)


def test_groups_are_added_to_an_optimizer_that_was_loaded() -> None:
    model = network()
    opt = made(model, param_groups=[{"params": list(model[0].parameters())}])
    opt.load_state_dict(opt.state_dict())
    opt.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
    before = weights(model)
    loss_of(model).backward()
    opt.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    assert moved == [True] * 4 + [False] * 2


def test_groups_are_not_added_between_backward_and_step() -> None:
    model = network()
    opt = made(model, param_groups=[{"params": list(model[0].parameters())}])
    loss_of(model).backward()
    more = {"params": list(model[2].parameters())}
    with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
        opt.add_param_group(more)
    opt.step()
    opt.add_param_group(more)
