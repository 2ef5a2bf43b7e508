"""Counts the collectives of a step, and compares them with the formulas."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from sharded_cases import CASES, batch_bounds, loss_of, make_optimizer, network, sharded
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from torch_locoprop import LocoProp
from torch_locoprop.distributed import communication
from torch_locoprop.distributed.communication import Traffic
from torch_locoprop.fast import dispatch
from torch_locoprop.paper.gram import FULL, Structure
from torch_locoprop.stepping.several_processes.layer_part import EXCHANGES_WEIGHTS, GATHERS_ROWS

REDUCTIONS = (torch.ops.c10d.allreduce_,)
GATHERS = (torch.ops.c10d._allgather_base_, torch.ops.c10d.allgather_)
EXCHANGES = (torch.ops.c10d.alltoall_base_,)
SCATTERS = (torch.ops.c10d._reduce_scatter_base_,)
NAMES = (
    *("S", "closed form", "M", "M, many rows", "spectral", "spectral with agreement"),
    *("S in blocks", "closed form in blocks", "spectral in blocks"),
)
BLOCKS = Structure("block", 4)
OWNERS = (0, 1)  # of the two polar factors
ALL = (*REDUCTIONS, *GATHERS, *EXCHANGES, *SCATTERS)


class Counted(CommDebugMode):
    """PyTorch's count of collectives, with the bytes that each leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if packet in ALL:
            left = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.bytes[packet] = self.bytes.get(packet, 0) + left.numel() * left.element_size()
        return found

    def traffic(self) -> Traffic:
        counts = self.get_comm_counts()
        assert set(counts) <= set(ALL), counts
        parts: list[int] = []
        for packets in (REDUCTIONS, GATHERS, EXCHANGES, SCATTERS):
            parts += [
                sum(counts.get(p, 0) for p in packets),
                sum(self.bytes.get(p, 0) for p in packets),
            ]
        return Traffic(*parts)


def expected(name: str, world: int, rank: int, rows: int, step: int) -> Traffic:
    """Return the traffic of a step of the model "smooth", whose layers are 6 → 8 → 6 with biases."""
    total = communication.of_all_layers(2, world)
    for n, d in ((6, 8), (8, 6)):
        structure = BLOCKS if "blocks" in name else FULL
        if name in ("S", "closed form", "S in blocks", "closed form in blocks"):
            total = total.plus(communication.through_gram(n, 8, structure))
        elif name == "M":
            total = total.plus(communication.by_rows(rows, n, world, 8))
        elif name == "M, many rows":
            total = total.plus(communication.by_iterations(d, n + 1, 4, world, 8))
        else:
            renews = step < 10 or step % 10 == 0
            agreement = name == "spectral with agreement"
            own = communication.spectral(
                n, 8, renews=renews, agreement=agreement, structure=structure
            )
            total = total.plus(own)
    if "spectral" in name:
        total = total.plus(communication.polar_factors([(6, 9), (8, 7)], world, rank, 8))
    return total


def check_images(rank: int, world: int) -> None:
    """Compare the collectives of a convolution in two calls of a step with the formulas."""
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3, padding=1), nn.Tanh())
    several = sharded(CASES["M"], model.double())
    opt = LocoProp(several, variant="locoprop-m", lr=1e-3)
    for rows in (3, 2 + rank):  # the last process has most
        several(torch.rand(rows, 6).double()).square().mean().backward()
    with Counted() as counted:
        opt.step()
    numbers = 6 * (3 + 2 + world - 1)
    images = communication.by_images(2, 1, numbers, world, 8)
    assert counted.traffic() == communication.of_all_layers(1, world).plus(images)


def check_counts(rank: int, world: int, steps: int = 2, *, replayed: bool = False) -> None:
    """Compare a step's collectives with the formulas, in some steps, or twelve spectral steps.

    Compare also how many polar factors this process computes with the matrices that it owns.

    Args:
        rank: the rank of this process.
        world: the number of processes.
        steps: number of steps.
        replayed: the last steps are replays of CUDA graphs, in which no Python code computes.
    """
    for name in NAMES:
        case = CASES[name.removesuffix(", many rows")]
        model = sharded(case, network("smooth"))
        opt = make_optimizer(case, model)
        part, size = batch_bounds(case, rank, world), 24
        if "many rows" in name:
            part, size = slice(None), 40
        for step in range(12 if "spectral" in name else steps):
            x = torch.rand(size, 6).double()[part]
            loss_of(case, model(x), x).backward()  # type: ignore[no-untyped-call]
            counting = patch.object(dispatch, "polar", wraps=dispatch.polar)
            with Counted() as counted, counting as factors:
                opt.step()
            opt.zero_grad()
            owned = OWNERS.count(rank) if "spectral" in name else 0
            assert factors.call_count == owned or (replayed and step > 4), (name, rank)
            note = EXCHANGES_WEIGHTS if "many rows" in name else GATHERS_ROWS
            assert opt.summary().count(note) == (2 if name.startswith("M") else 0)
            recordings = [kind.recording for kind in opt._graphs._kinds]
            assert not replayed or step < 5 or name.startswith("closed") or any(recordings), name
            if step > 0:
                assert counted.traffic() == expected(name, world, rank, len(x), step), (name, step)
