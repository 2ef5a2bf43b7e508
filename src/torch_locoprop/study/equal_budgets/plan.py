"""How long the rest of a study takes: from finished trials, or from a few steps of a method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from torch_locoprop.study.equal_budgets.task_study import TaskStudy
from torch_locoprop.study.equal_budgets.trials import Line
from torch_locoprop.study.equal_budgets.workers import config_of
from torch_locoprop.study.machine import matmul_precision, own_randomness
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.training_step import TrainingStep


@dataclass(frozen=True)
class Planned:
    """The rest of a study for one method on one task.

    Args:
        task: The name of the task.
        method: The method.
        done: Trials that have ended.
        left: Trials that have not; until the search has ended, an upper bound.
        seconds: Seconds of one trial.
        measured: True if the seconds are those of finished trials, False if they are estimated.
    """

    task: str
    method: str
    done: int
    left: int
    seconds: float
    measured: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can store."""
        return vars(self)


Estimate = Callable[[RunConfig, int], float]
"""Takes a configuration and the number of training images; returns the seconds of a run."""


def plan_of(study: TaskStudy, device: str, images: int, estimate: Estimate) -> list[Planned]:
    """Return the rest of a task's study, method by method.

    Args:
        study: The study of the task.
        device: The device on which it continues.
        images: The number of training images.
        estimate: Used for methods without a finished trial; ``seconds_of_run``, or a cheaper one.
    """
    results = study.results()
    return [_planned(study, method, results, device, images, estimate) for method in study.methods]


def _planned(
    study: TaskStudy,
    method: str,
    results: Sequence[Line],
    device: str,
    images: int,
    estimate: Estimate,
) -> Planned:
    own = [line for line in results if line["method"] == method]
    left = study.left(method, results)
    known = [_whole(line) for line in own if line["epoch"] > 0]
    if known or not left:
        seconds = median(known) if known else 0.0
    else:
        trial = {"method": method, "settings": {}, "seed": 0}
        seconds = estimate(config_of(trial, study.task, device), images)
    return Planned(study.name, method, len(own), left, seconds, bool(known))


def _whole(line: Line) -> float:
    """Return the seconds of a result, or of a whole run at its speed if it has diverged."""
    return float(line["wall"]) * int(line["config"]["epochs"]) / int(line["epoch"])


def seconds_of_run(config: RunConfig, images: int) -> float:
    """Return an estimate of the seconds of a run, from two steps and one forward pass."""
    steps = math.ceil(images / config.batch_size)
    with matmul_precision(config.precision), own_randomness(config.device):
        model = config.build_model().to(config.device)
        step = TrainingStep(model, reconstruction_loss, config.build_optimizer(model))
        pixels = architectures.sizes_of(config.model)[0]
        batch = torch.rand(min(config.batch_size, images), pixels, device=config.device)
        first, second = (_seconds(lambda: step(batch, batch), config) for _ in range(2))
        evaluation = _seconds(lambda: model(batch), config) * steps
    # The first step factorises, and then every k-th one.
    every = float(config.settings.get("every", math.inf))
    one_step = second + max(first - second, 0.0) / every
    return config.epochs * steps * one_step + (config.epochs + 1) * evaluation


def _seconds(work: Callable[[], object], config: RunConfig) -> float:
    began = time.perf_counter()
    work()
    if config.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def total_seconds(plan: Sequence[Planned], processes: int = 1) -> float:
    """Return the seconds that all trials of a plan take, in several processes at a time."""
    return sum(each.left * each.seconds for each in plan) / processes


def by_task(plan: Sequence[Planned]) -> Mapping[str, list[Planned]]:
    """Return the parts of a plan by the names of their tasks."""
    found: dict[str, list[Planned]] = {}
    for each in plan:
        found.setdefault(each.task, []).append(each)
    return found
