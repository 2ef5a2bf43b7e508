"""Two processes that share a GPU, by gloo: each case equals one process, in replays of CUDA graphs too.

    PYTHONPATH=src:examples:tests python tests/distributed/two_on_one_gpu.py

NCCL refuses two processes on one GPU. Gloo copies tensors of a GPU through the host; where it does not
know a collective on a GPU, the copies are made here. PyTorch 2.11 crashes where it waits for gloo in
``DTensor.full_tensor`` and in tensor parallelism. So DTensors are gathered through the host too, and
the cases with tensor parallelism run without a GPU only (``one_process.py`` has them with NCCL).

Prints a line for each case, with the distance of the weights from those of one process, relative to the
way that these moved. Goes on after a case that fails in both processes, and ends with 1 if one did.
Without a GPU the CUDA graphs are those of ``emulated_graphs.py``.
"""

from __future__ import annotations

import gc
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import test_tensor_parallel as tensor_parallel
import torch
from emulated_graphs import emulate
from one_process import DEVICE, NEAR, check_recorded, distance, exactly
from sharded_cases import Case, make_optimizer, network, sharded
from test_recorded_steps import NINE, RENEWED, UNDER_DDP, Loop, loop_of, steps_of
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from torch_locoprop.distributed import collectives
from torch_locoprop.stepping.several_processes import divided_outputs, divided_polar

WORLD = 2
DDP = ("M", "M, rows", "M, guards", "M, outer", "S", "S, blocks", "closed form", "default")
SHARDED = (*DDP, "M, softmax", "preconditioned", "spectral, agreement", "convolution, S")
PARALLEL = ("M", "S", "softmax", "outer", "default")
# Steps with other shapes in one process, so that it runs eagerly while the other replays.
ALTERNATING = Loop(
    14, passes=2, parts=lambda step, rank: 0.25 if rank == 1 and step in (7, 9, 13) else 0.5
)
Compared = Iterator[tuple[Tensor, Tensor, Tensor]]


def whole_tensors(model: nn.Module) -> list[Tensor]:
    """Return all parameters, gathered through the host: gloo's own gathering of DTensors crashed."""
    return [_whole(p.detach()) for p in model.parameters()]


def _whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    (placement,), parts = tensor.placements, [torch.empty(0)] * WORLD
    distributed.all_gather_object(parts, tensor.to_local().cpu())
    whole = torch.cat(parts, placement.dim) if placement.is_shard() else parts[0]
    return whole.to(tensor.device)


def trained(case: Case, loop: Loop, rank: int, world: int, wrap: Callable[[Any], Any]) -> Any:
    """Return a model after the steps of a loop, and its optimizer."""
    model = network(case.model).to(DEVICE)
    called = wrap(model)
    opt = make_optimizer(case, model)
    steps_of(case, loop, called, opt, rank, world)
    return model, opt


def compared(name: str, loop: Loop, rank: int, *, is_sharded: bool) -> Compared:
    case = exactly(UNDER_DDP[name])
    wrap = partial(sharded, case) if is_sharded else DistributedDataParallel
    found, opt = trained(case, loop, rank, WORLD, wrap)
    check_recorded(opt, "")
    plain, _ = trained(case, Loop(loop.steps, loop.rows), 0, 1, lambda model: model)
    tensors = [whole_tensors(model) for model in (found, plain)]
    return zip(*tensors, whole_tensors(network(case.model).to(DEVICE)), strict=True)


def parallel(name: str) -> Compared:
    steps = RENEWED if name == "default" else NINE
    settings = {**tensor_parallel.SETTINGS[name], "local_products": "full"}
    plain, found = (tensor_parallel.network().to(DEVICE) for _ in range(2))
    found = tensor_parallel.parallel(found, WORLD, DEVICE.type)
    with patch.dict(tensor_parallel.SETTINGS, {name: settings}):
        check_recorded(tensor_parallel.train(found, name, (12, 6), steps=steps), "")
        tensor_parallel.train(plain, name, (12, 6), steps=steps)
    tensors = [whole_tensors(model) for model in (found, plain)]
    return zip(*tensors, whole_tensors(tensor_parallel.network().to(DEVICE)), strict=True)


def cases(rank: int) -> Iterator[tuple[str, Callable[[], Compared]]]:
    for is_sharded, names in ((False, DDP), (True, SHARDED)):
        kind = "fully_shard" if is_sharded else "DDP"
        for name in names:
            run = partial(compared, name, loop_of(name), rank, is_sharded=is_sharded)
            yield f"{kind}, {name}", run
        run = partial(compared, "M, rows", ALTERNATING, rank, is_sharded=is_sharded)
        yield f"{kind}, one process replays and the other does not", run
    for name in PARALLEL if DEVICE.type == "cpu" else ():
        yield f"tensor parallel, {name}", partial(parallel, name)


def through_host(collective: Any) -> Any:
    """Return a collective of CPU tensors as one of tensors on any device."""

    def call(*args: Any, **kwargs: Any) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        copies = {id(tensor): tensor.cpu() for tensor in tensors}
        collective(*(copies.get(id(arg), arg) for arg in args), **kwargs)
        tensors[0].copy_(copies[id(tensors[0])])

    return call


def unsupported() -> Iterator[tuple[Any, str]]:
    """Yield where to find the collectives that the process group does not know on this device."""
    numbers, twice = torch.ones(WORLD, device=DEVICE), torch.ones(2 * WORLD, device=DEVICE)
    for place, name, given in (
        (distributed, "all_reduce", [numbers]),
        (collectives, "_all_gather", [twice, numbers]),
        (collectives, "_reduce_scatter", [numbers, twice]),
        (distributed, "all_to_all_single", [numbers, numbers.clone(), [1, 1], [1, 1]]),
    ):
        try:
            getattr(place, name)(*given)
        except (RuntimeError, ValueError, NotImplementedError):
            yield place, name


def in_a_process(rank: int, folder: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
    else:
        emulate(pytest.MonkeyPatch())
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=30),
    )
    wrong = 0
    with ExitStack() as stack:
        copied = list(unsupported())
        if DEVICE.type == "cuda":
            stack.enter_context(patch.object(DTensor, "full_tensor", _whole))
        for place, name in copied:
            stack.enter_context(patch.object(place, name, through_host(getattr(place, name))))
        stack.enter_context(patch.object(divided_outputs, "PAYS_FROM", 6))
        stack.enter_context(patch.object(divided_polar, "PAYS_FROM", 2))
        if rank == 0:
            names = ", ".join(name for _, name in copied) or "nothing"
            print(f"PyTorch {torch.__version__}, {DEVICE}, through the host: {names}", flush=True)
        for name, run in cases(rank):
            start = time.perf_counter()
            try:
                apart = distance(run())
                right, told = apart <= NEAR, f"{apart:.1e} of {NEAR:.0e}"
            except Exception as error:
                right = False
                told = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            wrong += not right
            if rank == 0 or not right:
                seconds = time.perf_counter() - start
                line = f"{'ok  ' if right else 'FAIL'} {seconds:5.2f} s  {name}, {rank}: {told}"
                print(line, flush=True)
            gc.collect()
    distributed.destroy_process_group()
    if wrong:
        raise SystemExit(1)


def main() -> None:
    """Run the cases in two processes; raises if one of them fails."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(in_a_process, (folder,), nprocs=WORLD)


if __name__ == "__main__":
    main()
