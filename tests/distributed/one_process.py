"""One process of a process group: NCCL on a GPU, gloo without one, each case compared with a plain run.

    PYTHONPATH=src:examples:tests python tests/distributed/one_process.py

Prints a line for each case with the distance of the two runs' weights, relative to the way that they
moved. The last steps of most cases are replays of CUDA graphs, which is checked; on a CPU, of those of
``emulated_graphs.py``. Goes on after a case that fails, and ends with 1 if one did.
``test_one_process.py`` runs them with gloo.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from emulated_graphs import collectives_in, emulate
from parallel_transformer import make_optimizer as optimizer_of
from parallel_transformer import parallel, transformer
from parallel_transformer import sharded as sharded_transformer
from parallel_transformer import train as train_transformer
from parallel_transformer import whole_tensors as of_transformer
from sharded_cases import (
    CASES,
    DEFAULT,
    EXACT,
    SPECTRAL,
    Case,
    M,
    S,
    network,
    outer,
    sharded,
    train,
    whole_tensors,
)
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from torch_locoprop import LocoProp
from torch_locoprop.distributed import averaging
from torch_locoprop.stepping.several_processes import (
    divided_closed_forms,
    divided_outputs,
    divided_polar,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT32 = ("M", "S", "closed form", "default", "spectral", "outer", "convolution, M")
REPLICATED = ("M", "S", "default", "softmax", "gate and cap")
UNDER_DDP = (
    *("M", "S", "closed form", "default", "spectral", "preconditioned", "momentum", "mean"),
    *("gate and cap", "every second", "outer", "convolution, M", "convolution, default"),
    *("accumulated", "clipped", "running closed form", "closed form of M"),
)
SETTINGS = {"M": M, "S": S, "closed form": EXACT, "default": DEFAULT, "spectral": SPECTRAL}
SETTINGS |= {"outer": {**M, "apply": "gradient", "outer": outer}}
NEAR = 1e-8  # of weights that move by about 1e-2: 1e-10
TEN = 10  # steps, of which the last ones replay CUDA graphs
# Closed forms look at numbers on the host, the others at shapes of images or at a user's code.
NOT_RECORDED = {
    *("closed form", "closed form in blocks", "closed form of M", "softmax, closed form"),
    *("convolution, M", "convolution, closed form of M", "uneven, convolution"),
    "averaged, convolution",
    *("grouped convolution", "solver of the user's"),
}
# Tensors of the process group, of the plain run, and of their start.
Compared = Iterator[tuple[Tensor, Tensor, Tensor]]


def exactly(case: Case) -> Case:
    """Return a case whose products have all digits: on a GPU, the default's are bfloat16."""
    return replace(case, settings={**case.settings, "local_products": "full"})


def made(case: Case, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    # Without the norm of two features, which magnifies rounding.
    model = "smooth" if dtype != torch.float64 and case.model == "dense" else case.model
    return network(model).to(DEVICE, dtype)


def compared(case: Case, found: nn.Module, plain: nn.Module) -> Compared:
    tensors = [whole_tensors(model) for model in (found, plain)]
    yield from zip(*tensors, whole_tensors(made(case, tensors[0][0].dtype)), strict=True)


def check_recorded(opt: LocoProp, name: str, *, between: bool = True) -> None:
    """Check that steps were recorded, and with ``between`` that collectives divide the recordings."""
    assert opt._graphs.failure is None, opt._graphs.failure
    recordings: list[Any] = [kind.recording for kind in opt._graphs._kinds]
    counts = [collectives_in(each) for each in recordings if each is not None]
    assert bool(counts) != (name in NOT_RECORDED), f"{len(counts)} recordings"
    assert bool(max(counts, default=between)) == between, counts


def fully_sharded(
    name: str,
    case: Case,
    dtype: torch.dtype = torch.float64,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Compared:
    plain, found = made(case, dtype), made(case, dtype)
    found = sharded(case, found, **options, **({} if mesh is None else {"mesh": mesh}))
    train(case, plain, steps=TEN)
    opt = train(case, found, steps=TEN)
    assert opt.summary().count("locoprop") > 0, opt.summary()
    check_recorded(opt, name)
    return compared(case, found, plain)


def wrapped(
    name: str, case: Case, dtype: torch.dtype = torch.float64, *, divided: bool
) -> Compared:
    """Compare DDP with a plain run, in the way of one process or, if divided, in that of several."""
    plain, found = made(case, dtype), made(case, dtype)
    train(case, plain, steps=TEN)
    wrapper = DistributedDataParallel(found)
    with ExitStack() as stack:
        if divided:
            group = wrapper.process_group
            stack.enter_context(patch.object(averaging, "averaging_processes", lambda joins: group))
            for module in (divided_closed_forms, divided_outputs, divided_polar):
                stack.enter_context(patch.object(module, "PAYS_FROM", 1))
        opt = train(case, wrapper, steps=TEN)  # type: ignore[arg-type]
    assert (opt._hooks.averaging.processes is None) != divided
    check_recorded(opt, f"DDP, {name}" if name.startswith("convolution") else name, between=divided)
    return compared(case, found, plain)


def replayed(case: Case) -> Compared:
    """Compare steps under DDP, replayed as CUDA graphs where there are any, with eager ones."""
    plain, found = made(case), made(case)
    train(Case({**case.settings, "cuda_graph": False}, case.model), plain, steps=TEN)
    opt = train(case, DistributedDataParallel(found), steps=TEN)  # type: ignore[arg-type]
    check_recorded(opt, "", between=False)
    return compared(case, found, plain)


def on_mesh(name: str, case: Case, mesh: Callable[[], DeviceMesh]) -> Compared:
    return fully_sharded(name, case, mesh=mesh())


def divided(settings: dict[str, Any], *, is_sharded: bool) -> Compared:
    """Compare a tensor-parallel transformer, alone or under ``fully_shard``, with a plain one."""
    settings = {**settings, "local_products": "full"}
    mesh = init_device_mesh(DEVICE.type, (1, 1), mesh_dim_names=("data", "tensor"))
    plain, found = transformer().to(DEVICE), transformer().to(DEVICE)
    found = parallel(found, mesh["tensor"], sequence=True)
    if is_sharded:
        found = sharded_transformer(found, mesh["data"])
    for model in (plain, found):
        opt = optimizer_of(model, settings)
        train_transformer(model, opt, steps=TEN)
        assert opt.summary().count("locoprop") == 7, opt.summary()
    one, other, start = map(of_transformer, (plain, found, transformer().to(DEVICE)))
    yield from ((other[key], one[key], start[key]) for key in one)


def saved(case: Case, folder: Path, *, asynchronous: bool) -> Compared:
    """Compare a run that goes on from a checkpoint with one that was never interrupted."""
    plain, before, after = (made(case) for _ in range(3))
    train(case, plain, steps=4)
    opt = train(case, sharded(case, before), steps=2)
    state = dict(zip(("model", "opt"), get_state_dict(before, opt), strict=True))
    writer = dcp.FileSystemWriter(folder, overwrite=False)
    if asynchronous:
        group = distributed.new_group(backend="gloo")
        written: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
        train(case, before, steps=2, opt=opt, skip=2)
        written.result()
    else:
        dcp.save(state, storage_writer=writer)
    new = train(case, sharded(case, after), steps=0)
    state = dict(zip(("model", "opt"), get_state_dict(after, new), strict=True))
    dcp.load(state, checkpoint_id=folder)
    loaded = {"model_state_dict": state["model"], "optim_state_dict": state["opt"]}
    set_state_dict(after, new, **loaded)
    train(case, after, steps=2, opt=new, skip=2)
    return compared(case, after, plain)


def example(folder: Path) -> Compared:
    """Run ``examples/fsdp_gpt.py`` for 21 steps, of which the last one loads a checkpoint."""
    import fsdp_gpt  # which needs rich, and the other cases do not

    printed = StringIO()
    with redirect_stdout(printed):
        for steps in (20, 21):
            fsdp_gpt.main(["--steps", str(steps), "--folder", str(folder)])
    losses = [float(line.split()[-1]) for line in printed.getvalue().splitlines()]
    assert losses[-1] < losses[0] - 1, losses
    yield torch.zeros(1), torch.zeros(1), torch.ones(1)


def cases(folder: Path) -> Iterator[tuple[str, float, Callable[[], Compared]]]:
    """Yield name, largest distance, and comparison of each case."""
    for name, case in CASES.items():
        yield f"fully_shard, {name}", NEAR, partial(fully_sharded, name, exactly(case))
    for name in REPLICATED:
        mesh = partial(init_device_mesh, DEVICE.type, (1, 1), mesh_dim_names=("copies", "shards"))
        case = exactly(CASES[name])
        yield f"HSDP, {name}", NEAR, partial(on_mesh, name, case, mesh)
    for name in UNDER_DDP:
        case = exactly(CASES[name])
        yield f"DDP, {name}", NEAR, partial(wrapped, name, case, divided=False)
        yield f"DDP, divided, {name}", NEAR, partial(wrapped, name, case, divided=True)
    for name in ("M", "S", "default"):  # closed forms are not recorded
        yield f"DDP, CUDA graph, {name}", NEAR, partial(replayed, exactly(CASES[name]))
    for name, settings in SETTINGS.items():
        run = partial(divided, settings, is_sharded=False)
        yield f"tensor parallel, {name}", NEAR, run
        run = partial(divided, settings, is_sharded=True)
        yield f"tensor parallel and fully_shard, {name}", NEAR, run
    for name in FLOAT32:
        # A polar factor magnifies rounding; on a GPU its products are in bfloat16.
        near = 5e-2 if name in ("default", "spectral") else 1e-3
        case = CASES[name]
        yield (
            f"fully_shard, float32, {name}",
            near,
            partial(fully_sharded, name, case, torch.float32),
        )
        run = partial(wrapped, name, case, torch.float32, divided=True)
        yield f"DDP, divided, float32, {name}", near, run
        rough = replace(case, settings={**case.settings, "local_products": "bf16"})
        run = partial(fully_sharded, name, rough, torch.float32)
        yield f"fully_shard, products in bfloat16, {name}", max(near, 1e-2), run
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        run = partial(fully_sharded, name, case, torch.float32, mp_policy=policy)
        yield f"fully_shard, passes in bfloat16, {name}", 5e-2, run
    for name in ("M", "default", "outer", "closed form"):
        at = folder / name
        run = partial(saved, exactly(CASES[name]), at / "saved", asynchronous=False)
        yield f"checkpoint, {name}", NEAR, run
        run = partial(saved, exactly(CASES[name]), at / "meanwhile", asynchronous=True)
        yield f"checkpoint, asynchronous, {name}", NEAR, run


def distance(case: Compared) -> float:
    """Return how far the two runs are from each other, relative to the way that they have gone."""
    apart = moved = 0.0
    for several, plain, start in case:
        apart += float((several - plain).double().square().sum())
        moved += float((plain - start).double().square().sum())
    return (apart / moved) ** 0.5


def join_group(folder: Path) -> None:
    """Make this process the only one of a group."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    distributed.init_process_group(
        "nccl" if DEVICE.type == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=0,
        world_size=1,
    )


def report(name: str, near: float, run: Callable[[], Compared]) -> bool:
    """Run a case and print a line; return True if it is right."""
    start = time.perf_counter()
    try:
        torch.manual_seed(0)
        found = distance(run())
        right, told = found <= near, f"{found:.1e} of {near:.0e}"
    except Exception as error:
        right, told = False, f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        if "--trace" in sys.argv:
            traceback.print_exc()
    seconds = time.perf_counter() - start
    print(f"{'ok  ' if right else 'FAIL'} {seconds:5.2f} s  {name}: {told}", flush=True)
    return right


def main() -> int:
    warnings.filterwarnings("ignore")
    if DEVICE.type == "cpu":
        emulate(pytest.MonkeyPatch())
    wrong = 0
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        join_group(folder)
        print(f"PyTorch {torch.__version__}, {DEVICE}, {distributed.get_backend()}", flush=True)
        for case in cases(folder):
            wrong += not report(*case)
        gc.collect()
        distributed.destroy_process_group()
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        with patch.dict(os.environ, {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}):
            wrong += not report("examples/fsdp_gpt.py", 0.0, lambda: example(folder / "example"))
    print(f"{wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
