"""The plain loop that all other loops are compared with, and the two models it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp

VARIANTS = ("locoprop-s", "locoprop-m", "pocoprop-s")
PRESETS = ("spectral", "general")
STEPS = 3

Backward = Callable[[nn.Module, Tensor, Tensor], object]

each_variant = pytest.mark.parametrize("variant", [*VARIANTS, *PRESETS])
each_iterated = pytest.mark.parametrize("variant", VARIANTS)  # with local iterations and γ
each_model = pytest.mark.parametrize("kind", ["linear", "conv"])


def conv_network() -> nn.Sequential:
    """Images 2×5×5 through two convolutions to three outputs."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3, bias=False), nn.Softplus()),
        *(nn.Flatten(), nn.Linear(3, 3)),
    ).double()


def make(kind: str = "linear") -> nn.Sequential:
    return network() if kind == "linear" else conv_network()


def data(kind: str = "linear", seed: int = 0, rows: int = 8) -> tuple[Tensor, Tensor]:
    shape = (6,) if kind == "linear" else (2, 5, 5)
    return batch(rows, *shape, seed=10 + seed), batch(rows, 3, seed=50 + seed)


def loco(model: nn.Module, variant: str = "locoprop-m", **options: Any) -> LocoProp:
    """Return the optimizer of a variant, or of a preset with spectral steps."""
    given = {"lr": 1e-2, "momentum": 0.9, "output_transfer": "sigmoid", **options}
    if variant in PRESETS:
        return LocoProp(model, preset=variant, **given)
    return LocoProp(model, variant=variant, **{"gamma": 2.0, **given})


def plain(model: nn.Module, x: Tensor, y: Tensor) -> None:
    cross_entropy(model(x), y).backward()


def train(
    variant: str = "locoprop-m",
    kind: str = "linear",
    backward: Backward = plain,
    model: nn.Module | None = None,
    before_step: Callable[[nn.Module], object] | None = None,
    steps: int = STEPS,
    **options: Any,
) -> list[Tensor]:
    """Return the weights after a few steps, with gradients that ``backward`` computes."""
    model = make(kind) if model is None else model
    opt = loco(model, variant, **options)
    for seed in range(steps):
        backward(model, *data(kind, seed))
        if before_step is not None:
            before_step(model)
        opt.step()
        opt.zero_grad()
    return weights(model)


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest difference between two lists of weights."""
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
