"""Matrices of attention and recurrent modules take spectral steps where no fallback is given."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_close, batch, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp, functional


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.view(-1, 2, 3))[0][:, -1])


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x.view(-1, 2, 6)).mean(1).repeat_interleave(2, 0))


MODELS: dict[str, tuple[type[nn.Module], int]] = {
    "GRU": (Recurrent, 2),
    "LSTMCell": (Cell, 2),
    "attention": (Attentive, 2),
}


def made(name: str, **settings: Any) -> tuple[nn.Module, LocoProp]:
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no fallback=
        return model, LocoProp(model, **settings)


def step(
    model: nn.Module,
    opt: LocoProp,
    seed: int,
    after_backward: Callable[[], None] = lambda: None,
    factor: float = 1.0,
) -> None:
    x = batch(8, 6, seed=seed)
    (factor * F.mse_loss(model(x), x[:, :3])).backward()
    after_backward()
    opt.step()
    opt.zero_grad()


def matrices(opt: LocoProp) -> list[nn.Parameter]:
    return [p for group in opt.param_groups if group.get("spectral") for p in group["params"]]


@pytest.mark.parametrize("preset", ["general", "spectral"])
@pytest.mark.parametrize("name", MODELS)
def test_the_matrices_take_the_spectral_step_of_their_gradients(name: str, preset: str) -> None:
    """They follow ``functional.spectral`` without C, at the rate of the layers."""
    model, opt = made(name, preset=preset)
    own = matrices(opt)
    assert len(own) == MODELS[name][1]
    assert all(p.dim() == 2 for p in own)
    lr = opt.param_groups[0]["lr"]
    expected = [p.detach().clone() for p in own]
    states: list[Any] = [None] * len(own)

    def follow() -> None:
        for i, p in enumerate(own):
            assert p.grad is not None
            moved, states[i] = functional.spectral(
                p.grad, None, states[i], lr=lr, agreement=float(preset == "general")
            )
            expected[i] += moved

    for seed in range(12):
        step(model, opt, seed, follow)
    assert_close([p.detach() for p in own], expected, 1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_other_parameters_get_adamw_at_a_third_of_the_rate(name: str) -> None:
    model, opt = made(name)
    groups = [group for group in opt.param_groups if group["fallback"]]
    for group in groups:
        assert group["lr"] == pytest.approx(0.04 if group["spectral"] else 0.04 / 3)
    others = [p for group in groups if not group["spectral"] for p in group["params"]]
    alone = [p.detach().clone().requires_grad_() for p in others]
    adamw = torch.optim.AdamW(alone, lr=0.04 / 3, eps=1e-15) if alone else None

    def follow() -> None:
        for mine, theirs in zip(alone, others, strict=True):
            assert theirs.grad is not None
            mine.grad = theirs.grad.clone()
        if adamw is not None:
            adamw.step()

    for seed in range(4):
        step(model, opt, seed, follow)
    assert_close([p.detach() for p in others], [p.detach() for p in alone], 0.0)


@pytest.mark.parametrize("settings", [{"preset": "paper-m"}, {"variant": "locoprop-s"}])
def test_local_iterations_leave_matrices_to_adamw(settings: dict[str, Any]) -> None:
    _, opt = made("GRU", **settings)
    assert not matrices(opt)
    assert type(opt._fallback) is torch.optim.AdamW


def test_a_fallback_of_the_user_trains_all_it_is_given() -> None:
    model, opt = made("GRU", fallback=lambda params: torch.optim.SGD(params, lr=0.1))
    assert set(opt.param_groups[1]["params"]) == set(model.gru.parameters())


def test_the_warning_and_the_summary_name_it() -> None:
    with pytest.warns(UserWarning, match=r"4 parameters .* 2 of them are matrices"):
        opt = LocoProp(Recurrent())
    assert "SpectralAdamW" in opt.summary()


@pytest.mark.parametrize("name", MODELS)
def test_the_scale_of_the_loss_and_schedules(name: str) -> None:
    """No number of the step has a unit, and a scheduler reaches the matrices.

    Outputs are compared: no output depends on the biases of attention's keys, whose gradients are
    rounding errors.
    """
    (model, opt), (other, scaled) = made(name), made(name)
    for seed in range(6):
        step(model, opt, seed)
        step(other, scaled, seed, factor=1024.0)
    x = batch(8, 6)
    assert_close([model(x).detach()], [other(x).detach()], 1e-8)
    for group in opt.param_groups:
        group["lr"] = 0.0
    before = weights(model)
    step(model, opt, 6)
    assert_close(weights(model), before, 0.0)


@pytest.mark.parametrize("way", ["state dict", "pickle", "deepcopy"])
def test_a_run_goes_on_bit_for_bit(way: str) -> None:
    model, opt = made("GRU")
    for seed in range(3):
        step(model, opt, seed)
    if way == "state dict":
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        other, resumed = made("GRU")
        other.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["opt"])
    elif way == "pickle":
        other, resumed = pickle.loads(pickle.dumps((model, opt)))
    else:
        other, resumed = copy.deepcopy((model, opt))
    for seed in range(3, 6):
        step(model, opt, seed)
        step(other, resumed, seed)
    assert_close(weights(model), weights(other), 0.0)


def test_a_state_dict_with_adamw_for_all_is_refused() -> None:
    _, before = made("GRU", fallback=lambda params: torch.optim.AdamW(params))
    _, opt = made("GRU")
    with pytest.raises(ValueError, match="groups of parameters"):
        opt.load_state_dict(before.state_dict())
