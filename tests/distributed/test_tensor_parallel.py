"""Column-parallel layers: each process solves the problems of its rows, with the same inputs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import processes
import torch
from sharded_cases import DEFAULT, EXACT, SPECTRAL, M, S
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import AdamW

from torch_locoprop import LocoProp

SETTINGS: dict[str, dict[str, Any]] = {
    "M": M,
    "S": S,
    "closed form": EXACT,
    "default": DEFAULT,
    "spectral": SPECTRAL,
    "means": {**M, "local_reduction": "mean"},
    "softmax": {**M, "output_transfer": "softmax"},
    "gate": {**S, "lr": 0.5, "gate": True},
}
SHAPES = {"rows": (12, 6), "sequences": (3, 4, 6)}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 6)]
    return nn.Sequential(*layers).double()


def parallel(model: nn.Sequential, world: int) -> nn.Sequential:
    """Divide the first and the last layer by rows, and the second by columns."""
    plan: Any = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "2": RowwiseParallel(input_layouts=Replicate()),
        "4": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    return model


def train(model: nn.Sequential, settings: dict[str, Any], shape: tuple[int, ...]) -> LocoProp:
    """Take three steps; the second layer is the fallback's in one process as in several."""
    settings = {"output_transfer": "sigmoid", **settings}
    opt = LocoProp(model, layers=["0", "4"], fallback=lambda p: AdamW(p, lr=1e-2), **settings)
    numbers = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.rand(*shape, generator=numbers).double()
        binary_cross_entropy_with_logits(model(x), x).backward()
        opt.step()
        opt.zero_grad()
    return opt


def _in_a_process(rank: int, folder: Path, world: int) -> None:
    found: dict[str, list[Tensor]] = {}
    for name, settings in SETTINGS.items():
        for shape, sizes in SHAPES.items():
            model = parallel(network(), world)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*drift apart.*")
                opt = train(model, settings, sizes)
            assert opt.summary().count("locoprop") == 2
            found[f"{name}, {shape}"] = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    if rank == 0:
        torch.save(found, folder / "found.pt")


def test_processes_with_parallel_columns_are_one_process(tmp_path: Path) -> None:
    processes.run(_in_a_process, 2, tmp_path, 2)
    found = torch.load(tmp_path / "found.pt")
    assert len(found) == 16
    wrong = {}
    for run, tensors in found.items():
        name, shape = run.split(", ")
        model = network()
        train(model, SETTINGS[name], SHAPES[shape])
        for p, several, before in zip(
            model.parameters(), tensors, network().parameters(), strict=True
        ):
            assert not torch.equal(p, before)
            if not torch.allclose(p, several, rtol=0, atol=1e-10):
                wrong[run] = float((p - several).abs().max())
    assert not wrong
