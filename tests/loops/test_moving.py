"""Moving the model to another device or precision: the optimizer's state follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import cross_entropy, weights
from loops.plain import data, distance, each_model, each_variant, loco, make
from torch import Tensor, nn

from torch_locoprop.solvers import Exact

OPTIONS: list[dict[str, Any]] = [
    {},
    {"solver": "adam", "eps": 1e-3},
    {"solver": Exact(decay=0.9, every=2, damping=0.1), "lr": 0.1},
    {"variant": "natural-s", "lr": 1e-4},
    {"apply": "gradient", "outer": lambda ps: torch.optim.AdamW(ps, lr=1e-3)},
]


def with_fallback() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def moved(model: nn.Module, where: list[Any], kind: str = "linear", **options: Any) -> list[Tensor]:
    """Two steps in each of these places; the weights, brought back."""
    opt = loco(model, fallback=lambda ps: torch.optim.AdamW(ps, lr=1e-3), **options)
    for seed in range(2 * len(where)):
        if seed % 2 == 0:
            model.to(where[seed // 2])
        like = next(model.parameters())
        x, y = (t.to(like) for t in data(kind, seed))
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    assert not any(opt.skipped_updates.values())
    for p, state in opt.state.items():
        for name, value in state.items():
            assert name == "step" or (value.device, value.dtype) == (p.device, p.dtype)
    return [w.cpu().double() for w in weights(model)]


@each_variant
@each_model
def test_another_precision(variant: str, kind: str) -> None:
    places = [torch.float64, torch.float32, torch.float64]
    found = moved(make(kind), places, kind, variant=variant)
    stayed = moved(make(kind), [torch.float64] * 3, kind, variant=variant)
    assert 0 < distance(found, stayed) < 1e-5


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_solvers_fallback_and_outer_optimizer_follow(options: dict[str, Any]) -> None:
    places = [torch.float64, torch.float32, torch.float64]
    found = moved(with_fallback(), places, **options)
    stayed = moved(with_fallback(), [torch.float64] * 3, **options)
    tolerance = 1e-2 if options.get("variant") == "natural-s" else 1e-5  # other labels are drawn
    assert 0 < distance(found, stayed) < tolerance


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["linear", "conv", "fallback"])
def test_another_device(kind: str, options: dict[str, Any]) -> None:
    def model() -> nn.Module:
        return with_fallback() if kind == "fallback" else make(kind)

    rows = "conv" if kind == "conv" else "linear"
    found = moved(model(), ["cpu", "cuda", "cpu"], rows, **options)
    stayed = moved(model(), ["cpu", "cpu", "cpu"], rows, **options)
    tolerance = 1e-2 if options.get("variant") == "natural-s" else 1e-9
    assert distance(found, stayed) < tolerance


def test_parameters_that_were_replaced_are_told() -> None:
    """``to`` keeps the parameters unless PyTorch is told otherwise; then a new optimizer is due."""
    model = make()
    opt = loco(model)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    x, y = (t.float() for t in data())
    cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="Make a new optimizer"):
        opt.step()
