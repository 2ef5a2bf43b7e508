"""The interface of a solver of local problems, and the numbers that all solvers take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from torch_locoprop.paper.gram import FULL, RowUse, Structure
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import LocalLoss
from torch_locoprop.paper.tensors import Number, Tensors, spread

States = dict[str, Tensors]  # what a solver keeps between steps, by name of the tensor


@dataclass(frozen=True)
class Numbers:
    """The numbers of one tensor's parameter group, or tensors ``[K]`` of them for a population.

    Args:
        lr: learning rate η.
        momentum: μ, or β₁ of Adam.
        decay: ρ, or β₂ of Adam.
        eps: ε.
    """

    lr: Number
    momentum: Number = 0.0
    decay: Number = 0.0
    eps: Number = 0.0

    def at(self, rate: float, tensor: Tensor) -> Numbers:
        """Return the numbers for one local iteration on one tensor.

        Args:
            rate: factor of the learning rate in this iteration.
            tensor: the tensor that moves; numbers ``[K]`` are shaped to multiply it.
        """
        return Numbers(
            spread(self.lr * rate, tensor),
            spread(self.momentum, tensor),
            spread(self.decay, tensor),
            spread(self.eps, tensor),
        )


class Checked(dict[str, Tensor]):
    """New tensors from a solver that has checked whether they and the new states are finite."""

    def __init__(self, tensors: Tensors, finite: Tensor) -> None:
        super().__init__(tensors)
        self.finite = finite  # bool [members], or [1] for a single problem


class Solver:
    """Finds the solution of a local problem, exactly or by iterations; holds no state of its own.

    Subclass it for a solver of your own, and pass an instance as ``LocoProp(model, solver=...)``.
    """

    name: ClassVar[str]
    # True: solves weight and bias together, without iterations.
    closed_form: ClassVar[bool] = False
    # True: weight and bias have one state together, which the first of them holds.
    joint_state: ClassVar[bool] = False

    # Values of settings that an optimizer with this solver starts from, where they are not the table's.
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    # Settings that a layer's weight and bias must share, because one system is solved for both.
    joint_settings: ClassVar[tuple[str, ...]] = ()
    # Settings of the optimizer that have no effect on the solution. A subclass that uses a setting
    # which its base class ignores declares its own `ignores`.
    ignores: ClassVar[frozenset[str]] = frozenset()
    # True: a warning names ignored settings that users give. The first-order solvers and the closed
    # form give none, because they are often compared under one set of settings.
    warns_of_ignored: ClassVar[bool] = True
    # The solver's learning rate over that of AdamW for parameters without a local problem; None if the
    # two cannot be compared.
    over_fallback: ClassVar[float | None] = None
    stateless: ClassVar[bool] = False  # True: keeps nothing between steps
    # Entries of the state whose first dimension has the outputs of the layer. Processes that divide the
    # outputs among them divide these entries, and have equal copies of all other entries.
    row_state: ClassVar[frozenset[str]] = frozenset()

    def solve(
        self,
        problem: LocalProblem,
        states: States,
        numbers: dict[str, Numbers],
        local_steps: int,
        local_decay: str,
    ) -> tuple[Tensors, States]:
        """Return the new tensors and the new states; change neither argument.

        Args:
            problem: the layer's local problem.
            states: for each trained tensor what the last call returned, ``{}`` at first.
            numbers: learning rate and other numbers of each trained tensor.
            local_steps: number of iterations T.
            local_decay: schedule of the learning rate over them, one of ``LOCAL_DECAYS``.
        """
        raise NotImplementedError

    def empty_states(self, start: Tensors, bent: bool, *, structure: Structure = FULL) -> States:
        """Return states with the entries and shapes that :meth:`solve` returns, for tools to fill.

        Args:
            start: the tensors that are trained, by name.
            bent: True if the local loss contains a transfer.
            structure: which entries of XᵀX the solver gets; given only if these are not all.
        """
        return {name: {} for name in start}

    def serves(self, loss: LocalLoss) -> bool:
        """Return True if the solver can solve problems with this local loss."""
        return True

    def without_rows(self) -> Solver | None:
        """Return the solver of a layer whose gradient is known but not its rows; None: plain SGD."""
        return None

    def use_of_rows(
        self,
        local_steps: int,
        number: int,
        state: Tensors,
        columns: int,
        *,
        structure: Structure = FULL,
    ) -> RowUse | None:
        """Return what the solution of a problem with a squared loss needs of the rows; None: all.

        Args:
            local_steps: number of iterations T.
            number: how many problems the layer has had before.
            state: the state of the first trained tensor.
            columns: how many columns of ``[W b]`` are trained.
            structure: which entries of XᵀX the solver gets; given only if these are not all.
        """
        return None

    def is_fixed_work(self, number: int, weight: Tensor, bent: bool) -> bool:
        """Return True if the solution is a fixed sequence of device operations.

        Such a solution can be replayed as a CUDA graph, which runs none of the solver's Python again.

        Args:
            number: how many problems the layer has had before.
            weight: the weight as a matrix ``[..., d, n]``.
            bent: True if the local loss contains a transfer.
        """
        return False

    def renews(self, number: int) -> bool:
        """Return True if the problem of this number renews what the solver keeps of earlier inputs."""
        return False

    def phase(self, number: int) -> int:
        """Return equal values for problem numbers that are solved by the same sequence of work."""
        return 0
