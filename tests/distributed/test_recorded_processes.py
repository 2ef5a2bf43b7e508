"""Real processes that replay steps: equal to one process, with the collectives of eager steps.

The CUDA graphs are those of ``emulated_graphs.py``. More cases are in ``test_recorded_steps.py``.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import processes
import pytest
import test_join
import test_tensor_parallel as tensor_parallel
import torch
from emulated_graphs import emulate
from sharded_cases import Case, M, make_optimizer, network, sharded, whole_tensors
from test_recorded_steps import CASES, NINE, RENEWED, Loop, alone, replays, steps_of
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from traffic import Counted, check_counts

from torch_locoprop import LocoProp
from torch_locoprop.distributed import communication
from torch_locoprop.fast.dispatch import graphs
from torch_locoprop.stepping.several_processes import divided_outputs, divided_polar

NAMES = {"M, rows": NINE, "M, outer": NINE, "S": NINE, "default": RENEWED}
PARALLEL = {"M": NINE, "S": NINE, "softmax": NINE, "outer": NINE, "default": RENEWED}
JOINED = ("M", "S", "fallback", "spectral")  # in the context Join
BATCHES = (8, 15)  # of each process; the first one replays steps without rows


def _in_a_process(rank: int, folder: Path, world: int, names: list[str]) -> None:
    patches = pytest.MonkeyPatch()
    emulate(patches)
    patches.setattr(graphs, "MAX_RECORDINGS_IN_PLACE", 0)
    found: dict[str, list[Tensor]] = {}
    small = (
        patch.object(divided_outputs, "PAYS_FROM", 6),
        patch.object(divided_polar, "PAYS_FROM", 2),
    )
    with small[0], small[1]:
        for name in names:
            for is_sharded in (False, True):
                steps, case, model = NAMES[name], CASES[name], network(CASES[name].model)
                called = sharded(case, model) if is_sharded else DistributedDataParallel(model)
                opt = make_optimizer(case, model)
                steps_of(case, Loop(steps), called, opt, rank, world)
                _check_replays(opt)
                found[f"{name}, {is_sharded}"] = whole_tensors(model)
        _check_counts_under_ddp(world)
    for name, steps in of_parallel(names).items():
        divided = tensor_parallel.parallel(tensor_parallel.network(), world)
        _check_replays(tensor_parallel.train(divided, name, (12, 6), steps=steps))
        found[f"parallel, {name}"] = whole_tensors(divided)
    if len(names) > 1:
        check_counts(rank, world, steps=7, replayed=True)
        with patch.object(test_join, "BATCHES", BATCHES):
            for name in JOINED:
                model, opt = test_join.train_unevenly(test_join.CASES[name], rank, BATCHES)
                _check_replays(opt)
                found[f"joined, {name}"] = whole_tensors(model)
        _go_on_in_another_group(rank, folder, world, found)
    if rank == 0:
        torch.save(found, folder / "found.pt")


def _go_on_in_another_group(
    rank: int, folder: Path, world: int, found: dict[str, list[Tensor]]
) -> None:
    """Make the process group anew between steps, also for a mesh that exists; one process replays."""
    model, case = network(CASES["M"].model), CASES["M"]
    sharded(case, model)
    opt = make_optimizer(case, model)
    steps_of(case, Loop(NINE), model, opt, rank, world)
    _check_replays(opt)
    gc.collect()
    distributed.destroy_process_group()
    again = folder / "again"
    again.mkdir(exist_ok=True)
    processes.join_group(rank, world, again)
    if rank == 1:
        opt._graphs.forget()
    steps_of(case, Loop(NINE), model, opt, rank, world, first=NINE)
    _check_replays(opt)
    found["another group"] = whole_tensors(model)


def _check_replays(opt: LocoProp) -> None:
    assert opt._graphs.failure is None
    assert replays(opt) >= 5


def _check_counts_under_ddp(world: int) -> None:
    """Compare the collectives of eager and replayed steps with the formulas."""
    for settings, steps in (({**M, "local_steps": 20}, NINE), ({}, RENEWED)):
        model = network("smooth")
        opt, called = make_optimizer(Case(settings), model), DistributedDataParallel(model)
        for step in range(steps):
            called(torch.rand(12, 6).double()).square().mean().backward()
            with Counted() as counted:
                opt.step()
            opt.zero_grad()
            expected = communication.of_all_layers_in_ddp(2)
            for d, n in ((6, 8), (8, 6)):
                parts: list[Any] = []
                if settings:
                    parts.append(communication.rows_in_ddp(12, n, world, 8))
                    parts.append(communication.outputs_in_ddp(d, n + 1, 2, world, 8))
                elif step < 10 or step % 10 == 0:
                    parts.append(communication.square_in_ddp(n + 1, 8))
                for part in parts:
                    expected = expected.plus(part)
            if not settings:
                shapes = [(6, 9), (8, 7)]
                expected = expected.plus(communication.polar_factors_in_ddp(shapes, world, 8))
            assert counted.traffic() == expected, step
        _check_replays(opt)


def of_parallel(names: list[str]) -> dict[str, int]:
    """Return the tensor-parallel cases: all of them, or one."""
    return PARALLEL if len(names) > 1 else {"M": NINE}


@pytest.mark.parametrize(
    "names",
    [["default"], pytest.param(list(NAMES), marks=pytest.mark.distributed)],
    ids=["some", "all"],
)
def test_two_processes_are_one_process(names: list[str], tmp_path: Path) -> None:
    processes.run(_in_a_process, 2, tmp_path, 2, names)
    found = torch.load(tmp_path / "found.pt")
    joined = JOINED if len(names) > 1 else ()
    assert len(found) == 2 * len(names) + len(of_parallel(names)) + len(joined) + bool(joined)
    for name in names:
        for is_sharded in (False, True):
            expected = alone(CASES[name], Loop(NAMES[name]))[0]
            _compare(found[f"{name}, {is_sharded}"], expected)
    for name, steps in of_parallel(names).items():
        model = tensor_parallel.network()
        tensor_parallel.train(model, name, (12, 6), steps=steps)
        _compare(found[f"parallel, {name}"], whole_tensors(model))
    with patch.object(test_join, "BATCHES", BATCHES):
        for name in joined:
            alone_with_all = test_join.in_one_process(test_join.CASES[name])
            _compare(found[f"joined, {name}"], alone_with_all)
    if joined:
        _compare(found["another group"], alone(CASES["M"], Loop(2 * NINE))[0])


def _compare(found: list[Tensor], expected: list[Tensor]) -> None:
    for several, one in zip(found, expected, strict=True):
        torch.testing.assert_close(several, one, rtol=0, atol=1e-10)
