"""The drawn matching losses equal integrals of f by quadrature."""

import math
from collections.abc import Callable

import pytest
import torch
from scipy.integrate import quad

from torch_locoprop.paper import transfers
from torch_locoprop.study.figures import matching_loss
from torch_locoprop.study.figures.matching_loss import A_HAT, A

F: dict[str, Callable[[float], float]] = {"tanh": math.tanh, "relu": lambda z: max(z, 0.0)}


@pytest.mark.parametrize("name", F)
@pytest.mark.parametrize("a", matching_loss.TARGETS)
@pytest.mark.parametrize("a_hat", [-3.0, -0.5, 0.0, 1.7])
def test_losses_are_integrals(name: str, a: float, a_hat: float) -> None:
    f = F[name]
    integral, _ = quad(lambda z: f(z) - f(a), a, a_hat, points=[0.0] if a * a_hat < 0 else None)
    loss = matching_loss.losses(transfers.get(name), a, torch.tensor([a_hat], dtype=torch.float64))
    assert loss.item() == pytest.approx(integral, abs=1e-9)


def test_the_area_is_the_loss() -> None:
    tanh = transfers.get("tanh")
    z, height = matching_loss.area(tanh, A, A_HAT)
    assert (z[0].item(), z[-1].item()) == (A, A_HAT)
    expected, _ = quad(lambda x: math.tanh(x) - math.tanh(A), A, A_HAT)
    assert torch.trapezoid(height, z).item() == pytest.approx(expected, abs=1e-4)


def test_the_picture_has_the_area_and_both_losses() -> None:
    figure = matching_loss.draw(["footer"])
    area, tanh, relu = figure.axes
    expected, _ = quad(lambda x: math.tanh(x) - math.tanh(A), A, A_HAT)
    assert f"{expected:.2f}" in " ".join(text.get_text() for text in area.texts)
    for axes in (tanh, relu):
        curves = [line for line in axes.lines if len(line.get_xdata()) > 1]
        assert len(curves) == len(matching_loss.TARGETS)
    flat = relu.lines[0]  # a = −2: zero for all â ≤ 0
    assert all(y == 0 for x, y in zip(flat.get_xdata(), flat.get_ydata(), strict=True) if x <= 0)


def test_the_loss_has_one_symbol() -> None:
    figure = matching_loss.draw()
    _, tanh, relu = figure.axes
    assert tanh.get_ylabel() == relu.get_ylabel() == matching_loss.SYMBOL
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert sum(matching_loss.SYMBOL in text for text in texts) == 1
    drawn = " ".join([*texts, *(axes.get_ylabel() for axes in figure.axes)])
    for other in ("L_f", "y", "ŷ"):
        assert other not in drawn


def test_losses_are_told_apart_without_colour() -> None:
    for axes in matching_loss.draw().axes[1:]:
        lines = [line for line in axes.lines if len(line.get_xdata()) > 1]
        assert len({line.get_marker() for line in lines}) == len(lines)
        assert len({str(line._dash_pattern) for line in lines}) == len(lines)
        for target, line in zip(matching_loss.TARGETS, lines, strict=True):
            (at,) = line.get_markevery()
            assert line.get_xdata()[at] == pytest.approx(target)
            assert axes.get_ylim()[0] < line.get_ydata()[at] < axes.get_ylim()[1]
