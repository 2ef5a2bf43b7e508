"""The scripts about the spectral step: what they compare is what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import matching_under_polar, spectral_step
from benchmarks.default_groups import TASKS
from torch_locoprop.functional import polar, spectral


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
def test_the_polar_step_takes_the_local_solution(variant: str) -> None:
    """LocoProp-S has a closed form on the batch: its first step is the polar factor of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    settings = {"local": variant, "iterations": 30, "lr": 0.1}
    opt = matching_under_polar.build(model, TASKS["autoencoder-sum-200"], settings)
    x = torch.rand(50, 4).double()
    before = model[0].weight.detach().clone()
    nn.functional.binary_cross_entropy_with_logits(model(x), x).backward()
    gradient = torch.cat([model[0].weight.grad, model[0].bias.grad[:, None]], dim=1)
    opt.step()
    moved = model[0].weight.detach() - before
    rows = torch.cat([x, torch.ones(50, 1).double()], dim=1)
    solution = torch.linalg.solve(rows.mT @ rows, gradient.mT).mT
    expected, _ = spectral(solution, None, None, lr=0.1, agreement=1.0)
    apart = (moved - expected[:, :-1]).norm() / moved.norm()
    assert apart < 1e-3 if variant == "locoprop-s" else 1e-3 < apart < 1


def test_the_products_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polar factor and closed form of a layer have as many operations as the timed products."""
    from torch.utils.flop_counter import FlopCounterMode

    layer, matrix = nn.Linear(20, 30), torch.randn(30, 21)
    products = spectral_step.Products(layer, 10, bf16=True)
    with FlopCounterMode(display=False) as timed:
        products.step(renews=False)
    with FlopCounterMode(display=False) as needed:
        polar(matrix @ torch.eye(21))
    assert timed.get_total_flops() == needed.get_total_flops()
    monkeypatch.setitem(spectral_step.MODELS, "small", ((6, 4), 5))
    assert spectral_step.measured("small", rounds=1)["over products"] > 0


def test_the_single_file_trains_as_locoprop_in_its_benchmark(tmp_path: Path) -> None:
    """All methods are timed on equal batches; two are the same step, and the others are not."""
    out = tmp_path / "single-file.json"
    model = ["--layers", "1", "--width", "64", "--context", "16", "--batch-size", "4"]
    other = ["--rounds", "1", "--device", "cpu", "--out", str(out)]
    root = Path(__file__).parents[2]
    subprocess.run(  # the modules of the examples are at the top level, under names of others
        [sys.executable, "-m", "benchmarks.single_file", *model, *other],
        check=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        timeout=100,
    )
    rows = {row["method"]: row for row in json.loads(out.read_text())["rows"]}
    losses = {name: row["loss"] for name, row in rows.items()}
    assert losses["single file"] == pytest.approx(losses["LocoProp"], abs=2e-3)
    for name in ("passes", "adamw", "single file, apply='nothing'"):
        assert abs(losses[name] - losses["LocoProp"]) > 5e-3
    for row in rows.values():
        assert row["over passes"] == pytest.approx(row["ms"] - rows["passes"]["ms"], abs=2e-3)
