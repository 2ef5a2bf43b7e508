"""Autocast: layers compute in half precision, local problems in the precision of the weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import cross_entropy, weights
from promises.loops.plain import (
    PRESETS,
    STEPS,
    data,
    distance,
    each_model,
    each_variant,
    loco,
    make,
)
from torch import Tensor

from torch_locoprop.solvers import Exact

pytestmark = pytest.mark.filterwarnings("ignore:(momentum|gamma) has no effect with solver")

DTYPES = [torch.bfloat16, torch.float16]


def run(
    variant: str, kind: str = "linear", dtype: torch.dtype | None = None, **options: Any
) -> tuple[list[Tensor], str]:
    """Return float32 weights and the summary, with or without autocast in the forward pass."""
    model = make(kind).float()
    opt = loco(model, variant, **options)
    for seed in range(STEPS):
        x, y = (t.float() for t in data(kind, seed))
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = cross_entropy(model(x).float(), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert not any(opt.skipped_updates.values())
    return weights(model), opt.summary()


def words(summary: str) -> str:
    """Return a summary without its decimal numbers and its spaces."""
    return " ".join(word for word in summary.split() if not re.fullmatch(r"\d+\.\d+", word))


@each_variant
@each_model
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_plain_run_to_the_precision_of_autocast(
    variant: str, kind: str, dtype: torch.dtype
) -> None:
    (found, summary), (expected, plainly) = run(variant, kind, dtype), run(variant, kind)
    assert all(w.dtype == torch.float32 for w in found)
    moved = distance(expected, weights(make(kind).float()))
    factor = 32 if variant in PRESETS else 8  # polar factors raise small singular values
    assert distance(found, expected) < factor * torch.finfo(dtype).eps * moved
    assert distance(found, expected) > 0  # or it was not in half precision
    if variant in PRESETS:  # rounding changes the measured numbers of the first step
        summary, plainly = words(summary), words(plainly)
    assert summary == plainly  # the same transfers, through the casts between layers


@pytest.mark.parametrize(
    "options",
    [
        {"solver": "exact", "lr": 0.1},
        {"solver": "preconditioned", "lr": 0.1, "gamma": 0.05},
        {"solver": "preconditioned-averaged", "local_steps": 1},
        {"solver": Exact(decay=0.9, damping=0.1), "lr": 0.1},
        {"regularizer": "fisher", "lr": 1e-3},
        {"local_reduction": "mean"},
        {"gate": True, "cap": 0.1},
    ],
    ids=str,
)
def test_with_other_settings(options: dict[str, Any]) -> None:
    found, expected = (run("locoprop-m", "linear", d, **options)[0] for d in (DTYPES[0], None))
    assert distance(found, expected) < 0.02


def test_natural_gradients() -> None:
    found, expected = (run("natural-s", "linear", d, lr=1e-4)[0] for d in (DTYPES[0], None))
    assert distance(found, expected) < 0.02


@each_variant
@each_model
def test_a_step_inside_autocast_is_one_outside(variant: str, kind: str) -> None:
    results = []
    for inside in (True, False):
        model = make(kind).float()
        opt = loco(model, variant)
        for seed in range(STEPS):
            x, y = (t.float() for t in data(kind, seed))
            with torch.autocast("cpu", torch.bfloat16):
                cross_entropy(model(x).float(), y).backward()
                if inside:
                    opt.step()
            if not inside:
                opt.step()
            opt.zero_grad()
        results.append(weights(model))
    assert distance(*results) == 0


def test_a_closure_runs_as_its_surroundings_say() -> None:
    model = make().float()
    opt = loco(model)
    x, y = (t.float() for t in data())
    seen = []

    def closure() -> Tensor:
        opt.zero_grad()
        out = model(x)
        seen.append(out.dtype)
        loss = cross_entropy(out.float(), y)
        loss.backward()
        return loss

    with torch.autocast("cpu", torch.bfloat16):
        opt.step(closure)
    assert seen == [torch.bfloat16]
