"""Time and memory of a step of several methods.

Each has a process of its own, so that none finds what another has left in memory. They take turns: a
machine that is slower for a while, as shared ones are, is slower for all of them.
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

from torch_locoprop.study.training import machine

# Steps, turns, and steps of each, in full. A factorisation is renewed every 20 steps; on a GPU, how
# that is replayed has settled when it was done ten times.
WARM_UP, TURNS, TURN = 200, 9, 20


class InProcess:
    """Runs what is submitted at once, here."""

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


def processes(count: int) -> ProcessPoolExecutor:
    """So many of them, which start anew: a GPU is not inherited."""
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def own_process() -> AbstractContextManager[Any]:
    return processes(1)


class Length(NamedTuple):
    """How long methods are timed."""

    warm_up: int
    turns: int
    turn: int  # steps of each

    @property
    def steps(self) -> int:
        """How many each of the methods makes."""
        return self.warm_up + self.turns * self.turn


def length(steps: int) -> Length:
    """In full, or about as long as one run where runs have fewer than 400 steps."""
    half = max(steps // 2, 1)
    turn = min(TURN, half)
    return Length(min(WARM_UP, half), min(TURNS, half // turn), turn)


def measured(task: Task, runs: Sequence[Run], device: str, length: Length) -> Mapping[str, Record]:
    """By the names of the methods, in the order of the runs."""
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


# ---- in the process of a method ------------------------------------------------------------------

_going: dict[str, Training] = {}


def _start(task: Task, run: Run, device: str, steps: int) -> None:
    _going[run.method] = Training(task, run, device)
    _going[run.method].advance(steps)
    # Not before: what cuDNN tries out in the first steps would count.
    machine.forget_peak(torch.device(device))


def _turn(method: str, steps: int) -> float:
    """Milliseconds of a step."""
    training = _going[method]
    training.seconds = 0.0
    training.advance(steps)
    return 1000 * training.seconds / steps


def _end(method: str) -> float:
    return machine.memory_mib(_going.pop(method).device)
