"""If the model moves to another device or precision, the optimizer's state follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import cross_entropy, weights
from promises.loops.plain import data, distance, each_model, each_variant, loco, make
from torch import Tensor, nn

from torch_locoprop.solvers import Exact
from torch_locoprop.stepping.fallback_optimizer import move_state

pytestmark = pytest.mark.filterwarnings("ignore:(momentum|gamma) has no effect with solver")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"solver": "adam", "eps": 1e-3},
    {"solver": Exact(decay=0.9, every=2, damping=0.1), "lr": 0.1},
    {"solver": "preconditioned", "lr": 0.5, "gamma": 0.05},
    {"solver": "preconditioned-averaged"},
    {"variant": "natural-s", "lr": 1e-4},
]
WITH_OUTER = {"apply": "gradient", "outer": lambda ps: torch.optim.AdamW(ps, lr=1e-3)}


def with_fallback() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def moved(model: nn.Module, where: list[Any], kind: str = "linear", **options: Any) -> list[Tensor]:
    """Return the weights after two steps in each of the places, moved back."""
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


@pytest.fixture
def _swapping() -> Iterator[None]:
    """Change dtypes by ``torch.utils.swap_tensors`` instead of ``.data =``."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@each_variant
@each_model
@pytest.mark.usefixtures("_swapping")
def test_another_precision_by_swapping_tensors(variant: str, kind: str) -> None:
    places = [torch.float64, torch.float32, torch.float64]
    found = moved(make(kind), places, kind, variant=variant)
    stayed = moved(make(kind), [torch.float64] * 3, kind, variant=variant)
    assert 0 < distance(found, stayed) < 1e-5


@pytest.mark.parametrize("swap", [False, True])
def test_another_precision_between_backward_and_step(
    swap: bool, request: pytest.FixtureRequest
) -> None:
    if swap:
        request.getfixturevalue("_swapping")
    results = []
    for early in (True, False):
        model = make()
        opt = loco(model)
        x, y = data("linear", 0)
        cross_entropy(model(x), y).backward()
        if early:
            model.float()
        opt.step()
        model.float()
        results.append([w.double() for w in weights(model)])
    assert distance(*results) < 1e-5


@pytest.mark.parametrize("options", OPTIONS, ids=lambda own: ", ".join(own))
def test_the_state_of_every_solver_follows(options: dict[str, Any]) -> None:
    places = [torch.float64, torch.float32, torch.float64]
    found = moved(make(), places, **options)
    stayed = moved(make(), [torch.float64] * 3, **options)
    tolerance = 1e-2 if options.get("variant") == "natural-s" else 1e-5  # other labels are drawn
    assert 0 < distance(found, stayed) < tolerance


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("options", [*OPTIONS, WITH_OUTER], ids=lambda own: ", ".join(own))
@pytest.mark.parametrize("kind", ["linear", "conv", "fallback"])
def test_another_device(kind: str, options: dict[str, Any]) -> None:
    def model() -> nn.Module:
        return with_fallback() if kind == "fallback" else make(kind)

    rows = "conv" if kind == "conv" else "linear"
    found = moved(model(), ["cpu", "cuda", "cpu"], rows, **options)
    stayed = moved(model(), ["cpu", "cpu", "cpu"], rows, **options)
    tolerance = 1e-2 if options.get("variant") == "natural-s" else 1e-9
    assert distance(found, stayed) < tolerance


def test_the_state_of_other_optimizers_follows() -> None:
    """The meta device replaces an accelerator; step counts stay on the host."""
    weight = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.AdamW([weight])
    optimizer.state[weight] |= {"step": torch.tensor(4.0), "exp_avg": torch.zeros(3)}
    move_state(optimizer)
    devices = {name: value.device.type for name, value in optimizer.state[weight].items()}
    assert devices == {"step": "cpu", "exp_avg": "meta"}


@pytest.mark.parametrize("options", [{}, WITH_OUTER], ids=["fallback", "outer"])
def test_they_are_asked_to_follow_in_every_step(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    place = "outer_optimizer" if options else "fallback_optimizer"
    monkeypatch.setattr(f"torch_locoprop.stepping.{place}.move_state", asked.append)
    model = with_fallback()
    opt = loco(model, fallback=lambda ps: torch.optim.AdamW(ps, lr=1e-3), **options)
    cross_entropy(model(data()[0]), data()[1]).backward()
    opt.step()
    assert asked == (opt._outer.optimizers if opt._outer else [opt._fallback])


def test_a_state_keeps_the_precision_its_optimizer_chose() -> None:
    """For example moments in float32 for weights in bfloat16."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["moment"] = torch.zeros(3)
    move_state(optimizer)
    assert optimizer.state[weight]["moment"].dtype == torch.float32


def test_parameters_that_were_replaced_are_told() -> None:
    """``to`` keeps the parameters, except with PyTorch's option to replace them."""
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
