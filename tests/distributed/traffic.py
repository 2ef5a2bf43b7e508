"""Counts the collectives of a step, and compares them with the formulas."""

from __future__ import annotations

from typing import Any

import torch
from sharded_cases import CASES, batch_bounds, loss_of, make_optimizer, network, sharded
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_locoprop.distributed import communication
from torch_locoprop.distributed.communication import Traffic

REDUCTIONS = (torch.ops.c10d.allreduce_,)
GATHERS = (torch.ops.c10d._allgather_base_, torch.ops.c10d.allgather_)


class Counted(CommDebugMode):
    """PyTorch's count of collectives, with the bytes that each leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if packet in (*REDUCTIONS, *GATHERS):
            left = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.bytes[packet] = self.bytes.get(packet, 0) + left.numel() * left.element_size()
        return found

    def traffic(self) -> Traffic:
        counts = self.get_comm_counts()
        assert set(counts) <= {*REDUCTIONS, *GATHERS}, counts
        parts: list[int] = []
        for packets in (REDUCTIONS, GATHERS):
            parts += [
                sum(counts.get(p, 0) for p in packets),
                sum(self.bytes.get(p, 0) for p in packets),
            ]
        return Traffic(*parts)


def expected(name: str, world: int, rows: int, step: int) -> Traffic:
    """Return the traffic of a step of the model "smooth", whose layers are 6 → 8 → 6 with biases."""
    total = communication.of_all_layers(2, world)
    for n, d in ((6, 8), (8, 6)):
        if name in ("S", "closed form"):
            total = total.plus(communication.through_gram(n, 8))
        elif name == "M":
            total = total.plus(communication.by_rows(rows, n, world, 8))
        else:
            renews = step < 10 or step % 10 == 0
            own = communication.spectral(
                d, n + 1, n, world, 8, renews=renews, agreement=name == "spectral with agreement"
            )
            total = total.plus(own)
    return total


def check_counts(rank: int, world: int) -> None:
    """Compare a step's collectives with the formulas, at the second and the twelfth step."""
    for name in ("S", "closed form", "M", "spectral", "spectral with agreement"):
        case = CASES[name]
        model = sharded(case, network("smooth"))
        opt = make_optimizer(case, model)
        part = batch_bounds(case, rank, world)
        for step in range(12 if "spectral" in name else 2):
            x = torch.rand(24, 6).double()[part]
            loss_of(case, model(x), x).backward()  # type: ignore[no-untyped-call]
            with Counted() as counted:
                opt.step()
            opt.zero_grad()
            if step > 0:
                assert counted.traffic() == expected(name, world, len(x), step), (name, step)
