"""Measure the time and the memory of one training step of several methods.

Each method runs in a process of its own, so that its memory is not affected by the others. The methods
take turns: if the machine is slow for a while, all of them are measured during that time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from training import Record, Run, Task, Training

from torch_locoprop.study import machine

# The closed form factorises XᵀX every 20 steps, so a turn contains one factorisation. On a GPU, no CUDA
# graph is recorded any more after ten of them.
WARM_UP, TURNS, TURN = 200, 9, 20  # steps before the first turn; turns; steps in a turn


class InProcess:
    """A replacement of `ProcessPoolExecutor` that runs functions at once in this process."""

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


def processes(count: int) -> ProcessPoolExecutor:
    """Return a pool of processes that are spawned: forked ones cannot use CUDA."""
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def own_process() -> AbstractContextManager[Any]:
    return processes(1)


class Length(NamedTuple):
    """The length of a measurement of one method.

    Args:
        warm_up: steps before the first turn.
        turns: number of turns.
        turn: steps in a turn.
    """

    warm_up: int
    turns: int
    turn: int

    @property
    def steps(self) -> int:
        """The number of steps that each method takes."""
        return self.warm_up + self.turns * self.turn


def length(steps: int) -> Length:
    """Return the length for runs of `steps` steps.

    Below 400 steps the measurement is shortened to about as many steps as one run has.
    """
    half = max(steps // 2, 1)
    turn = min(TURN, half)
    return Length(min(WARM_UP, half), min(TURNS, half // turn), turn)


def measured(task: Task, runs: Sequence[Run], device: str, length: Length) -> Mapping[str, Record]:
    """Measure the method of each run.

    Returns:
        For each method: the median of milliseconds for each step over the turns (`ms_per_step`), the
        milliseconds in each turn (`ms_in_turns`) and the peak memory (`memory_mib`).
    """
    turns: dict[str, list[float]] = {run.method: [] for run in runs}
    with ExitStack() as stack:
        own = {run.method: stack.enter_context(own_process()) for run in runs}
        started = [
            own[run.method].submit(_start, task, run, device, length.warm_up) for run in runs
        ]
        for each in started:
            each.result()
        for _ in range(length.turns):
            for method, found in turns.items():
                found.append(own[method].submit(_turn, method, length.turn).result())
        memory = {method: own[method].submit(_end, method).result() for method in turns}
    return {
        method: {
            "ms_per_step": round(statistics.median(found), 4),
            "ms_in_turns": [round(each, 4) for each in found],
            "memory_mib": round(memory[method], 1),
        }
        for method, found in turns.items()
    }


# ---- functions that run in the process of one method -----------------------------------------------

_going: dict[str, Training] = {}


def _start(task: Task, run: Run, device: str, steps: int) -> None:
    _going[run.method] = Training(task, run, device)
    _going[run.method].advance(steps)
    # After the warm-up: the algorithms that cuDNN tries out in the first steps need more memory.
    machine.forget_peak(torch.device(device))


def _turn(method: str, steps: int) -> float:
    """Take some steps; return the milliseconds for each."""
    training = _going[method]
    training.seconds = 0.0
    training.advance(steps)
    return 1000 * training.seconds / steps


def _end(method: str) -> float:
    return machine.memory_mib(_going.pop(method).device)
