"""What processes tell each other before they solve the problems of their layers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import threads
import torch
from sharded_cases import (
    Case,
    M,
    S,
    loss_of,
    make_optimizer,
    network,
    sharded,
    train,
    whole_tensors,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.stepping.several_processes.agreement import _facts

# Threads of one process: not beside the other tests of a process.
pytestmark = pytest.mark.distributed

X = torch.rand(16, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def two_passes(
    model: Any, x: Tensor, world: int, zeros: list[slice], settings: dict[str, Any]
) -> None:
    """Take a step after two passes; between them some rows of the gradients are set to zero.

    Args:
        model: the model, sharded or not.
        x: this process's rows.
        world: the number of processes.
        zeros: rows of this process's gradients, for each parameter.
        settings: of the optimizer.
    """
    opt = make_optimizer(Case(settings), model)
    for i in range(2):
        part = x[i * len(x) // 2 :][: len(x) // 2]
        (world * loss_of(Case(), model(part), part)).backward()  # type: ignore[no-untyped-call]
        if i == 0:
            for p, rows in zip(model.parameters(), zeros, strict=True):
                gradient = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                gradient[rows] = 0
    opt.step()


@pytest.mark.parametrize("settings", [M, S], ids=["M", "S"])
@pytest.mark.parametrize("all_rows", [False, True])
def test_gradients_that_are_zero_in_one_process_only_were_not_set_to_zero(
    settings: dict[str, Any], all_rows: bool
) -> None:
    """The calls before count, as they do in one process, unless all gradients were set to zero."""
    one, models = network("smooth"), [network("smooth") for _ in range(2)]
    half = slice(4, None), slice(3, None)  # the rows of the second process: of 8 outputs, and of 6
    zeros = [slice(None)] * 4 if all_rows else [half[0], half[0], half[1], half[1]]
    two_passes(one, X[[*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]], 1, zeros, settings)

    def stepped(rank: int) -> list[Tensor]:
        zeros = [slice(None) if all_rows or rank == 1 else slice(0, 0)] * 4
        model = sharded(Case(), models[rank])
        two_passes(model, X[8 * rank : 8 * rank + 8], 2, zeros, settings)
        return whole_tensors(model)

    for found in threads.run(stepped, 2):
        for several, p in zip(found, one.parameters(), strict=True):
            torch.testing.assert_close(several, p.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "under DDP"])
def test_a_model_of_one_layer_without_a_bias(is_sharded: bool) -> None:
    """The facts of one tensor are enough."""

    def layer() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6, bias=False)).double()

    one, models = layer(), [layer() for _ in range(2)]
    opt = train(Case(S), one, steps=2)

    def trained(rank: int) -> list[Tensor]:
        model = models[rank]
        made = make_optimizer(Case(S), sharded(Case(), model) if is_sharded else model)
        called: Any = model if is_sharded else DistributedDataParallel(model)
        train(Case(S), called, slice(12 * rank, 12 * rank + 12), 2, steps=2, opt=made)
        return whole_tensors(model)

    assert len(opt._layers) == 1
    with nullcontext() if is_sharded else threads.averaged():
        for (weight,) in threads.run(trained, 2):
            torch.testing.assert_close(weight, one[0].weight.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("known", "calls", "obstacle", "has_rows"),
    [
        (True, ("empty",), "", True),
        (True, ("empty",), "why", False),
        (True, (), "", False),  # not called in this step, with a batch
        (True, ("other",), "", False),
        (False, (), "", False),
    ],
)
def test_a_process_without_a_batch_has_rows_where_it_had_some_before(
    known: bool, calls: tuple[str, ...], obstacle: str, has_rows: bool
) -> None:
    made = {name: SimpleNamespace(x=X, kept=None, shape=X.shape) for name in ("empty", "other")}
    layer: Any = SimpleNamespace(
        empty_call=made["empty"] if known else None,
        calls=[made[name] for name in calls],
        kind=SimpleNamespace(linear_map=Dense()),
        rows_of=lambda call: len(call.x),
        transfer=None,
        is_output=False,
        has_rows=False,
        has_gram=False,
        row_count=0,
        obstacle=obstacle,
    )
    assert _facts(layer).has_rows is has_rows
