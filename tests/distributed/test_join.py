"""Processes with unequal numbers of batches, inside of DDP's context ``Join``, are one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from processes import run
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from torch_locoprop import LocoProp
from torch_locoprop.stepping.several_processes import divided_polar

ROWS = 8  # of each process in a batch
BATCHES = (2, 4)  # of each process
ITERATIONS = {"lr": 1e-3, "gamma": 2.0, "local_steps": 4}


@dataclass(frozen=True)
class Case:
    """How the network is trained."""

    settings: dict[str, Any] = field(default_factory=dict)
    convolution: bool = False
    norm: bool = False  # with a layer that the fallback trains
    by_all: bool = True  # gradients are divided by the number of all processes
    passes: int = 1  # of each step
    schedule: bool = False


M = {"variant": "locoprop-m", **ITERATIONS}
S = {"variant": "locoprop-s", **ITERATIONS}
CASES = {
    "M": Case(M),
    "M, by processes with a batch": Case(M, by_all=False),
    "M, means": Case({**M, "local_reduction": "mean"}, by_all=False),
    "M, convolution": Case(M, convolution=True),
    "M, scheduled": Case(M, schedule=True),
    "M, accumulated": Case(M, passes=2),
    "S": Case(S),
    "S, convolution": Case(S, convolution=True),
    "S, some rows": Case({**S, "max_rows": 5}),
    "PocoProp": Case({"variant": "pocoprop-m", **ITERATIONS, "gamma": 0.5}),
    "closed form": Case({"variant": "locoprop-s", "solver": "exact", "lr": 1e-2}),
    "closed form of M": Case({"solver": "exact", "lr": 1e-2, "variant": "locoprop-m"}),
    "preconditioned": Case({"solver": "preconditioned", "lr": 0.5}, by_all=False),
    "averaged": Case({"solver": "preconditioned-averaged"}, by_all=False),
    "spectral": Case(),
    "spectral, convolution": Case(convolution=True),
    "fallback": Case({**M, "fallback": lambda own: SGD(own, lr=0.1, momentum=0.9)}, norm=True),
    "outer": Case({**M, "apply": "gradient", "outer": lambda own: SGD(own, lr=0.1)}),
}


def network(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    first: list[nn.Module] = [nn.Linear(6, 8)]
    if case.convolution:
        first = [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten()]
    norm = [nn.LayerNorm(8)] if case.norm else []
    return nn.Sequential(*first, *norm, nn.Tanh(), nn.Linear(8, 6)).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.rand(ROWS, 6, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def optimizer(case: Case, model: nn.Module) -> LocoProp:
    return LocoProp(model, output_transfer="sigmoid", **case.settings)


def in_one_process(case: Case) -> list[Tensor]:
    model = network(case)
    opt = optimizer(case, model)
    schedule = ExponentialLR(opt, 0.5 if case.schedule else 1.0)
    for step in range(max(BATCHES)):
        ranks = [rank for rank, number in enumerate(BATCHES) if step < number]
        x = torch.cat([batch(step, rank) for rank in ranks])
        loss = binary_cross_entropy_with_logits(model(x), x)
        part = len(ranks) / len(BATCHES) if case.by_all else 1.0
        (part * loss).backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()
        schedule.step()
    return [p.detach() for p in model.parameters()]


def train_unevenly(case: Case, rank: int, batches: tuple[int, ...]) -> tuple[nn.Module, LocoProp]:
    model = network(case)
    wrapped = DistributedDataParallel(model)
    opt = optimizer(case, model)
    schedule = ExponentialLR(opt, 0.5 if case.schedule else 1.0)
    with Join([wrapped, opt], divide_by_initial_world_size=case.by_all):
        for step in range(batches[rank]):
            for i, x in enumerate(batch(step, rank).chunk(case.passes)):
                wrapped.require_backward_grad_sync = i == case.passes - 1  # what no_sync() sets
                loss = binary_cross_entropy_with_logits(wrapped(x), x) / case.passes
                loss.backward()  # type: ignore[no-untyped-call]
            opt.step()
            opt.zero_grad()
            schedule.step()
    return model, opt


def kept(model: nn.Module, opt: LocoProp) -> dict[str, Any]:
    """Return what has to be equal, bit for bit, in all processes."""
    return {"weights": [*model.parameters()], "states": opt.state_dict()["state"]}


def unevenly(rank: int, folder: Path) -> None:
    found: dict[str, Any] = {}
    with patch.object(divided_polar, "PAYS_FROM", 1):
        for name, case in CASES.items():
            found[name] = kept(*train_unevenly(case, rank, BATCHES))
        found["no batch"] = kept(*train_unevenly(CASES["M"], rank, (0, 2)))
    torch.save(found, folder / f"{rank}.pt")
    _refused(rank)


def _refused(rank: int) -> None:
    wrapped = DistributedDataParallel(network(CASES["M"]))
    opt = optimizer(CASES["M"], wrapped)
    x = batch(0, rank)
    with pytest.raises(RuntimeError, match=r"Join\(\[model, opt\]\)"), Join([wrapped]):
        wrapped(x)
    _a_second_context_without_the_optimizer(rank)
    with pytest.raises(RuntimeError, match="the model before the optimizer"):
        _train([opt, wrapped], x)
    with pytest.raises(RuntimeError, match="in no DistributedDataParallel"):
        Join([optimizer(CASES["M"], network(CASES["M"]))])
    again = DistributedDataParallel(wrapped.module)
    with pytest.raises(RuntimeError, match="Several DistributedDataParallel"):
        Join([again, optimizer(CASES["M"], wrapped.module)])


def _a_second_context_without_the_optimizer(rank: int) -> None:
    """Contexts with the optimizer, one of them without a batch in a process, and one without it."""
    model = network(CASES["M"])
    wrapped = DistributedDataParallel(model)
    opt = optimizer(CASES["M"], model)
    for batches in ((1, 1), (0, 1)):  # a context for each epoch
        with Join([wrapped, opt]):
            for _ in range(batches[rank]):
                wrapped(batch(0, rank)).sum().backward()
                opt.step()
    before = [p.detach().clone() for p in model.parameters()]
    with Join([wrapped]):
        wrapped(batch(0, rank)).sum().backward()
        with pytest.raises(RuntimeError, match=r"Join\(\[model, opt\]\)"):
            opt.step()
    assert all(map(torch.equal, before, model.parameters()))


def _train(joinables: list[Any], x: Tensor) -> None:
    opt, wrapped = joinables
    with Join(joinables):
        wrapped(x).sum().backward()
        opt.step()


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = Path(tmp_path_factory.mktemp("join"))
    run(unevenly, 2, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", [name for name in CASES if name != "S, some rows"])
def test_they_are_one_process(name: str, in_two: list[dict[str, Any]]) -> None:
    before = [*network(CASES[name]).parameters()]
    whole = zip(in_two[0][name]["weights"], in_one_process(CASES[name]), before, strict=True)
    for found, expected, start in whole:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert (found - start).abs().max() > 1e-6


@pytest.mark.parametrize("name", [*CASES, "no batch"])
def test_a_process_without_batches_has_the_same_bits(
    name: str, in_two: list[dict[str, Any]]
) -> None:
    first, second = (found[name] for found in in_two)
    assert first["states"].keys() == second["states"].keys()
    for key, state in first["states"].items():
        assert state.keys() == second["states"][key].keys()
        for entry, value in state.items():
            assert torch.equal(
                torch.as_tensor(value), torch.as_tensor(second["states"][key][entry])
            )
    for one, other in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(one, other)
