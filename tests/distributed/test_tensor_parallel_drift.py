"""Layers beside tensor-parallel ones: all processes have the same rows, and no warning of drift."""

from __future__ import annotations

import gc
import os
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing import spawn

from torch_locoprop import LocoProp


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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 5))
    x = torch.randn(9, 6)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    opt = LocoProp(
        model,
        variant="locoprop-m",
        lr=1e-3,
        output_transfer="linear",
        fallback=lambda p: torch.optim.SGD(p, lr=0.01),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*drift apart.*")
        for _ in range(3):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
    torch.save(model[3].weight.detach(), f"{folder}/{rank}.pt")
    del model, opt
    gc.collect()  # models in circles of references, which must not outlive their process group
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_layers_beside_tensor_parallel_ones_do_not_drift(tmp_path: Path) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no processes")
    spawn(_in_a_process, (str(tmp_path),), nprocs=2)
    assert torch.equal(torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt"))
