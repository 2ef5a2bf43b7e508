"""Column- and row-parallel layers: two processes are one process, and exchange what is promised."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from sharded_cases import AVERAGED, DEFAULT, EXACT, SPECTRAL, M, S, outer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import AdamW
from traffic import Counted

from torch_locoprop import LocoProp
from torch_locoprop.distributed import communication
from torch_locoprop.distributed.communication import Traffic

SETTINGS: dict[str, dict[str, Any]] = {
    "M": M,
    "S": S,
    "closed form": EXACT,
    "default": DEFAULT,
    "spectral": SPECTRAL,
    "averaged": AVERAGED,
    "means": {**M, "local_reduction": "mean"},
    "softmax": {**M, "output_transfer": "softmax"},
    "gate": {**S, "lr": 0.5, "gate": True},
    "cap": {**M, "lr": 0.5, "cap": 0.01},
    "outer": {**M, "apply": "gradient", "outer": outer},
    "outer and cap": {**S, "apply": "gradient", "outer": outer, "cap": 1e-3},
    "some rows": {**M, "max_rows": 5},
    "diagonal": {"gram": "diagonal"},
    "diagonal of S": {**EXACT, "gram": "diagonal"},
    "accumulated": DEFAULT,
    "accumulated M": M,
    "frozen bias": DEFAULT,
    "frozen weight": M,
}
# By torch.compile; the first one in `make test`.
COMPILED = ("M", "S", "closed form", "default", "accumulated M")
SHAPES = {"rows": (12, 6), "sequences": (3, 4, 6)}


def network() -> nn.Sequential:
    """Return a model of which no layer is divided evenly among two processes."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 5)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(5, 6)).double()


def parallel(model: nn.Sequential, world: int, device: str = "cpu") -> nn.Sequential:
    """Divide two layers by rows and one by columns, and replicate one."""
    mesh = init_device_mesh(device, (world,))
    plan: Any = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "2": RowwiseParallel(input_layouts=Replicate()),
        "6": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    distribute_module(model[4], mesh, None, _as_replicated, _as_local)
    return model


def _as_replicated(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(inputs[0], mesh, [Replicate()])


def _as_local(_: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
    found: Tensor = output.to_local()
    return found


def train(
    model: nn.Sequential,
    name: str,
    shape: tuple[int, ...],
    *,
    compiled: bool = False,
    steps: int = 3,
) -> LocoProp:
    """Take some steps."""
    settings = {"output_transfer": "sigmoid", **SETTINGS[name]}
    if name.startswith("frozen"):
        getattr(model[2], name.split()[1]).requires_grad_(False)
    opt = LocoProp(model, fallback=lambda p: AdamW(p, lr=1e-2), **settings)
    if compiled:
        torch.compiler.reset()
        model.compile(backend="aot_eager")  # type: ignore[no-untyped-call]
    numbers = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.rand(*shape, generator=numbers).double().to(next(model.parameters()).device)
        for x in batch.chunk(2 if name.startswith("accumulated") else 1):
            binary_cross_entropy_with_logits(model(x), x).backward()
        opt.step()
        opt.zero_grad()
    return opt


def _in_a_process(rank: int, folder: Path, world: int, runs: list[tuple[str, str, bool]]) -> None:
    found: dict[str, list[Tensor]] = {}
    for name, shape, compiled in runs:
        model = parallel(network(), world)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*drift apart.*")
            opt = train(model, name, SHAPES[shape], compiled=compiled)
        assert opt.summary().count("locoprop") == 4
        assert "BackProp" not in opt.summary()
        found[f"{name}, {shape}, {compiled}"] = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    if rank == 0:
        torch.save(found, folder / "found.pt")
    _check_counts(rank, world)


def _check_counts(rank: int, world: int) -> None:
    """Compare the collectives of a step of a column- and a row-parallel layer with the formulas."""
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for name in ("S", "closed form", "M", "spectral"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
        parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
        opt = LocoProp(model, **{"output_transfer": "linear", **SETTINGS[name]})
        for step in range(12 if name == "spectral" else 2):
            model(torch.rand(12, 6).double()).square().mean().backward()
            with Counted() as counted:
                opt.step()
            opt.zero_grad()
            assert step == 0 or counted.traffic() == _expected(name, world, rank, step)


def _expected(name: str, world: int, rank: int, step: int) -> Traffic:
    """Return the traffic of a step with layers 6 → 8 → 5, with biases and 12 rows."""
    total = communication.of_all_layers(2, world)
    renews = step < 10 or step % 10 == 0
    rows = 12 if name != "spectral" or renews else 0
    total = total.plus(communication.row_parallel((5, 8), rows, world, rank, 8, bias=True))
    for n in (6, 8):
        own = communication.same_inputs()
        if name == "spectral":
            own = communication.spectral(n, 8, renews=False, agreement=False)
        total = total.plus(own)
    if name == "spectral":
        total = total.plus(communication.polar_factors([(5, 9), (8, 7)], world, rank, 8))
    return total


EAGER = [(name, shape, False) for name in SETTINGS for shape in SHAPES]


@pytest.mark.parametrize(
    "runs",
    [
        [*EAGER, (COMPILED[0], "sequences", True)],
        pytest.param(
            [(name, shape, True) for name in COMPILED for shape in SHAPES],
            marks=pytest.mark.distributed,
        ),
    ],
    ids=["some", "compiled"],
)
def test_processes_with_parallel_layers_are_one_process(
    runs: list[tuple[str, str, bool]], tmp_path: Path
) -> None:
    processes.run(_in_a_process, 2, tmp_path, 2, runs)
    found = torch.load(tmp_path / "found.pt")
    assert len(found) == len(runs)
    wrong = {}
    for run, tensors in found.items():
        name, shape, _ = run.split(", ")
        model = network()
        train(model, name, SHAPES[shape])
        for p, several, before in zip(
            model.parameters(), tensors, network().parameters(), strict=True
        ):
            assert torch.equal(p, before) != p.requires_grad
            if not torch.allclose(p, several, rtol=0, atol=1e-10):
                wrong[run] = float((p.detach() - several).abs().max())
    assert not wrong
