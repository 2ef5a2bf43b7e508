"""Seconds per epoch, from short runs without other work on the machine.

The seconds of a run are useless if it shared its machine with others, which cannot be detected later.
Therefore each line that is drawn by seconds is timed again for a few epochs, alone, on one machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_locoprop.study import methods
from torch_locoprop.study.figures.run_library import Found, Library, environment_key
from torch_locoprop.study.models import architectures
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.training_step import is_capturable

LEAST = 2
"""Epochs to time, after a first one that records CUDA graphs and selects kernels."""

SMALL = "3-2"
"""A model that is built at once."""


def timing_config(config: RunConfig, images: int) -> RunConfig:
    """Return the short run that times a configuration on this number of training images.

    A preconditioner that is renewed every k steps is timed over whole periods of k steps.
    """
    steps = math.ceil(images / config.batch_size)
    every = int(config.settings.get("every", 1))
    period = every // math.gcd(every, steps)
    return replace(config, epochs=1 + max(LEAST, period))


def replays_cuda_graphs(config: RunConfig) -> bool:
    """Return True if a run of the configuration replays its steps as CUDA graphs.

    That is decided by the optimizer, which is built for a small model. A method whose package is
    missing here runs eagerly.
    """
    method = methods.get(config.method)
    if config.device != "cuda" or method.missing_package:
        return False
    return is_capturable(replace(config, model=SMALL).build_optimizer(architectures.build(SMALL)))


def seconds_per_epoch(timing: Found) -> float:
    """Return the mean seconds of the epochs after the first."""
    first, last = timing.metrics[1], timing.metrics[-1]
    return (last.seconds - first.seconds) / (last.epoch - first.epoch)


@dataclass(frozen=True)
class Clock:
    """Seconds per epoch of some configurations, all from one machine.

    Args:
        seconds: Seconds per epoch by the position of the configuration.
        machine: The machine.
        left_out: The positions of configurations that were not timed on this machine.
        precision: The precision of the timings.
    """

    seconds: Mapping[int, float]
    machine: str
    left_out: tuple[int, ...]
    precision: str = ""


def timed(library: Library, wanted: Sequence[RunConfig], here: str | None) -> Clock:
    """Return the seconds of some configurations from the machine that timed most of them.

    Args:
        library: The runs.
        wanted: The configurations of the timing runs.
        here: The key of the machine that wins ties.
    """
    return of_one_machine([library.timings(config) for config in wanted], here)


def of_one_machine(found: Sequence[Sequence[Found]], here: str | None = None) -> Clock:
    """Return the seconds from the machine that has most of these timings.

    Args:
        found: The timings of each configuration.
        here: The key of the machine that wins ties.
    """
    machines = {environment_key(each): each for same in found for each in same}
    by_machine = {
        machine: {
            index: seconds_per_epoch(each)
            for index, same in enumerate(found)
            for each in same
            if environment_key(each) == machine and _usable(each)
        }
        for machine in machines
    }
    if not by_machine:
        return Clock({}, "", tuple(range(len(found))))
    best = max(by_machine, key=lambda machine: (len(by_machine[machine]), machine == here))
    seconds = by_machine[best]
    missing = tuple(index for index in range(len(found)) if index not in seconds)
    return Clock(seconds, _machine(machines[best]), missing, machines[best].config.precision)


def _usable(timing: Found) -> bool:
    """Return True if the timing has enough epochs after the first."""
    return len(timing.metrics) > LEAST


def _machine(found: Found) -> str:
    name = str(found.environment.get("machine", "unknown machine"))
    if found.config.device == "cuda":
        return f"{name}, {found.config.precision}"
    return f"{name}, {threads_text(found.environment)}"


def threads_text(environment: Mapping[str, Any]) -> str:
    """Return the number of threads as text: `1 thread`, `2 threads`."""
    threads = environment.get("threads")
    return f"{threads} thread{'' if threads == 1 else 's'}"
