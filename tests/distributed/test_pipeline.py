"""Stages of a pipeline, each with an optimizer of its own, equal one process with the whole batch."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from torch_locoprop import LocoProp

STEPS, ROWS, MICROBATCHES = 3, 24, 4
ITERATIONS = {"lr": 1e-3, "gamma": 2.0, "local_steps": 4}
CASES: dict[str, dict[str, Any]] = {
    "M": {"variant": "locoprop-m", **ITERATIONS},
    "S": {"variant": "locoprop-s", **ITERATIONS},
    "S, means": {"variant": "locoprop-s", "local_reduction": "mean", **ITERATIONS},
    "PocoProp": {"variant": "pocoprop-m", **ITERATIONS, "gamma": 0.5},
    "closed form": {"variant": "locoprop-s", "solver": "exact", "lr": 1e-2},
    "spectral": {},
}
Expected = dict[str, list[Tensor]]  # the weights of one process, by case
BEHIND = {"behind the transfer": 4, "between layer and transfer": 3}  # where the model is divided


def stages(where: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh()]
    layers += [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6)]
    whole = nn.Sequential(*layers).double()
    return [whole[:where], whole[where:]]


def settings(name: str, index: int, where: int) -> dict[str, Any]:
    """Return the settings of a stage: what it does not see of the model has to be given."""
    if index == 1:
        return {"output_transfer": "sigmoid", **CASES[name]}
    return {"transfers": {"2": "tanh"}, **CASES[name]} if where == 3 else CASES[name]


def batches() -> Iterator[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.rand(ROWS, 6, generator=numbers).double()


def in_one_process(name: str) -> list[Tensor]:
    whole = nn.Sequential(*(layer for stage in stages(4) for layer in stage))
    opt = LocoProp(whole, output_transfer="sigmoid", **CASES[name])
    for x in batches():
        binary_cross_entropy_with_logits(whole(x), x).backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in whole.parameters()]


def train(schedule: Any, opt: LocoProp, index: int, part: slice = slice(None)) -> None:
    for x in batches():
        schedule.step(*([x[part]] if index == 0 else []), **({"target": x[part]} if index else {}))
        opt.step()
        opt.zero_grad()


def check(found: nn.Module, index: int, where: int, expected: list[Tensor], case: Any) -> None:
    start = [p.detach() for stage in stages(where) for p in stage.parameters()]
    split = len([*stages(where)[0].parameters()])
    own = slice(split, None) if index else slice(split)
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found.parameters()]
    for p, wanted, before in zip(parameters, expected[own], start[own], strict=True):
        torch.testing.assert_close(p.detach(), wanted, rtol=1e-10, atol=1e-10, msg=str(case))
        assert (p - before).abs().max() > 1e-6, case


@pytest.fixture(scope="module")
def expected() -> Expected:
    return {name: in_one_process(name) for name in CASES}


def in_stages(rank: int, folder: Path, expected: Expected) -> None:
    for name in CASES:
        for kind in (ScheduleGPipe, Schedule1F1B):
            for where in BEHIND.values():
                model = stages(where)[rank]
                stage = PipelineStage(model, rank, 2, torch.device("cpu"))
                schedule = kind(stage, MICROBATCHES, loss_fn=binary_cross_entropy_with_logits)
                opt = LocoProp(model, **settings(name, rank, where))
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message=".*drift apart.*")
                    train(schedule, opt, rank)
                check(model, rank, where, expected[name], (name, kind, where))
                del stage, schedule  # else the next case would find it


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."),
    reason="PyTorch 2.9 aborts with any optimizer when a process makes a second stage",
)
def test_two_stages_are_one_process(tmp_path: Path, expected: Expected) -> None:
    run(in_stages, 2, tmp_path, expected)


def test_schedules_that_run_no_hooks_are_named() -> None:
    """Zero-bubble schedules compute gradients of inputs and of weights apart."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    opt = LocoProp(model, variant="locoprop-s")
    x = torch.rand(7, 6, requires_grad=True)
    out = model(x)
    _, groups = stage_backward_input([out], [torch.ones_like(out)], [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(RuntimeError, match="zero-bubble"):
        opt.step()


def in_replicated_stages(rank: int, folder: Path, expected: Expected) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "data"))
    index, half = mesh.get_coordinate()
    part = slice(half * ROWS // 2, (half + 1) * ROWS // 2)
    for name in CASES:
        model = stages(4)[index]
        opt = LocoProp(model, **settings(name, index, 4))
        wrapped = DistributedDataParallel(model, process_group=mesh.get_group("data"))
        device, group = torch.device("cpu"), mesh.get_group("stages")
        stage = PipelineStage(wrapped, index, 2, device, group=group)
        loss = binary_cross_entropy_with_logits
        train(Schedule1F1B(stage, MICROBATCHES, loss_fn=loss), opt, index, part)
        check(model, index, 4, expected[name], name)
        del stage, wrapped


@pytest.mark.distributed
def test_stages_under_ddp_are_one_process(tmp_path: Path, expected: Expected) -> None:
    run(in_replicated_stages, 4, tmp_path, expected)


def in_sharded_stages(rank: int, folder: Path, expected: Expected) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "data"))
    index, half = mesh.get_coordinate()
    part = slice(half * ROWS // 2, (half + 1) * ROWS // 2)
    for name in CASES:
        if name == "PocoProp":  # refused with fully_shard
            continue
        model = stages(4)[index]
        fully_shard(model, mesh=mesh["data"])
        opt = LocoProp(model, **settings(name, index, 4))
        device, group = torch.device("cpu"), mesh.get_group("stages")
        stage = PipelineStage(model, index, 2, device, group=group)
        loss = binary_cross_entropy_with_logits
        train(Schedule1F1B(stage, MICROBATCHES, loss_fn=loss), opt, index, part)
        check(model, index, 4, expected[name], name)
        del stage


@pytest.mark.distributed
def test_stages_under_fully_shard_are_one_process(tmp_path: Path, expected: Expected) -> None:
    run(in_sharded_stages, 4, tmp_path, expected)
