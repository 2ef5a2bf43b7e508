"""``maximize=True`` reaches the optimizer that is made for parameters without a local problem."""

import warnings

import pytest
import torch
from cases import batch
from torch import nn

from torch_locoprop import LocoProp


class Recurrent(nn.Module):
    """A norm, which AdamW trains, a recurrent module, whose matrices take spectral steps, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.last = nn.LayerNorm(6), nn.GRU(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.norm(x))[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("settings", [{}, {"preset": "paper-s"}], ids=["default", "paper-s"])
def test_all_parameters_go_the_same_way(settings: dict[str, str], maximize: bool) -> None:
    torch.manual_seed(0)
    model = Recurrent().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = LocoProp(model, maximize=maximize, output_transfer="linear", **settings)
    for group in opt.param_groups:
        group["weight_decay"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    model(batch(7, 4, 6)).square().sum().backward()
    opt.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.grad is not None
        rise = float(((p.detach() - old) * p.grad).sum())
        assert rise > 0 if maximize else rise < 0
