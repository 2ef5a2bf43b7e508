"""The scripts about the preconditioned solver and the product with the inverse."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_graphs import Emulated, emulate
from torch import Tensor, nn

from benchmarks import inverse_products, preconditioned_mnist
from benchmarks.preconditioned_mnist import (
    OF_UNCHECKED,
    SETTINGS,
    UNCHECKED,
    build,
    build_unchecked,
    key_of,
    polar,
    trial,
)
from torch_locoprop import LocoProp, TrainingStep
from torch_locoprop.solvers import AveragedPreconditioned
from torch_locoprop.study.training.config import RunConfig

ALONE = trial("plain", 3, gamma=0.02, across=0.0, averaging=0.0, every=1)
RECORDED = [
    polar(2, 0.015, 0.1),
    polar(1, 0.015, 0.1, variant="locoprop-s"),
    trial("rows", 1, lr=0.03),
    ALONE,
]


def summed(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, y, reduction="sum") / len(y)


def losses(settings: dict[str, Any], optimizer: str = "averaged", steps: int = 25) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 12)).double()
    opt = (
        build(model, {**SETTINGS, **settings})
        if optimizer == "averaged"
        else LocoProp(
            model,
            variant="locoprop-m",
            solver="preconditioned",
            output_transfer="sigmoid",
            gamma=settings["gamma"],
            local_steps=settings["local_steps"],
        )
    )
    step = TrainingStep(model, summed, opt)
    numbers = torch.Generator().manual_seed(1)
    found = []
    for i in range(steps):
        x = torch.rand(20, 12, generator=numbers, dtype=torch.float64)
        for group in opt.param_groups:
            group["lr"] = settings.get("lr", 1.0) * (1 - i / steps)
        found.append(step(x, x).item())
    return found


def test_without_averages_it_is_the_solver_of_the_library() -> None:
    found = losses(ALONE)
    assert found == pytest.approx(losses(ALONE, "library"), rel=1e-9)
    assert found[-1] < found[0]


def test_without_a_check_runs_have_the_solver_of_the_library() -> None:
    model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 12))
    for settings in UNCHECKED:
        opt = build_unchecked(model, {**OF_UNCHECKED, **settings, "weight_decay": 1e-5})
        group = opt.param_groups[0]
        expected = AveragedPreconditioned(every=settings.get("every", 10))
        assert opt._components.solver(group) == expected
        assert group["lr"] == settings.get("lr", expected.defaults["lr"])
        assert (group["variant"], group["weight_decay"]) == ("locoprop-m", 1e-5)
    assert key_of({}, OF_UNCHECKED) == "defaults"
    assert key_of({"every": 20}, OF_UNCHECKED) == "every=20"


def test_without_a_check_the_first_setting_has_all_seeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And one of each period is timed, as LocoProp-M with RMSProp is."""
    trained: list[tuple[str, dict[str, Any]]] = []
    timed: list[dict[str, Any]] = []
    monkeypatch.setattr(
        preconditioned_mnist, "train_all", lambda runs, *_: trained.extend(runs) or []
    )
    monkeypatch.setattr(
        preconditioned_mnist, "step_milliseconds", lambda values: timed.append(values) or 1.0
    )
    monkeypatch.setattr(preconditioned_mnist, "steps_of", lambda values: 6000)
    arguments = ["", "--only", "unchecked", "--seeds", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    preconditioned_mnist.main()
    assert [name for name, _ in trained] == [
        *("defaults-s0", "defaults-s1", "lr=0.02-s0", "lr=0.01-s0", "every=20-s0", "lr=0.045-s0"),
        *("locoprop-m-s0", "locoprop-m-s1"),
    ]
    for name, values in trained:
        method = "locoprop-m" if name.startswith("locoprop-m") else "locoprop-averaged"
        assert values["method"] == method
        assert name.endswith(f"-s{values['seed']}")
        build = RunConfig(**values).build_optimizer
        assert isinstance(build(nn.Sequential(nn.Linear(3, 2))), LocoProp)
    assert [(each["method"], each["settings"].get("every")) for each in timed] == [
        ("locoprop-averaged", None),
        ("locoprop-averaged", 20),
        ("locoprop-m", None),
    ]
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert saved["seconds of all steps"]["unchecked, every 10"] == pytest.approx(6.0)


@pytest.mark.parametrize("settings", RECORDED)
def test_its_steps_can_be_recorded(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = losses(settings)
    emulate(monkeypatch)
    assert losses(settings) == pytest.approx(expected, rel=1e-9)
    assert Emulated.replayed > 10


def test_errors_of_products_with_the_inverse() -> None:
    """Three products are closer to float64 than one, and polar factors in bfloat16 do not show it."""
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(200, 65, generator=numbers) * torch.logspace(0, -1, 65) + 0.3
    gram = x.mT @ x / 200
    gram /= gram.diagonal().mean()
    inverse = torch.linalg.inv(gram + 0.02 * torch.eye(65))
    rows = inverse_products.of_layer(torch.randn(40, 200, generator=numbers) @ x, inverse)["rows"]
    errors = {name: row["product"] for name, row in rows.items()}
    assert errors["exact"] == 0
    assert errors["float32"] < errors["3 x bf16"] < errors["tf32"]
    assert errors["3 x tf32"] < errors["3 x bf16"]
    assert errors["3 x fp16"] < errors["3 x bf16"]
    for name in ("float32", "3 x tf32", "3 x fp16"):
        assert rows[name]["bf16"] == pytest.approx(rows["exact"]["bf16"], rel=0.05)
