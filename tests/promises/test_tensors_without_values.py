"""Steps with meta tensors and in ``FakeTensorMode``, by which programs estimate memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import FIRST_ORDER, VARIANTS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from torch_locoprop import LocoProp, baselines
from torch_locoprop.solvers import Exact

EACH = pytest.mark.parametrize("mode", ["meta", "fake"])
OPTIONS: list[dict[str, Any]] = [
    *({"variant": variant, "solver": "rmsprop"} for variant in VARIANTS),
    *({"variant": "locoprop-m", "solver": solver} for solver in (*FIRST_ORDER, "exact")),
    {"variant": "locoprop-s", "solver": "exact"},
    {"variant": "locoprop-m", "solver": "preconditioned"},
    {"variant": "locoprop-m", "solver": "preconditioned-averaged"},
    *({"preset": preset, "diagnose": True} for preset in ("general", "spectral")),
    {"variant": "locoprop-s", "solver": Exact(decay=0.9, every=2, damping=0.1)},
    {"variant": "locoprop-m", "cap": 1.0, "gate": True},
    {"variant": "locoprop-m", "max_rows": 2},
    {"variant": "locoprop-m", "local_reduction": "mean"},
    {"variant": "locoprop-m", "diagnose": True},
    # PyTorch's AdamW does not serve such tensors in all versions.
    {"variant": "locoprop-s", "apply": "gradient", "outer": torch.optim.SGD},
]
BASELINES: list[Callable[[nn.Module], Optimizer]] = [
    *(
        lambda model, kind=kind: kind(model.parameters())
        for kind in (
            *(baselines.SGD, baselines.Momentum, baselines.Nesterov, baselines.Adagrad),
            *(baselines.RMSProp, baselines.Adam, baselines.Shampoo),
        )
    ),
    lambda model: baselines.KFAC(
        model,
        output_transfer="sigmoid",
        clip=1e-2,
        fallback=lambda ps: torch.optim.SGD(ps, lr=0.1),  # PyTorch's AdamW: not in all versions
    ),
]


def train(mode: str, make: Callable[[nn.Module], Optimizer]) -> Optimizer:
    """Return an optimizer after four steps, with accumulation and gradients zeroed in place."""
    device = "meta" if mode == "meta" else "cpu"
    with FakeTensorMode() if mode == "fake" else nullcontext(), torch.device(device):
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 8),
            nn.Tanh(),
            nn.Linear(8, 5),
        )
        opt = make(model)
        for step in range(4):
            for _ in range(1 + step % 2):
                model(torch.randn(7, 3, 6, 6)).square().mean().backward()
            opt.step()
            opt.zero_grad(set_to_none=step == 0)
        opt.state_dict()
    return opt


@EACH
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_locoprop(mode: str, options: dict[str, Any]) -> None:
    opt = train(mode, lambda model: LocoProp(model, lr=1e-3, output_transfer="sigmoid", **options))
    assert isinstance(opt, LocoProp)
    assert not any(opt.skipped_updates.values())
    opt.summary()
    if options.get("diagnose"):
        assert all(math.isnan(row.displacement) for row in opt.diagnostics())


@EACH
@pytest.mark.parametrize("make", BASELINES)
def test_baselines(mode: str, make: Callable[[nn.Module], Optimizer]) -> None:
    train(mode, make)
