"""Two processes under DistributedDataParallel are one process with the whole batch."""

import os
import warnings
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

from torch_locoprop import LocoProp
from torch_locoprop.solvers import Exact

STEPS, ROWS = 3, 24


@dataclass(frozen=True)
class Case:
    """How the network is trained, and by how many passes a step."""

    settings: dict[str, Any] = field(default_factory=dict)
    convolution: bool = False
    passes: int = 1
    order: str = ""  # of what is done


def outer(params: list[nn.Parameter]) -> Optimizer:
    return SGD(params, lr=0.1)


CASES = {
    "locoprop-m": Case(),
    "locoprop-s": Case({"variant": "locoprop-s"}),
    "pocoprop-m": Case({"variant": "pocoprop-m", "gamma": 0.5}),
    "pocoprop-s": Case({"variant": "pocoprop-s", "gamma": 0.5}),
    "proxprop": Case({"variant": "proxprop"}),
    "natural-s": Case({"variant": "natural-s", "gamma": 0.1}),
    "means": Case({"local_reduction": "mean"}),
    "means of S": Case({"local_reduction": "mean", "variant": "locoprop-s"}),
    "means of PocoProp": Case({"local_reduction": "mean", "variant": "pocoprop-s"}),
    "gate": Case({"gate": True, "lr": 0.5}),
    "closed form of S": Case({"variant": "locoprop-s", "solver": "exact"}),
    "closed form of M": Case({"solver": "exact"}),
    "running closed form": Case({"variant": "locoprop-s", "solver": Exact(0.9, 2, 0.1)}),
    "one iteration": Case({"local_steps": 1}),
    "l2": Case({"regularizer": "l2"}),
    "outer optimizer": Case({"apply": "gradient", "outer": outer}),
    "convolution": Case(convolution=True),
    "convolution, S": Case({"variant": "locoprop-s"}, convolution=True),
    "accumulated": Case(passes=3),
    "the wrapper itself": Case(order="LocoProp(wrapper)"),
    "gradients set to zero late": Case(order="zero_grad() before backward()"),
    "checkpointed": Case(order="checkpoint()"),
}


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(super().forward, x, use_reentrant=False))


def network(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    first: list[nn.Module] = [nn.Linear(6, 8)]
    if case.convolution:
        first = [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten()]
    rest = [nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 6)]
    kind = Checkpointed if case.order == "checkpoint()" else nn.Sequential
    return kind(*first, *rest).double()


def trained(case: Case, called: nn.Module, model: nn.Module, part: slice) -> list[Tensor]:
    """The weights after some steps on a part of every batch."""
    own = {"lr": 1e-3, "gamma": 2.0, "local_steps": 4, "output_transfer": "sigmoid"}
    whole = called if case.order == "LocoProp(wrapper)" else model
    opt = LocoProp(whole, **{**own, **case.settings})
    numbers = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.rand(ROWS, 6, generator=numbers).double()[part]
        for i, some in enumerate(x.chunk(case.passes)):
            if isinstance(called, DistributedDataParallel):
                called.require_backward_grad_sync = i == case.passes - 1  # what no_sync() sets
            loss = binary_cross_entropy_with_logits(called(some), some)
            if case.order == "zero_grad() before backward()":
                opt.zero_grad()
            (loss / case.passes).backward()  # type: ignore[no-untyped-call]
        opt.step()
        if not case.order.startswith("zero"):
            opt.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def _in_a_process(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=100),
    )
    half = ROWS // 2
    part, found = slice(rank * half, (rank + 1) * half), {}
    for name, case in CASES.items():
        model = network(case)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*drift apart.*")
            found[name] = trained(case, DistributedDataParallel(model), model, part)
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no processes")
    folder = Path(tmp_path_factory.mktemp("ddp"))
    spawn(_in_a_process, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_both_have_the_same_bits(name: str, in_two: list[dict[str, list[Tensor]]]) -> None:
    for first, second in zip(*(found[name] for found in in_two), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", [name for name in CASES if name != "natural-s"])
def test_they_are_one_process_with_the_whole_batch(
    name: str, in_two: list[dict[str, list[Tensor]]]
) -> None:
    """But for natural targets, whose labels are drawn: others where there are other rows."""
    model = network(CASES[name])
    before = [p.detach().clone() for p in model.parameters()]
    one = trained(replace(CASES[name], passes=1), model, model, slice(None))
    for whole, half, start in zip(one, in_two[0][name], before, strict=True):
        torch.testing.assert_close(half - start, whole - start, rtol=1e-8, atol=1e-12)
        assert not torch.equal(whole, start)
