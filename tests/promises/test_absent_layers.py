"""A layer that is absent from some steps renews what its solver keeps in the next one it is in."""

import copy
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import batch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_locoprop import LocoProp
from torch_locoprop.baselines import KFAC
from torch_locoprop.solvers import Exact, Spectral

EXACT = {"variant": "locoprop-s", "solver": Exact(decay=0.9, every=10, damping=0.1)}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "spectral": {"solver": Spectral(every=10)},
    "exact": EXACT,
    "in blocks": {"gram": "diagonal"},
    "averaged": {"solver": "preconditioned-averaged"},
}


class Heads(nn.Module):
    """A body with a head for even steps and one for odd steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(6, 5), nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        self.double()

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.body(x)))  # type: ignore[no-any-return]


def step(model: Heads, opt: Optimizer, number: int) -> None:
    loss = (model(batch(9, 6, seed=number), number % 2) - batch(9, 3, seed=99)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    opt.step()
    opt.zero_grad()


def inverses(model: Heads, opt: Optimizer, head: int, name: str, steps: int) -> list[Tensor]:
    """Return what a head keeps after each of its steps."""
    found = []
    for number in range(steps):
        step(model, opt, number)
        if number % 2 == head:
            found.append(opt.state[model.heads[head].weight][name].clone())
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_every_head_renews_its_inverse(name: str) -> None:
    for head in (0, 1):
        model = Heads()
        opt = LocoProp(model, output_transfer="linear", **SETTINGS[name])
        found = inverses(model, opt, head, "inverse", 44)
        renewed = [not torch.equal(*pair) for pair in pairwise(found)]
        late = [2 * (i + 1) + head for i, each in enumerate(renewed) if each and i > 4]
        assert late == [20 + head, 30 + head, 40 + head]


def test_every_head_renews_its_inverse_with_kfac() -> None:
    model = Heads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = KFAC(model, every=10, output_transfer="linear", damping=0.1)
    found = inverses(model, opt, 1, "inverse_inputs", 44)
    renewed = [not torch.equal(*pair) for pair in pairwise(found)]
    assert [2 * i + 3 for i, each in enumerate(renewed) if each and i > 8] == [21, 31, 41]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_run_renews_in_the_same_step(name: str) -> None:
    """After 21 steps the second head has missed the renewal of step 20."""
    model, other = Heads(), Heads()
    opt, loaded = (
        LocoProp(each, output_transfer="linear", **SETTINGS[name]) for each in (model, other)
    )
    for number in range(21):
        step(model, opt, number)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    for number in range(21, 26):
        step(model, opt, number)
        step(other, loaded, number)
        assert all(map(torch.equal, model.parameters(), other.parameters()))
