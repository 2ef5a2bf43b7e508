"""A local solution that is not finite never reaches the weights or the state."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import nn

from torch_locoprop import LocoProp
from torch_locoprop.solvers import Exact

pytestmark = pytest.mark.filterwarnings("ignore:momentum has no effect with solver")

RUNNING = Exact(decay=0.9, every=2)


PRECONDITIONED = ("preconditioned", "preconditioned-averaged")


@pytest.mark.parametrize("solver", ["sgd", "rmsprop", "adam", "exact", *PRECONDITIONED, RUNNING])
@pytest.mark.parametrize("first", [True, False])
def test_a_layer_keeps_its_weights_and_state(solver: str | Exact, first: bool) -> None:
    """Layer 2 gets a gradient that is not finite; the others train, and layer 2 does later."""
    model = network()
    opt = LocoProp(model, lr=1e-2, momentum=0.9, solver=solver, output_transfer="sigmoid")

    def backward(seed: int) -> None:
        opt.zero_grad()
        x = batch(8, 6, seed=seed)
        cross_entropy(model(x), x[:, :3]).backward()

    if not first:
        backward(0)
        opt.step()
    before = weights(model)
    state = {k: v.clone() for k, v in opt.state[model[2].weight].items()}
    backward(1)
    model[2].weight.grad[0, 0] = torch.inf
    with pytest.warns(UserWarning, match=r"local solution of '2' was not finite") as record:
        opt.step()
    assert len(record) == 1
    after = weights(model)
    assert_close(after[2:4], before[2:4], 0.0)
    assert opt.state[model[2].weight].keys() == state.keys()
    assert all(torch.equal(opt.state[model[2].weight][k], v) for k, v in state.items())
    assert not torch.equal(after[0], before[0])
    assert opt.skipped_updates == {"0": 0, "2": 1, "4": 0}
    assert "1 updates skipped as not finite" in opt.summary()

    backward(2)
    model[2].weight.grad[0, 0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # counted, without another warning
        opt.step()
    assert opt.skipped_updates["2"] == 2
    backward(3)
    opt.step()
    assert not torch.equal(weights(model)[2], before[2])
    assert all(w.isfinite().all() for w in weights(model))


def test_a_solution_that_overflows_on_the_way() -> None:
    model = network("relu").float()
    opt = LocoProp(model, lr=1e18, solver="sgd", gamma=1e18, variant="locoprop-s")
    before = weights(model)
    x = batch(8, 6).float()
    cross_entropy(model(x), x[:, :3]).backward()
    with pytest.warns(UserWarning, match="A smaller lr or gamma usually helps"):
        opt.step()
    assert_close(weights(model), before, 0.0)
    assert sum(opt.skipped_updates.values()) == 3


def test_counts_survive_copies_and_new_groups() -> None:
    model = network()
    opt = LocoProp(model, lr=1e-2, output_transfer="sigmoid")
    x = batch(8, 6)
    cross_entropy(model(x), x[:, :3]).backward()
    model[2].weight.grad[0, 0] = torch.nan
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    assert copy.deepcopy(opt).skipped_updates == {"0": 0, "2": 1, "4": 0}
    model.append(nn.Linear(3, 3).double())
    opt.add_param_group({"params": model[-1].parameters()})
    assert opt.skipped_updates == {"0": 0, "2": 1, "4": 0, "5": 0}
