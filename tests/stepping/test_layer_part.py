"""Layers that ``fully_shard`` divides among processes, which are threads here, equal those of one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import threads
import torch
from sharded_cases import CASES, batch_bounds, network, sharded, train, whole_tensors
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_locoprop.distributed import communication
from torch_locoprop.stepping.layer_part import EXCHANGES_WEIGHTS, GATHERS_ROWS, WHOLE  # noqa

NAMES = tuple(CASES)
EXCHANGED = ("M", "momentum", "mean", "uneven", "frozen bias of M", "softmax")


def exchanging_weights() -> AbstractContextManager[object]:
    """Let layers exchange weights in each iteration, as if that cost nothing."""
    return patch.object(communication, "by_iterations", lambda *args: communication.Traffic())


def in_threads(name: str) -> list[tuple[list[Tensor], dict[int, dict[str, Any]], str]]:
    """Return the weights, the states and the summary of each thread after some steps."""
    case = CASES[name]
    world = case.worlds[0]
    models = [network(case.model) for _ in range(world)]

    def trained(rank: int) -> tuple[list[Tensor], dict[int, dict[str, Any]], str]:
        model = sharded(case, models[rank])
        opt = train(case, model, batch_bounds(case, rank, world), world)
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
