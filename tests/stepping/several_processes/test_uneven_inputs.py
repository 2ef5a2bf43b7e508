"""Processes with unequal numbers of batches, inside of DDP's context ``Join``, are one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import threads
import torch
from sharded_cases import M, S
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

from torch_locoprop import LocoProp
from torch_locoprop.distributed import ddp

# Threads of one process: not beside the other tests of a process.
pytestmark = pytest.mark.distributed

BATCHES, ROWS, EPOCHS = (1, 3), 8, 2  # of each process in an epoch, and rows of a batch
Schedule = Callable[[Optimizer], LRScheduler]
SETTINGS: dict[str, dict[str, Any]] = {
    "M": M,
    "S": S,
    "rate in a tensor": {**M, "lr": torch.tensor(1e-3, dtype=torch.float64)},
    "spectral": {},
    "outer": {**M, "apply": "gradient", "outer": lambda params: SGD(params, lr=0.1)},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.LayerNorm(8)  # for the fallback
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Linear(8, 6)).double()


def optimizer(name: str, model: nn.Module) -> LocoProp:
    def fallback(params: list[nn.Parameter]) -> Optimizer:
        return SGD(params, lr=0.1, momentum=0.9)

    given = {key: x.clone() if isinstance(x, Tensor) else x for key, x in SETTINGS[name].items()}
    return LocoProp(model, output_transfer="sigmoid", fallback=fallback, **given)


def begin_epoch(opt: LocoProp) -> LRScheduler:
    """Set all rates to those of the beginning, and return a schedule for an epoch."""
    for group in opt.param_groups:
        rate = group.setdefault("first_lr", float(group["lr"]))
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        group.pop("initial_lr", None)
    return ExponentialLR(opt, 0.5)


def batch(step: int, rank: int) -> Tensor:
    numbers = torch.Generator().manual_seed(10 * step + rank)
    return torch.rand(ROWS, 6, generator=numbers, dtype=torch.float64)


def in_one_process(name: str, by_all: bool) -> tuple[list[Tensor], dict[Any, Any]]:
    """Train with the batches of all processes that still have one."""
    model = network()
    opt = optimizer(name, model)
    for epoch in range(EPOCHS):
        schedule = begin_epoch(opt)
        for step in range(max(BATCHES)):
            ranks = [rank for rank, number in enumerate(BATCHES) if step < number]
            x = torch.cat([batch(10 * epoch + step, rank) for rank in ranks])
            part = len(ranks) / len(BATCHES) if by_all else 1.0
            (part * binary_cross_entropy_with_logits(model(x), x)).backward()  # type: ignore[no-untyped-call]
            opt.step()
            opt.zero_grad()
            schedule.step()
    return [p.detach() for p in model.parameters()], opt.state_dict()["state"]


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_processes_without_batches_take_the_steps_of_the_others(name: str, by_all: bool) -> None:
    weights, states = in_one_process(name, by_all)
    models, own = [network() for _ in BATCHES], threading.local()

    def trained(rank: int) -> dict[Any, Any]:
        model = models[rank]
        wrapped = own.wrapped = DistributedDataParallel(model)
        opt = optimizer(name, model)
        for epoch in range(EPOCHS):
            schedule = begin_epoch(opt)
            with Join([wrapped, opt], divide_by_initial_world_size=by_all):
                for step in range(BATCHES[rank]):
                    x = batch(10 * epoch + step, rank)
                    binary_cross_entropy_with_logits(wrapped(x), x).backward()  # type: ignore[no-untyped-call]
                    opt.step()
                    opt.zero_grad()
                    schedule.step()
            assert not opt._hooks.averaging.has_joined
        assert all(p.grad is None for p in model.parameters())
        found: dict[Any, Any] = opt.state_dict()["state"]
        return found

    def own_wrapper(layers: object) -> DistributedDataParallel:
        found: DistributedDataParallel = own.wrapped
        return found

    with threads.averaged(), patch.object(ddp, "wrapper_of", own_wrapper):
        found = threads.run(trained, len(BATCHES))
    for model, kept in zip(models, found, strict=True):
        for several, p in zip(model.parameters(), weights, strict=True):
            torch.testing.assert_close(several.detach(), p, rtol=0, atol=1e-10)
        assert kept.keys() == states.keys()
        for i, state in states.items():
            for key, entry in state.items():
                torch.testing.assert_close(kept[i][key], entry, rtol=0, atol=1e-9)
