"""The scripts about the preconditioned solver and the product with the inverse."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_graphs import Emulated, emulate
from torch import Tensor, nn

from benchmarks import inverse_products
from benchmarks.preconditioned_mnist import SETTINGS, build, polar, trial
from torch_locoprop import LocoProp, TrainingStep

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
