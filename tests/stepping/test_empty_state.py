"""States without content have the entries and shapes that steps leave."""

from __future__ import annotations

from typing import Any

import pytest
import threads
import torch
from sharded_cases import (
    AVERAGED,
    CASES,
    Case,
    M,
    S,
    batch_bounds,
    make_optimizer,
    network,
    sharded,
    train,
    whole_tensors,
)
from torch import nn
from torch.distributed.tensor import DTensor

from torch_locoprop import LocoProp
from torch_locoprop.solvers import Exact

# Threads of one process: not beside the other tests of a process.
pytestmark = pytest.mark.distributed

Form = dict[str, tuple[Any, ...]]
FISHER = {**S, "regularizer": "fisher"}
ONE_PROCESS = {
    "M": Case(M),
    "adam": Case({**M, "solver": "adam"}),
    "natural": Case({**S, "variant": "natural-s"}),
    "averaged": Case(AVERAGED),
    "fisher": Case(FISHER),
    "fisher of groups": Case(FISHER, "grouped"),
    "fisher of a bias": Case(FISHER, order="frozen weight"),
    "fisher of a bias of groups": Case(FISHER, "grouped", order="frozen weight"),
    "fisher of a bias of groups of three": Case(FISHER, "three", order="frozen weight"),
    "in blocks": Case({**S, "gram": "block", "block_size": 4, "solver": Exact(0.9, 2, 0.1)}),
}
SHARDED = (
    *("M", "momentum", "softmax", "running closed form", "spectral", "spectral in blocks"),
    *("averaged", "averaged, softmax"),
    *("grouped convolution", "transposed convolution", "frozen bias of M"),
)


def model_of(case: Case) -> nn.Sequential:
    """Return a model of the case; "three" has two groups of three outputs."""
    if case.model != "three":
        return network(case.model)
    torch.manual_seed(0)
    images = nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 6, 2, groups=2), nn.Tanh(), nn.Flatten()
    return nn.Sequential(*images, nn.Linear(12, 6)).double()


def forms(model: nn.Module, opt: LocoProp) -> list[Form]:
    """Return for each parameter the shape and dtype of each entry, and how processes divide it."""
    layers = {p for layer in opt._layers for p in layer.given}
    return [
        {
            key: (entry.shape, entry.dtype, entry.to_local().shape, entry.placements)
            if isinstance(entry, DTensor)
            else (entry.shape, entry.dtype)
            for key, entry in opt.state[p].items()
        }
        for p in model.parameters()
        if p in layers
    ]


def take_empty_step(model: nn.Module, opt: LocoProp) -> None:
    """Take the step that tools take to have a state."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    rates = [group["lr"] for group in opt.param_groups]
    for group in opt.param_groups:
        group["lr"] = 0.0
    opt.step()
    for group, lr in zip(opt.param_groups, rates, strict=True):
        group["lr"] = lr
    opt.zero_grad()


def compare(case: Case, one: nn.Sequential, other: nn.Sequential, part: slice, world: int) -> None:
    """Compare the states without content with those after a step, and the steps after both."""
    if case.order == "frozen weight":
        for model in (one, other):
            for module in model:
                if hasattr(module, "weight") and not isinstance(module, nn.LayerNorm):
                    module.weight.requires_grad_(False)
    opt = train(case, one, steps=0)
    take_empty_step(one, opt)
    empty = forms(one, opt)
    ordinary = train(case, other, part, world, steps=1)
    assert empty == forms(other, ordinary)
    assert any(empty)
    train(case, one, part, world, steps=1, opt=opt)
    whole = zip(one.parameters(), whole_tensors(one), whole_tensors(other), strict=True)
    assert all(torch.equal(a, b) for p, a, b in whole if p in opt._plan.group_of)


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_they_have_the_form_of_those_after_a_step(name: str) -> None:
    case = ONE_PROCESS[name]
    compare(case, model_of(case), model_of(case), slice(None), 1)


@pytest.mark.parametrize("name", SHARDED)
def test_processes_divide_them_as_those_after_a_step(name: str) -> None:
    case, world = CASES[name], 3
    models = [(network(case.model), network(case.model)) for _ in range(world)]

    def compared(rank: int) -> None:
        one, other = (sharded(case, model) for model in models[rank])
        compare(case, one, other, batch_bounds(case, rank, world), world)

    threads.run(compared, world)


def test_a_solver_of_the_users_that_hides_its_state_is_named() -> None:
    class Hidden(Exact):
        name = "hidden"
        empty_states = Exact.__mro__[1].empty_states

    model = network("smooth")
    opt = make_optimizer(Case({**S, "solver": Hidden(0.9, 2, 0.1)}), model)
    with pytest.warns(UserWarning, match="asks for the state of solver 'hidden'"):
        take_empty_step(model, opt)
