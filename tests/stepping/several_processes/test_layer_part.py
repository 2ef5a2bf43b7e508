"""Layers that ``fully_shard`` divides among processes, which are threads here, equal those of one."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import threads
import torch
from sharded_cases import CASES as ALL_CASES
from sharded_cases import (
    Case,
    M,
    S,
    batch_bounds,
    loss_of,
    make_optimizer,
    network,
    sharded,
    train,
    whole_tensors,
)
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_locoprop.distributed import communication
from torch_locoprop.distributed.fully_shard import full
from torch_locoprop.solvers import Exact
from torch_locoprop.stepping.several_processes.layer_part import (
    EXCHANGES_WEIGHTS,
    GATHERS_ROWS,
    WHOLE,
)

# Threads of one process: not beside the other tests of a process.
pytestmark = pytest.mark.distributed

MEAN = {"local_reduction": "mean"}
RUNNING = {**S, "solver": Exact(0.9, 2, 0.1)}
MORE = {
    "grouped convolution of S": Case(S, "grouped"),
    "mean of a running closed form": Case({**RUNNING, **MEAN}),
    "mean of M, gate": Case({**M, **MEAN, "gate": True, "lr": 0.5}),
    "one iteration of S": Case({**S, "local_steps": 1}),
}
# The other cases, about loops and passes, are for real processes in tests/distributed.
NAMES = (
    *("M", "S", "closed form", "default", "S in blocks", "running closed form in blocks"),
    *("mean of S, diagonal", "spectral in blocks", "closed form of M", "running closed form"),
    *("preconditioned", "spectral with agreement", "mean", "mean of S", "gate and cap", "maximize"),
    *("averaged", "averaged, S", "averaged, softmax", "averaged, frozen bias"),
    *("averaged, convolution", "averaged, uneven"),
    *("weight decay", "solver of the user's", "outer", "outer, capped", "softmax"),
    *("softmax, closed form", "convolution, M", "convolution, S", "grouped convolution"),
    *("transposed convolution", "frozen bias of M", "discarded", "uneven", "uneven, convolution"),
    *MORE,
)
CASES = {**ALL_CASES, **MORE}
EXCHANGED = ("M", "momentum", "mean", "uneven", "frozen bias of M", "softmax")


def exchanging_weights() -> AbstractContextManager[object]:
    """Let layers exchange weights in each iteration, as if that cost nothing."""
    return patch.object(communication, "by_iterations", lambda *args: communication.Traffic())


def in_threads(
    name: str, steps: int = 3
) -> list[tuple[list[Tensor], dict[int, dict[str, Any]], str]]:
    """Return the weights, the states and the summary of each thread after some steps."""
    case = CASES[name]
    world = case.worlds[0]
    models = [network(case.model) for _ in range(world)]

    def trained(rank: int) -> tuple[list[Tensor], dict[int, dict[str, Any]], str]:
        model = sharded(case, models[rank])
        opt = train(case, model, batch_bounds(case, rank, world), world, steps)
        states = {
            i: {key: e.full_tensor() if isinstance(e, DTensor) else e for key, e in state.items()}
            for i, state in opt.state_dict()["state"].items()
        }
        return whole_tensors(model), states, opt.summary()

    return threads.run(trained, world)


@pytest.mark.parametrize(
    ("name", "exchanged"), [*((n, False) for n in NAMES), *((n, True) for n in EXCHANGED)]
)
def test_parts_of_layers_are_the_layers_of_one_process(name: str, exchanged: bool) -> None:
    case, one = CASES[name], network(CASES[name].model)
    start = [p.detach().clone() for p in one.parameters()]
    opt = train(case, one)
    with exchanging_weights() if exchanged else nullcontext():
        found = in_threads(name)
    for weights, states, _ in found:
        for several, p, before in zip(weights, one.parameters(), start, strict=True):
            torch.testing.assert_close(several, p.detach(), rtol=0, atol=1e-10)
            assert not p.requires_grad or not torch.equal(p, before)
        for i, state in opt.state_dict()["state"].items():
            for key, entry in state.items():
                torch.testing.assert_close(states[i][key], entry, rtol=0, atol=1e-9)


@pytest.mark.parametrize("variant", [M, S], ids=["M", "S"])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize(("sizes", "max_rows"), [((8, 4), 3), ((9, 3), 3), ((8, 4), None)])
def test_rows_that_were_kept_count_for_those_that_were_not(
    variant: dict[str, Any], mean: bool, exchanged: bool, sizes: tuple[int, int], max_rows: Any
) -> None:
    """Of equal rows, ``max_rows`` keeps some that count for all: the problem stays the same.

    In a mean over rows, processes with unequal numbers of rows count equally. In one process, these are
    equal numbers of rows with unequal losses.
    """
    rows = torch.rand(2, 1, 6, generator=torch.Generator().manual_seed(3)).double()
    settings = {**variant, **(MEAN if mean else {})}
    counts = (6, 6) if mean else sizes
    both = [(x.expand(c, 6), w / c) for x, c, w in zip(rows, counts, sizes, strict=True)]
    whole, models = network("smooth"), [network("smooth") for _ in range(2)]
    one = make_optimizer(Case(settings), whole)
    for _ in range(2):
        outputs = whole(torch.cat([x for x, _ in both])).split(counts)
        losses = [w * loss_of(Case(), a, x) for a, (x, w) in zip(outputs, both, strict=True)]
        (losses[0] + losses[1]).backward()  # type: ignore[no-untyped-call]
        one.step()
        one.zero_grad()

    def stepped(rank: int) -> list[Tensor]:
        model = sharded(Case(), models[rank])
        opt = make_optimizer(Case({**settings, "max_rows": max_rows}), model)
        own = rows[rank].expand(sizes[rank], 6)
        for _ in range(2):
            (2 * loss_of(Case(), model(own), own)).backward()  # type: ignore[no-untyped-call]
            opt.step()
            opt.zero_grad()
        return whole_tensors(model)

    with exchanging_weights() if exchanged else nullcontext():
        for found in threads.run(stepped, 2):
            for several, p in zip(found, whole.parameters(), strict=True):
                torch.testing.assert_close(several, p.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "exchanged", "said"),
    [
        ("M", False, GATHERS_ROWS),
        ("M", True, EXCHANGES_WEIGHTS),
        ("S", False, ""),
        ("gate and cap", True, GATHERS_ROWS),  # the value of the objective needs all rows
        ("convolution, M", True, GATHERS_ROWS),
        ("default", False, ""),
        ("closed form", False, ""),
        ("grouped convolution", False, WHOLE),
    ],
)
def test_the_summary_says_what_is_exchanged(name: str, exchanged: bool, said: str) -> None:
    kind = "Conv1d" if "convolution" in name else "Linear"
    with exchanging_weights() if exchanged else nullcontext():
        for _, _, summary in in_threads(name, steps=2):
            (row, *_) = [line for line in summary.splitlines() if f" {kind} " in line]
            notes = [note for note in (GATHERS_ROWS, EXCHANGES_WEIGHTS, WHOLE) if note in row]
            assert notes == ([said] if said else [])


@pytest.mark.filterwarnings("ignore:torch.distributed has several processes")
def test_a_model_that_is_sharded_in_part() -> None:
    """Both processes have the same rows, so that the layers that nothing averages agree as well."""
    one, models = network("smooth"), [network("smooth") for _ in range(2)]
    train(Case(), one)

    def trained(rank: int) -> list[Tensor]:
        fully_shard(models[rank][0])
        train(Case(), models[rank])
        return whole_tensors(models[rank])

    for found in threads.run(trained, 2):
        for several, p in zip(found, one.parameters(), strict=True):
            torch.testing.assert_close(several, p.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "settings", [M, {}, {**M, "output_transfer": "softmax"}], ids=["M", "default", "softmax"]
)
def test_the_state_of_one_process_goes_on_in_several(settings: dict[str, Any]) -> None:
    case, world = Case(settings, "smooth"), 3
    one, models = network(case.model), [network(case.model) for _ in range(world)]
    opt = train(case, one, steps=2)
    start, saved = copy.deepcopy((one.state_dict(), opt.state_dict()))
    train(case, one, steps=2, opt=opt, skip=2)
    for model in models:
        model.load_state_dict(start)

    def trained(rank: int) -> list[Tensor]:
        model = sharded(case, models[rank])
        own = make_optimizer(case, model)
        own.load_state_dict(copy.deepcopy(saved))
        train(case, model, batch_bounds(case, rank, world), world, steps=2, opt=own, skip=2)
        return whole_tensors(model)

    for found in threads.run(trained, world):
        for several, p in zip(found, one.parameters(), strict=True):
            torch.testing.assert_close(several, p.detach(), rtol=0, atol=1e-10)


def test_the_states_of_parts_are_written_in_place() -> None:
    case, models = Case(M, "smooth"), [network("smooth") for _ in range(2)]

    def trained(rank: int) -> None:
        model, part = sharded(case, models[rank]), batch_bounds(case, rank, 2)
        opt = train(case, model, part, 2, steps=1)
        before = {p: dict(state) for p, state in opt.state.items()}
        numbers = [full(entry).clone() for state in before.values() for entry in state.values()]
        train(case, model, part, 2, steps=1, opt=opt, skip=1)
        for p, state in before.items():
            assert state
            assert all(opt.state[p][key] is entry for key, entry in state.items())
        after = [full(entry) for state in before.values() for entry in state.values()]
        assert not any(map(torch.equal, numbers, after))

    threads.run(trained, 2)


def test_the_gate_knows_the_slope_alone_if_a_process_has_no_rows() -> None:
    """All layers take BackProp steps then, so the rows of the others must not count for all.

    The steps are long: with the curvature of the recorded rows some of them would be refused.
    """
    factors, lr, gamma, mu = (1.0, 1.0, -0.1, 1.0, -0.1, 1.0), 5.0, 0.1, 0.9
    models, twin = [network("smooth")[:1] for _ in range(2)], network("smooth")[:1]
    x = 3 * torch.rand(8, 6, generator=torch.Generator().manual_seed(3)).double()
    options = {**S, "solver": "momentum", "momentum": mu, "lr": lr, "gamma": gamma, "gate": True}

    def stepped(rank: int) -> list[tuple[list[Tensor], list[Tensor]]]:
        model, found = models[rank], []
        fully_shard(model)
        opt = make_optimizer(Case(options), model)
        own = x[: 0 if rank else 8]
        for factor in factors:
            (2 * factor * 0.01 * model(own).square().sum()).backward()
            opt.step()
            opt.zero_grad()
            momenta = [full(opt.state[p]["momentum"]).clone() for p in model.parameters()]
            found.append((whole_tensors(model), momenta))
        return found

    of_threads = threads.run(stepped, 2)
    momenta, closed = [torch.zeros_like(p) for p in twin.parameters()], []
    for step, factor in enumerate(factors):
        loss = factor * 0.01 * twin(x).square().sum()
        given = [gamma * g for g in torch.autograd.grad(loss, list(twin.parameters()))]
        new = [mu * m + g for m, g in zip(momenta, given, strict=True)]
        closed.append(sum(float((g * m).sum()) for g, m in zip(given, new, strict=True)) < 0)
        momenta = [torch.zeros_like(m) for m in new] if closed[-1] else new
        with torch.no_grad():
            for p, m in zip(twin.parameters(), given if closed[-1] else new, strict=True):
                p.sub_(lr * m)
        own = [*twin.parameters(), *momenta]
        for found in of_threads:
            of_step = [*found[step][0], *found[step][1]]
            for several, one in zip(of_step, own, strict=True):
                torch.testing.assert_close(several, one.detach(), rtol=0, atol=1e-10)
    assert True in closed
    assert False in closed[1:]
