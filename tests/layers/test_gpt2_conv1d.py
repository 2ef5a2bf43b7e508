"""GPT-2's Conv1D is nn.Linear with its weight transposed: every step moves both alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BACKPROP_VARIANTS, FIRST_ORDER, assert_close, batch, cross_entropy, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.layers import layer_kind


def stand_in() -> type[nn.Module]:
    """A class of the same name and meaning, for where transformers is not installed."""

    class Conv1D(nn.Module):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.nx = nf, nx
            self.weight, self.bias = (
                nn.Parameter(torch.empty(nx, nf)),
                nn.Parameter(torch.empty(nf)),
            )

        def forward(self, x: Tensor) -> Tensor:
            size_out = (*x.size()[:-1], self.nf)
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)

    Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
    return Conv1D


@pytest.fixture(params=["stand-in", "transformers"])
def conv1d(request: pytest.FixtureRequest) -> Any:
    if request.param == "stand-in":
        return stand_in()
    return pytest.importorskip("transformers.pytorch_utils", reason="needs transformers").Conv1D


def pair(conv1d: Any) -> tuple[nn.Module, nn.Module]:
    """The same network of nn.Linear and of Conv1D."""
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    transposed = nn.Sequential(conv1d(5, 6), nn.Tanh(), conv1d(4, 5), nn.ReLU(), conv1d(3, 4))
    with torch.no_grad():
        for one, other in zip(linear.parameters(), transposed.parameters(), strict=True):
            other.copy_(one.T if one.dim() == 2 else one)
    return linear.double(), transposed.double()


OPTIONS: list[dict[str, Any]] = [
    *({"variant": variant} for variant in (*BACKPROP_VARIANTS, "natural-s")),
    *({"solver": solver} for solver in FIRST_ORDER),
    {"variant": "locoprop-s", "solver": "exact"},
    *({"preset": preset, "weight_decay": 0.1} for preset in ("spectral", "general")),
    {"regularizer": "l2", "weight_decay": 0.1},
    {"cap": 0.01, "gate": True},
    {"apply": "gradient", "outer": lambda params: torch.optim.AdamW(params, lr=1e-2)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda own: ", ".join(own))
def test_a_step_is_that_of_the_linear_layer(conv1d: Any, options: dict[str, Any]) -> None:
    models = pair(conv1d)
    for model in models:
        given = {"lr": 1e-3, "momentum": 0.9, "output_transfer": "sigmoid", **options}
        opt = LocoProp(model, **given)
        for seed in range(3):
            x = batch(2, 4, 6, seed=seed)
            cross_entropy(model(x).flatten(0, 1), x[..., :3].flatten(0, 1)).backward()
            opt.step()
            opt.zero_grad()
    linear, transposed = (weights(model) for model in models)
    assert_close([t.T if t.dim() == 2 else t for t in transposed], linear)
    row = opt.summary().splitlines()[2].split()
    assert row[1:3] == ["Conv1D", "6×5"]


def test_a_forward_of_its_own_falls_back() -> None:
    class Doubled(stand_in()):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    kind = layer_kind(module := Doubled(3, 4))
    assert kind is not None
    assert kind.refuses(module) == "Doubled has a forward of its own"


def test_another_class_of_that_name_is_not_taken_for_it() -> None:
    other = stand_in()
    other.__module__ = "elsewhere"
    assert layer_kind(other(3, 4)) is None
