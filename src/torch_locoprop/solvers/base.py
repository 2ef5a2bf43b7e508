"""What every solver of a local problem has in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torch_locoprop.paper.gram import Use
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Number, Tensors, spread


@dataclass(frozen=True)
class Numbers:
    """The numbers of one tensor's parameter group, or tensors of them for a population."""

    lr: Number  # η
    momentum: Number = 0.0  # μ or β₁
    decay: Number = 0.0  # ρ or β₂
    eps: Number = 0.0  # ε

    def at(self, rate: float, tensor: Tensor) -> Numbers:
        """For one local iteration on one tensor: the rate applied, and everything spread."""
        return Numbers(
            spread(self.lr * rate, tensor),
            spread(self.momentum, tensor),
            spread(self.decay, tensor),
            spread(self.eps, tensor),
        )


class Checked(dict[str, Tensor]):
    """New tensors, from a solver that has looked whether they and the new states are finite."""

    def __init__(self, tensors: Tensors, finite: Tensor) -> None:
        super().__init__(tensors)
        self.finite = finite  # bool [members], or [1] where there is one problem


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

    def use_of_rows(
        self, local_steps: int, number: int, state: Tensors, columns: int
    ) -> Use | None:
        """What a layer's problem of that number with a squared loss takes of the rows; None: all.

        ``state`` is that of the first trained tensor, ``columns`` how many of ``[W b]`` are trained.
        """
        return None

    def is_fixed_work(self, number: int, weight: Tensor, bent: bool) -> bool:
        """Whether a layer's problem of that number is solved by a fixed sequence of device operations.

        Such can be replayed as a CUDA graph, which runs none of this code again. The weight is a
        matrix ``[..., d, n]``, and ``bent`` is whether the loss has a transfer inside.
        """
        return False

    def phase(self, number: int) -> int:
        """Equal for the numbers of problems that are the same work."""
        return 0


LOCAL_DECAYS = ("linear", "constant")


def local_rate(t: int, local_steps: int, local_decay: str) -> float:
    """The factor of the learning rate in local iteration t = 0..T−1."""
    return max(1 - t / local_steps, 0.25) if local_decay == "linear" else 1.0
