"""A layer kind that the library does not have: one class and one registration, made in this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.layers import base, layer_kind
from torch_locoprop.layers.base import own_forward, serves, unusual_tensors
from torch_locoprop.layers.linear import LinearLayer


class Difference(nn.Module):
    """``a = (here − there) Wᵀ + b``."""

    def __init__(self, n: int, d: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(d, n)), nn.Parameter(torch.randn(d))

    def forward(self, here: Tensor, there: Tensor) -> Tensor:
        return nn.functional.linear(here - there, self.weight, self.bias)


class DifferenceLayer(LinearLayer):
    """Its rows are differences, and its linear map is that of nn.Linear."""

    kind = "Difference"
    arguments = ("here", "there")

    def refuses(self, module: nn.Module) -> str | None:
        return own_forward(module, Difference.forward) or unusual_tensors(module)

    def collect(self, inputs: Sequence[Tensor], outputs: Sequence[Any], like: Tensor) -> Tensor:
        n = like.shape[1]
        return super().collect([x[..., :n] - x[..., n:] for x in inputs], outputs, like)


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_FACTORIES", dict(base._FACTORIES))
    serves(Difference)(lambda module: DifferenceLayer())


class Net(nn.Module):
    def __init__(self, explicit: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 4), Difference(4, 5), nn.Linear(5, 3)
        self.plain = nn.Linear(4, 5) if explicit else None
        if self.plain is not None:
            self.plain.load_state_dict(self.middle.state_dict())
            self.middle = None
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        here, there = torch.tanh(self.first(x)), x[..., :4]
        a = self.plain(here - there) if self.plain else self.middle(here, there=there)
        return self.last(torch.relu(a))


def trained(model: nn.Module, call: Any, **options: Any) -> tuple[list[Tensor], LocoProp]:
    opt = LocoProp(model, lr=1e-3, output_transfer="sigmoid", **options)
    for seed in range(3):
        x = batch(8, 6, seed=seed)
        cross_entropy(call(x), x[:, :3]).backward()
        opt.step()
        opt.zero_grad()
    named = {n.replace("plain", "middle"): p.detach() for n, p in model.named_parameters()}
    return [named[name] for name in sorted(named)], opt


OPTIONS: list[dict[str, Any]] = [
    {},
    {"variant": "locoprop-s"},
    {"variant": "locoprop-s", "solver": "exact"},
    {"variant": "pocoprop-m"},
    {"variant": "natural-s"},
    {"max_rows": 5},
]


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_kind_that_was_just_registered_trains(options: dict[str, Any]) -> None:
    explicit, model = Net(explicit=True), Net(explicit=False)
    found, opt = trained(model, model, **options)
    assert_close(found, trained(explicit, explicit, **options)[0])
    assert any(line.split()[:2] == ["middle", "Difference"] for line in opt.summary().splitlines())


@pytest.mark.usefixtures("_registered")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_kind_that_was_just_registered_compiles() -> None:
    torch.compiler.reset()
    explicit, model = Net(explicit=True), Net(explicit=False)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(trained(model, call)[0], trained(explicit, explicit)[0], 1e-11)
    torch.compiler.reset()


def test_without_the_registration_it_falls_back() -> None:
    assert layer_kind(Difference(4, 5)) is None
    with pytest.warns(UserWarning, match="AdamW"):
        opt = LocoProp(Net(explicit=False))
    row = next(line for line in opt.summary().splitlines() if line.startswith("middle"))
    assert "no local problem for this kind of module" in row
