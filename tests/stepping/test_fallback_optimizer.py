"""The fallback trains parameters without a local problem; schedulers and state dicts see them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_close, batch, network, weights
from torch import nn
from torch.optim import lr_scheduler
from torch.testing._internal.two_tensor import TwoTensor

from torch_locoprop import LocoProp


def make(lr: float = 1e-2) -> tuple[nn.Sequential, LocoProp]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
    opt = LocoProp(
        model,
        lr=1e-3,
        output_transfer="linear",
        fallback=lambda params: torch.optim.AdamW(params, lr=lr),
    )
    return model, opt


def step(model: nn.Module, opt: LocoProp, seed: int = 1) -> None:
    x = batch(8, 6, seed=seed)
    F.mse_loss(model(x), x[:, :3]).backward()
    opt.step()
    opt.zero_grad()


def test_the_fallback_trains_the_rest_exactly_as_it_would_alone() -> None:
    model, opt = make()
    norm = [p.detach().clone().requires_grad_() for p in model[1].parameters()]
    alone = torch.optim.AdamW(norm, lr=1e-2)
    for seed in range(3):
        x = batch(8, 6, seed=seed)
        F.mse_loss(model(x), x[:, :3]).backward()
        for mine, theirs in zip(norm, model[1].parameters(), strict=True):
            mine.grad = theirs.grad.clone()
        alone.step()
        opt.step()
        opt.zero_grad()
    assert_close(weights(model[1]), [p.detach() for p in norm], 0.0)


def test_a_default_fallback_comes_with_a_warning() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with pytest.warns(UserWarning, match=r"2 parameters have no local problem and get AdamW"):
        opt = LocoProp(model)
    assert "AdamW" in opt.summary()
    x = batch(4, 3).float()
    model(x).square().sum().backward()
    before = weights(model)
    opt.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_the_warning_counts_one_parameter_as_one() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3))
    with pytest.warns(UserWarning, match="^1 parameter has no local problem and gets AdamW"):
        LocoProp(model)


def test_the_warning_counts_one_matrix_as_one() -> None:
    cell = nn.RNNCell(3, 3)
    cell.weight_hh.requires_grad_(False)
    with pytest.warns(UserWarning, match="1 of them is a matrix and takes spectral steps"):
        LocoProp(nn.Sequential(cell, nn.Linear(3, 3)))


def test_schedulers_and_zero_grad_reach_the_fallback() -> None:
    model, opt = make()
    scheduler = lr_scheduler.ExponentialLR(opt, 0.5)
    step(model, opt)
    scheduler.step()
    assert [group["lr"] for group in opt.param_groups] == [5e-4, 5e-3]
    before = weights(model[1])
    opt.param_groups[1]["lr"] = 0.0
    step(model, opt)
    assert_close(weights(model[1]), before, 0.0)
    assert all(p.grad is None for p in model.parameters())


def test_resume_with_a_fallback_is_bit_identical() -> None:
    model, opt = make()
    for seed in range(3):
        step(model, opt, seed)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    resumed, other = make(lr=0.7)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    for seed in range(3, 6):
        step(model, opt, seed)
        step(resumed, other, seed)
    assert_close(weights(model), weights(resumed), 0.0)


def test_a_fallback_with_state_from_the_start() -> None:
    """Adagrad creates its state in the constructor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)).double()
    opt = LocoProp(model, fallback=lambda p: torch.optim.Adagrad(p, lr=0.1))
    before = weights(model[1])
    model(batch(4, 6)).square().mean().backward()
    opt.step()
    assert not torch.equal(weights(model[1])[0], before[0])


def test_a_fallback_with_steps_behind_it_goes_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)).double()
    before = torch.optim.Adam(model[1].parameters(), lr=0.1)
    model(batch(4, 6)).square().mean().backward()
    before.step()
    norm = [p.detach().clone().requires_grad_() for p in model[1].parameters()]
    alone = torch.optim.Adam(norm, lr=0.1)
    alone.load_state_dict(copy.deepcopy(before.state_dict()))
    model.zero_grad()
    opt = LocoProp(model, fallback=lambda params: before)
    for seed in range(2):
        model(batch(4, 6, seed=seed)).square().mean().backward()
        for mine, theirs in zip(norm, model[1].parameters(), strict=True):
            mine.grad = theirs.grad.clone()
        alone.step()
        opt.step()
        opt.zero_grad()
    assert_close(weights(model[1]), [p.detach() for p in norm], 0.0)


def test_add_param_group_may_go_to_the_fallback() -> None:
    model, opt = make()
    step(model, opt)
    model.append(nn.LayerNorm(3).double())
    opt.add_param_group({"params": model[-1].parameters()})
    numbers = [p.numel() for p in (*model[0].parameters(), *model[3].parameters())]
    sizes = [[p.numel() for p in group["params"]] for group in opt.param_groups]
    assert sizes == [numbers, [5, 5], [3, 3]]
    before = weights(model[-1])
    step(model, opt)
    assert not torch.equal(weights(model[-1])[1], before[1])


def test_add_param_group_may_make_the_first_fallback() -> None:
    model = nn.Sequential(nn.Linear(6, 3)).double()
    opt = LocoProp(model, lr=1e-3, fallback=lambda p: torch.optim.SGD(p, lr=0.1))
    model.append(nn.LayerNorm(3).double())
    opt.add_param_group({"params": model[1].parameters()})
    before = weights(model)
    step(model, opt)
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_a_weight_that_is_no_plain_tensor_falls_back() -> None:
    """Such as a DTensor of FSDP or tensor parallelism, which would need several processes."""
    model = network()
    model[0].weight = nn.Parameter(TwoTensor(torch.ones(5, 6), torch.ones(5, 6)))
    opt = LocoProp(model, fallback=lambda params: torch.optim.SGD(params, lr=0.1))
    (row,) = [line for line in opt.summary().splitlines() if line.startswith("0 ")]
    assert row.endswith("its weight is a TwoTensor, sharded or quantized, not a plain tensor")
    assert " SGD " in row


@pytest.mark.parametrize("wrong", ["adam", 3])
def test_what_is_no_fallback_is_refused_where_none_is_needed(wrong: Any) -> None:
    with pytest.raises(TypeError, match="fallback= must be a function of the parameters"):
        LocoProp(nn.Linear(3, 2), fallback=wrong)


def test_frozen_parameters_need_no_fallback_and_are_counted() -> None:
    """The tests turn warnings into errors."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    assert "10 of 34 parameters in local problems; 24 not trained" in LocoProp(model).summary()
