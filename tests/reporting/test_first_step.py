"""The report on the first step: numbers in ``summary()``, and one warning if they are out of range."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import batch, network
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.paper.gram import Gram
from torch_locoprop.solvers import SOLVERS
from torch_locoprop.stepping.first_step import (
    FirstStep,
    _rms,
    _size_through_gram,
    advice,
    on_host,
)

ROWS = 12


def loss_of(model: nn.Module) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch(ROWS, 6)), batch(ROWS, 3).abs())


def stepped(model: nn.Module, scale: float = 1.0, **settings: Any) -> LocoProp:
    opt = LocoProp(model, output_transfer="sigmoid", **settings)
    (scale * loss_of(model)).backward()
    opt.step()
    opt.zero_grad()
    return opt


def first_steps(opt: LocoProp) -> list[FirstStep]:
    return [layer.first_step for layer in opt._layers]


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().square().mean().sqrt())


class Forward:
    """Pre-activations, outputs and ∂L/∂a of the linear layers of a network, by autograd."""

    def __init__(self, model: nn.Sequential) -> None:
        h, self.x, self.a, self.y = batch(ROWS, 6), [], [], []
        for module in model:
            if isinstance(module, nn.Linear):
                self.x.append(h)
                self.a.append(module(h))
                h = self.a[-1]
            else:
                h = module(h)
                self.y.append(h)
        self.y.append(h.sigmoid())
        loss = F.binary_cross_entropy_with_logits(h, batch(ROWS, 3).abs())
        self.g = torch.autograd.grad(loss, self.a, retain_graph=True)
        self.v = torch.autograd.grad(loss, self.y[:-1])


@pytest.mark.parametrize("preset", ["general", "paper-s", "paper-m", "paper-pocoprop-s"])
def test_the_numbers_are_those_of_the_step(preset: str) -> None:
    model = network()
    before, gamma = copy.deepcopy(model), 10.0
    opt = stepped(model, preset=preset)
    known = Forward(before)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    old = [m for m in before if isinstance(m, nn.Linear)]
    for i, found in enumerate(first_steps(opt)):
        moved = F.linear(known.x[i], layers[i].weight, layers[i].bias) - known.a[i]
        change = layers[i].weight - old[i].weight
        assert found.weights == pytest.approx(rms(change) / rms(old[i].weight), rel=1e-9)
        assert found.outputs == pytest.approx(rms(moved) / rms(known.a[i]), rel=1e-6)
        if preset == "general":
            assert math.isnan(found.target)
        elif preset != "paper-pocoprop-s":
            start = known.a[i] if preset == "paper-s" else known.y[i]
            expected = gamma * rms(known.g[i]) / rms(start)
            assert found.target == pytest.approx(expected, rel=1e-9)
        else:  # v of hidden layers is ∂L/∂y; that of the output has the sigmoid of the loss
            v = known.v[i] if i < 2 else known.g[i] / (known.y[i] * (1 - known.y[i]))
            gamma = opt.param_groups[0]["gamma"]
            assert gamma != 1
            assert found.target == pytest.approx(gamma * rms(v) / rms(known.y[i]), rel=1e-9)


def test_summary_shows_them_from_the_first_step_on() -> None:
    model = network()
    opt = LocoProp(model, preset="paper-m", output_transfer="sigmoid")
    assert "weights" not in opt.summary()
    loss_of(model).backward()
    opt.step()
    shown = opt.summary()
    header, _, *rows = shown.partition("The first step: ")[2].splitlines()[2:]
    assert header.split() == ["first", "step", "target", "outputs", "weights"]
    for row, layer, step in zip(rows, opt._layers, first_steps(opt), strict=True):
        numbers = (step.target, step.outputs, step.weights)
        assert row.split() == ["in", layer.name, *(f"{x:.1g}" for x in numbers)]
    opt.zero_grad()
    loss_of(model).backward()
    opt.step()
    assert opt.summary() == shown, "the numbers stay those of the first step"


def test_the_spectral_step_has_no_target() -> None:
    row = stepped(network()).summary().splitlines()[-1]
    *names, target, outputs, weights = row.split()
    assert (names, target) == (["in", "4"], "–")
    assert float(outputs) > 0
    assert float(weights) > 0


def test_a_model_that_was_changed_since_is_not_described() -> None:
    model = network()
    opt = stepped(model)
    model.append(nn.Linear(3, 3).double())
    assert opt.summary().splitlines()[-1].endswith("parameters in local problems")


def test_gradients_that_were_scaled_count_as_the_step_sees_them() -> None:
    plain, scaled = network(), network()
    expected = stepped(plain, preset="paper-s")
    opt = LocoProp(scaled, preset="paper-s", output_transfer="sigmoid")
    (1024.0 * loss_of(scaled)).backward()
    for p in scaled.parameters():
        assert p.grad is not None
        p.grad /= 1024.0
    opt.step()
    for one, other in zip(first_steps(opt), first_steps(expected), strict=True):
        assert one.target == pytest.approx(other.target, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "scale", "message"),
    [
        ({"preset": "paper-m"}, 1e-4, r"targets are .* too near\. Try gamma=[1-9]"),
        ({"preset": "paper-s", "gamma": 1e9}, 1.0, r"targets are .* too far\. Try gamma=[0-9]"),
        ({"lr": 1e-8}, 1.0, r"weights by .* too little\. Try lr=0\.[0-9]"),
        ({"lr": 50.0}, 1.0, r"weights by .* too much\. Try lr=0\.[0-9]"),
        ({"solver": "sgd", "lr": 1e4}, 1.0, r"too much\. Try lr="),
    ],
    ids=str,
)
def test_a_step_out_of_range_is_named_once_with_a_value(
    settings: dict[str, Any], scale: float, message: str
) -> None:
    model = network()
    with pytest.warns(UserWarning, match=message) as found:
        opt = stepped(model, scale, **settings)
    assert len(found) == 1
    setting, value = str(found[0].message).partition("Try ")[2].split(" ")[0][:-1].split("=")
    (scale * loss_of(model)).backward()
    opt.step()  # warns no more
    other: dict[str, Any] = {**settings, setting: float(value)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(network(), scale, **other)  # the suggested value is within the range


@pytest.mark.parametrize("preset", ["general", "spectral", "paper-m", "paper-s"])
def test_defaults_are_within_the_range(preset: str) -> None:
    stepped(network(), preset=preset)


def test_a_warm_up_is_judged_at_its_full_rate() -> None:
    model = network()
    opt = LocoProp(model)
    torch.optim.lr_scheduler.LinearLR(opt, start_factor=1e-4, total_iters=100)
    loss_of(model).backward()
    opt.step()
    assert first_steps(opt)[0].weights < 1e-4


@pytest.mark.parametrize("lr", [1e-3, 1e-4, 1e-5])
def test_rates_of_fine_tuning_are_not_judged(lr: float) -> None:
    stepped(network(), lr=lr)


def test_weights_that_begin_near_zero_are_not_judged() -> None:
    """An entry moves by about 0.2 lr, however small it is."""
    model = nn.Linear(6, 3, dtype=torch.float64)
    nn.init.normal_(model.weight, std=1e-5)
    (found,) = first_steps(stepped(model))
    assert found.weights > 10


def test_a_step_within_a_cap_is_not_judged() -> None:
    stepped(network(), cap=1e-8)


@pytest.mark.parametrize("change", ["zero", "frozen"])
def test_one_unusual_layer_does_not_hide_the_others(change: str) -> None:
    model = network()
    if change == "zero":
        nn.init.zeros_(model[2].weight)
    else:
        model[0].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="weights by .* too much"):
        stepped(model, lr=1e3)


def test_each_group_is_judged_and_named() -> None:
    model = network()
    rates = (1e-8, 1e3, 0.03)
    layers = [module for module in model if isinstance(module, nn.Linear)]
    groups = [
        {"params": list(layer.parameters()), "lr": lr}
        for layer, lr in zip(layers, rates, strict=True)
    ]
    with pytest.warns(UserWarning, match="Parameter group") as found:
        stepped(model, param_groups=groups)
    told = [str(warning.message).split(" (median")[0] for warning in found]
    assert [text.split(":")[0] for text in told] == ["Parameter group 0", "Parameter group 1"]


def test_a_rate_of_zero_is_not_judged() -> None:
    stepped(network(), lr=0.0)


def test_later_steps_record_and_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    opt = stepped(model, preset="paper-m")
    monkeypatch.setattr("torch_locoprop.stepping.first_step.ratios", None)
    monkeypatch.setattr("torch_locoprop.stepping.first_step.on_host", None)
    for _ in range(2):
        assert not any("g_norm" in layer.needs for layer in opt._layers)
        loss_of(model).backward()
        assert all(call.g_norm is None for layer in opt._layers for call in layer.calls)
        opt.step()
        opt.zero_grad()


def test_the_target_of_a_mean_over_rows_is_that_of_each_row() -> None:
    """The gradient of a row's own loss is as many times larger as there are rows."""
    model = network()
    before = copy.deepcopy(model)
    opt = stepped(model, preset="paper-s", local_reduction="mean")
    known, gamma = Forward(before), opt.param_groups[0]["gamma"]
    for i, found in enumerate(first_steps(opt)):
        expected = gamma * ROWS * rms(known.g[i]) / rms(known.a[i])
        assert found.target == pytest.approx(expected, rel=1e-9)


def test_the_mean_of_squares_of_no_numbers_is_zero() -> None:
    for numbers, expected in (([], 0.0), ([3.0], 3.0), ([1.0, 7.0], 5.0)):
        assert _rms(torch.tensor(numbers)) == expected


def test_a_square_that_rounding_left_below_zero_has_no_length() -> None:
    gram = Gram(torch.tensor([[-1e-12]]), torch.zeros(1), 1)
    assert _size_through_gram(gram, {"weight": torch.ones(1, 1)}) == 0


def test_numbers_without_values_are_not_known() -> None:
    found = on_host((torch.tensor(2.0), None, torch.ones((), device="meta")))
    assert found.target == 2.0
    assert math.isnan(found.outputs)
    assert math.isnan(found.weights)


UNKNOWN = FirstStep(math.nan, math.nan, math.nan)


def of(target: float = math.nan, weights: float = math.nan) -> list[FirstStep]:
    return [FirstStep(target, 1.0, weights)]


@pytest.mark.parametrize(
    ("steps", "settings", "expected"),
    [
        (of(target=1e-4), {}, ""),
        (of(target=5e-5), {"gamma": 2.0}, "too near. Try gamma=4e+02."),  # 2 · 0.01 / 5e-5
        (of(target=1e6), {}, ""),
        (of(target=1000000.5), {"gamma": 3.0}, "too far. Try gamma=3e-08."),
        (of(weights=99.5), {}, ""),
        (of(weights=100.0), {}, ""),
        (of(weights=100.5), {"lr": 0.4}, "too much. Try lr=4e-05."),  # 0.4 · 0.01 / 100.5
        (of(weights=1e-30), {}, ""),
        (of(weights=90.0), {"lr": 0.2, "initial_lr": 0.4}, "too much. Try lr=2e-05."),
        (of(weights=120.0), {"lr": 0.4, "initial_lr": 0.2}, ""),
        (of(weights=1e3), {"lr": 0.0}, ""),
        (of(weights=1e3), {"lr": 0.0, "initial_lr": 0.4}, ""),
        (of(weights=1e3), {"cap": 0.1}, ""),
        ([*of(weights=1e3), FirstStep(math.nan, 1.0, math.nan)], {}, "too much. Try lr=4e-06."),
        ([*of(weights=1e3), FirstStep(math.nan, math.nan, 1e3)], {}, "too much. Try lr=4e-06."),
        ([*of(weights=1e3), UNKNOWN], {}, ""),
        ([*of(weights=1e3), *of(weights=1e3), *of(weights=1.0)], {}, "Try lr=4e-06."),
        ([*of(weights=0.0), *of(weights=0.0), *of(weights=1e3)], {}, "Try lr=4e-06."),
    ],
    ids=str,
)
def test_advice_of_iterations(
    steps: list[FirstStep], settings: dict[str, Any], expected: str
) -> None:
    group = {"lr": 0.4, "gamma": 1.0, "cap": None, **settings}
    told = advice(steps, group, SOLVERS["rmsprop"])
    assert expected in told
    assert bool(told) is bool(expected)


@pytest.mark.parametrize(
    ("weights", "settings", "expected"),
    [
        (9.5, {}, ""),
        (10.0, {}, ""),
        (10.5, {}, "too much. Try lr=0.004."),  # 0.4 · 0.1 / 10.5
        (20.0, {"lr": 0.1}, ""),
        (20.0, {"lr": 0.101}, "too much. Try lr=0.0005."),
        (10.0, {"lr": 0.06, "initial_lr": 0.12}, "too much. Try lr=0.0006."),
        (1e-6, {}, ""),
        (9e-7, {"lr": 1e-5}, "too little. Try lr=1."),
    ],
    ids=str,
)
def test_advice_of_spectral_steps(weights: float, settings: dict[str, Any], expected: str) -> None:
    group = {"lr": 0.4, "gamma": 1.0, "cap": None, **settings}
    told = advice(of(weights=weights), group, SOLVERS["spectral"])
    assert expected in told
    assert bool(told) is bool(expected)
