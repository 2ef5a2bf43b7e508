"""The scripts about the preconditioned solver and the product with the inverse."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_graphs import Emulated, emulate
from torch import Tensor, nn

from benchmarks import inverse_products
from benchmarks.preconditioned_mnist import SETTINGS, build, polar, trial
from torch_locoprop import LocoProp, TrainingStep
from torch_locoprop.solvers import preconditioned

ALONE = trial("plain", 3, gamma=0.02, across=0.0, averaging=0.0, every=1)
RECORDED = [
    polar(2, 0.015, 0.1),
    polar(1, 0.015, 0.1, variant="locoprop-s"),
    trial("rows", 1, lr=0.03),
    trial("rows", 1, lr=0.03, check=False),
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


def test_without_a_check_a_step_is_one_that_the_check_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preconditioned, "CHECKS", 1)  # otherwise longer steps are tried too
    settings = {**ALONE, "local_steps": 1, "gamma": 1e-3, "damping": 0.3}
    found = losses({**settings, "check": False})
    assert found == pytest.approx(losses(settings), rel=1e-9)
    assert found[-1] < found[0]


def test_without_a_check_a_step_is_the_formula() -> None:
    """Also after step 10, the last of these to renew C and the slopes."""
    gamma, damping, averaging = 0.5, 0.1, 0.8
    given = {"gamma": gamma, "damping": damping, "averaging": averaging, "across": 0.0}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    expected = copy.deepcopy(model)
    opt = build(model, {**SETTINGS, **trial("plain", 1, check=False), **given})
    averages: dict[nn.Module, list[Tensor]] = {}
    for i in range(14):
        x, y = torch.randn(30, 5).double(), torch.rand(30, 3).double()
        opt.zero_grad()
        summed(model(x), y).backward()
        opt.step()
        first, last = expected[0], expected[2]
        expected.zero_grad()
        hidden = first(x).tanh()
        out = last(hidden)
        summed(out, y).backward()
        of_tanh, of_sigmoid = 1 - hidden.square(), out.sigmoid() * (1 - out.sigmoid())
        for layer, inputs, slope, largest in (
            (first, x, of_tanh, 1),
            (last, hidden, of_sigmoid, 0.25),
        ):
            rows = F.pad(inputs.detach(), (0, 1), value=1.0)
            new = [rows.mT @ rows / 30, slope.detach().mean(0).clamp_min(0.4 * largest)]
            if i <= 10:
                past = averages.get(layer, new)
                averages[layer] = [
                    averaging * a + (1 - averaging) * b for a, b in zip(past, new, strict=True)
                ]
            C, h = averages[layer]
            inverse = torch.linalg.inv(C + damping * C.diagonal().mean() * torch.eye(len(C)).to(C))
            gradient = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
            moved = -gamma * gradient @ inverse / h[:, None]
            with torch.no_grad():
                layer.weight += moved[:, :-1]
                layer.bias += moved[:, -1]
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_without_a_check_steps_between_renewals_record_no_rows() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    opt = build(model, {**SETTINGS, **trial("rows", 1, lr=0.01, check=False)})
    recorded = []
    for _ in range(22):
        opt.zero_grad()
        summed(model(torch.randn(6, 5)), torch.rand(6, 3)).backward()
        recorded.append([call.x.numel() for layer in opt._layers for call in layer.calls])
        opt.step()
    assert [i for i, rows in enumerate(recorded) if any(rows)] == [*range(11), 20]


def test_without_a_check_there_is_one_iteration() -> None:
    with pytest.raises(ValueError, match="local_steps=2"):
        build(nn.Linear(2, 2), {**SETTINGS, **trial("rows", 2, check=False)})


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
