"""Work that processes under DDP divide among them: equal to one process, and divided where it pays."""

from __future__ import annotations

from typing import Any

import pytest
import threads
import torch
from sharded_cases import Case, M, S, batch_bounds, network, train, whole_tensors
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from torch_locoprop.solvers import Spectral
from torch_locoprop.stepping import divided_outputs, divided_polar

# Threads of one process: not beside the other tests of a process.
pytestmark = pytest.mark.distributed

MANY = {**M, "local_steps": 20}  # more to send for gradients of all iterations than for rows
OUTER: dict[str, Any] = {"apply": "gradient", "outer": lambda params: SGD(params, lr=0.1)}
SCALED: dict[str, Any] = {"solver": Spectral(agreement=0.5)}
CASES = {
    "S": Case(S),
    "S, means": Case({**S, "local_reduction": "mean"}),
    "S, uneven": Case(S, batches="uneven"),
    "S, guards": Case({**S, "gate": True, "cap": 1e-4}),
    "S, outer": Case({**S, **OUTER}),
    "M": Case(MANY),
    "M, means": Case({**MANY, "local_reduction": "mean"}),
    "M, momentum": Case({**MANY, "solver": "adam", "local_decay": "linear"}),
    "M, softmax": Case({**MANY, "output_transfer": "softmax"}),  # which couples the outputs
    "M, frozen bias": Case({**MANY, "weight_decay": 0.1}, order="frozen bias"),
    "spectral": Case({"preset": "spectral"}),
    "spectral, uneven": Case({"preset": "spectral"}, batches="uneven"),
    "spectral, agreement": Case(SCALED),
}
NOT_DIVIDED = {
    "M with few iterations": Case({**M, "local_steps": 2}),
    "M, uneven": Case(MANY, batches="uneven"),
    "one iteration": Case({**S, "local_steps": 1}),
}


class Called(DistributedDataParallel):
    """A sequence of layers that is called through DDP."""

    def __getitem__(self, i: int) -> Any:
        return self.module[i]


def in_threads(case: Case, world: int) -> list[tuple[list[Tensor], dict[Any, Any], list[str]]]:
    """Return weights, states, and how layers were divided, of each thread after some steps."""
    models = [network("smooth") for _ in range(world)]

    def trained(rank: int) -> tuple[list[Tensor], dict[Any, Any], list[str]]:
        opt = train(case, models[rank], steps=0)
        called: Any = Called(models[rank])
        train(case, called, batch_bounds(case, rank, world), world, opt=opt)
        divided = [layer.division for layer in opt._layers]
        return whole_tensors(models[rank]), opt.state_dict()["state"], divided

    with threads.averaged():
        return threads.run(trained, world)


@pytest.fixture(autouse=True)
def small_layers_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_outputs, "PAYS_FROM", 6)
    monkeypatch.setattr(divided_polar, "PAYS_FROM", 6)


@pytest.mark.parametrize("name", [*CASES, *NOT_DIVIDED])
def test_divided_work_is_that_of_one_process(name: str) -> None:
    case, one = {**CASES, **NOT_DIVIDED}[name], network("smooth")
    opt = train(case, one)
    for weights, states, divided in in_threads(case, 3):
        of_outputs = name in CASES and not name.startswith("spectral")
        expected = [of_outputs, of_outputs and name != "M, softmax"]
        assert divided == [divided_outputs.DIVIDED if each else "" for each in expected]
        for several, p in zip(weights, one.parameters(), strict=True):
            torch.testing.assert_close(several, p.detach(), rtol=0, atol=1e-10)
        for i, state in opt.state_dict()["state"].items():
            assert states[i].keys() == state.keys()
            for key, entry in state.items():
                torch.testing.assert_close(states[i][key], entry, rtol=0, atol=1e-9)
