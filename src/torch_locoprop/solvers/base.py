"""What every solver of a local problem has in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torch_locoprop.problem import LocalProblem

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Numbers:
    """The numbers of one tensor's parameter group; any may be a tensor that broadcasts."""

    lr: float  # η
    momentum: float = 0.0  # μ or β₁
    decay: float = 0.0  # ρ or β₂
    eps: float = 0.0  # ε


class Solver:
    """Finds (approximately) the solution of a local problem; holds no state of its own.

    ``states`` maps each trained tensor's name to what the last call returned for it ({} at first).
    """

    name: ClassVar[str]

    def solve(
        self,
        problem: LocalProblem,
        states: dict[str, Tensors],
        numbers: dict[str, Numbers],
        local_steps: int,
        local_decay: str,
    ) -> tuple[Tensors, dict[str, Tensors]]:
        """Return the new tensors and the new states; change neither argument."""
        raise NotImplementedError


LOCAL_DECAYS = ("linear", "constant")


def local_rate(t: int, local_steps: int, local_decay: str) -> float:
    """The factor of the learning rate in local iteration t = 0..T−1."""
    return max(1 - t / local_steps, 0.25) if local_decay == "linear" else 1.0
