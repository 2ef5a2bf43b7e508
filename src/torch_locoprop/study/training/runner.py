"""One training run, from its configuration to a folder of results.

    from torch_locoprop.study.training.config import RunConfig
    from torch_locoprop.study.training.runner import run

    result = run(RunConfig("locoprop-m", epochs=10), "runs/first")

A run that was stopped by Ctrl-C or a kill continues with `resume=True` from its last checkpoint. Its
result is bit-identical to that of an uninterrupted run. Ctrl-C and SIGTERM save a checkpoint after the
current step; a second Ctrl-C stops at once.

All images are kept on the device. Within an epoch the host does not wait for the device, except for
methods that factorise matrices: K-FAC, Shampoo, natural-s, PSGD and closed forms.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import (
    environment,
    forget_peak,
    matmul_precision,
    memory_mib,
    own_randomness,
    random_states,
    restore_random_states,
)
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.training.run_folder import Checkpoint, Metrics, PartOfEpoch, RunFolder
from torch_locoprop.study.training.run_result import RunResult, result_of
from torch_locoprop.study.training.stop_signals import StopRequest, deferred_signals
from torch_locoprop.training_step import TrainingStep

ROWS = 10_000
"""Images evaluated at a time."""

DIVERGED = 10.0
"""A run ends as diverged when its train loss exceeds that of the untrained model by this factor."""

CHECKPOINT_SECONDS = 10.0
"""Seconds between checkpoints, except for the last one; a kill loses at most this much work."""


def run(
    config: RunConfig,
    folder: Path | str,
    *,
    resume: bool = False,
    data: Dataset | None = None,
    restart: bool = False,
    on_resume: Callable[[Checkpoint], None] = lambda checkpoint: None,
    on_epoch: Callable[[Metrics], None] = lambda metrics: None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> RunResult:
    """Train until the last epoch, or until the loss diverges, and return the result.

    Args:
        config: The configuration.
        folder: The folder of the run.
        resume: Continue the run in the folder; a finished run is returned unchanged.
        data: The images, if they are loaded already.
        restart: With `resume`, start an unfinished run again from epoch 0. Its metrics and its
            checkpoint are kept with the ending `.old`.
        on_resume: Called with the checkpoint from which the run continues.
        on_epoch: Called with the metrics of each epoch.
        checkpoint_seconds: The shortest time between two checkpoints.

    Raises:
        NoCheckpointError: If the run in the folder has no checkpoint to continue from.
        RunError: If the folder has another run, or a run and `resume` is False.
        ValueError: If the configuration does not fit the data or this machine.
    """
    data = datasets.load(config.dataset) if data is None else data
    check_data(config, data)
    files = RunFolder(Path(folder))
    description = _description(config, data)
    if files.exists:
        if not resume:
            raise RunError(
                f"{files.path} already has a run. Continue it with resume (--resume), or choose "
                "another folder (--out)."
            )
        files.check_same(description)
        result = result_of(files.path)
        if result.finished:
            return result
    with matmul_precision(config.precision), own_randomness(config.device):
        training = _Training(config, data)
        with files.locked():
            if files.exists:  # another process may have started in the meantime
                files.check_same(description)
            else:
                files.begin(description)
            elsewhere = files.other_environment(description)
            if elsewhere:
                warnings.warn(
                    f"{files.path} was started in another environment ({elsewhere}). Its numbers may "
                    "differ in the last digits from those of a run in one environment.",
                    stacklevel=2,
                )
            if restart:
                files.set_aside()
            files.check_can_resume()
            checkpoint = files.checkpoint()
            if checkpoint is not None:
                training.restore(checkpoint)
                on_resume(checkpoint)
            with deferred_signals() as stop:
                _train(training, files, on_epoch, checkpoint_seconds, stop)
    return RunResult(files.path, config, tuple(training.metrics))


def _train(
    training: _Training,
    files: RunFolder,
    on_epoch: Callable[[Metrics], None],
    checkpoint_seconds: float,
    stop: StopRequest,
) -> None:
    """Train, evaluate and save, epoch by epoch, until a signal asks to stop."""
    saved, unsaved = -math.inf, False
    if training.metrics:
        files.write_metrics(training.metrics)
        saved = time.monotonic()
    while not training.finished and not stop.is_set:
        row = training.epoch(stop) if training.metrics else training.evaluate(0.0)
        if row is not None:
            training.metrics.append(row)
        unsaved = True
        if training.finished or time.monotonic() - saved >= checkpoint_seconds:
            files.write_checkpoint(training.checkpoint())
            saved, unsaved = time.monotonic(), False
        files.write_metrics(training.metrics)
        if row is not None:
            on_epoch(row)
    if unsaved:  # a signal came before the next checkpoint was due
        files.write_checkpoint(training.checkpoint())


class _Training:
    """Model, optimizer and images on the device, and the metrics so far."""

    def __init__(self, config: RunConfig, data: Dataset) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.train, self.test = (images.to(self.device) for images in (data.train, data.test))
        self.model = config.build_model().to(self.device)
        self.optimizer = config.build_optimizer(self.model)
        self.peak_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.rate = config.rate(len(self.train))
        self.step = TrainingStep(self.model, reconstruction_loss, self.optimizer)
        self.metrics: list[Metrics] = []
        self.part: PartOfEpoch | None = None
        forget_peak(self.device)

    @property
    def finished(self) -> bool:
        done = len(self.metrics) == self.config.epochs + 1
        return done or (bool(self.metrics) and self.metrics[-1].diverged)

    def checkpoint(self) -> Checkpoint:
        optimizer = self.optimizer.state_dict()
        for group in optimizer["param_groups"]:
            group["lr"] = float(group["lr"])  # on a GPU it may live on the device
        return Checkpoint(self.model.state_dict(), optimizer, tuple(self.metrics), self.part)

    def restore(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.metrics, self.part = list(checkpoint.metrics), checkpoint.part

    def epoch(self, stop: StopRequest) -> Metrics | None:
        """Train the rest of the next epoch and return its metrics; None if a signal stops it."""
        index = len(self.metrics) - 1
        seed = epoch_seed(self.config.seed, index)
        order = torch.randperm(len(self.train), generator=Generator().manual_seed(seed))
        batches = torch.split(order.to(self.device), self.config.batch_size)
        part, self.part = self.part or PartOfEpoch(0, 0.0, 0, {}), None
        if part.steps:
            restore_random_states(part.random)
        else:
            torch.manual_seed(seed)  # for methods that draw random numbers
            np.random.seed(seed % 2**32)
        before = self._refusals() - part.refused
        self._synchronize()
        began = time.perf_counter() - part.seconds
        broken = False
        try:
            for step in range(part.steps, len(batches)):
                if stop.is_set:
                    self._synchronize()
                    seconds, refused = time.perf_counter() - began, self._refusals() - before
                    random = random_states(self.device)
                    self.part = PartOfEpoch(step, seconds, refused, random)
                    return None
                self._step(batches[step], self.rate(index, step))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # of a factor that is not finite
            broken = True
        self._synchronize()
        row = self.evaluate(self.metrics[-1].seconds + time.perf_counter() - began)
        if broken:
            return replace(row, train_loss=math.nan, diverged=True)
        return replace(row, diverged=row.diverged or self._refusals() - before == len(batches))

    def _step(self, rows: Tensor, rate: float) -> None:
        """Train with the images of these rows at this factor of the peak rates."""
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * rate
        images = self.train[rows]
        self.step(images, images)

    def _refusals(self) -> int:
        """Return the number of steps that every layer skipped because its solution was not finite."""
        skipped = getattr(self.optimizer, "skipped_updates", {})
        return min(skipped.values(), default=0)

    def evaluate(self, seconds: float) -> Metrics:
        """Return the metrics of the current weights."""
        train_loss, test_loss = (_loss(self.model, images) for images in (self.train, self.test))
        first = self.metrics[0].train_loss if self.metrics else train_loss
        diverged = not train_loss <= DIVERGED * first or not math.isfinite(train_loss)
        memory = max(memory_mib(self.device), *(row.memory_mib for row in self.metrics[-1:]), 0.0)
        return Metrics(len(self.metrics), train_loss, test_loss, seconds, memory, diverged)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def check_data(config: RunConfig, data: Dataset) -> None:
    """Raise a ValueError unless the configuration fits these images and this machine."""
    if data.name != config.dataset:
        raise ValueError(f"The configuration is for {config.dataset}, and the data is {data.name}.")
    pixels, inputs = data.train.shape[1], architectures.sizes_of(config.model)[0]
    if inputs != pixels:
        raise ValueError(
            f"Invalid model={config.model!r}. Its first width must be {pixels}, the number of "
            f"pixels of {data.name}, not {inputs}."
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("Invalid device='cuda'. torch finds no GPU; use device='cpu'.")


def _description(config: RunConfig, data: Dataset) -> dict[str, Any]:
    return {
        "config": config.to_dict(),
        "data": data.metadata,
        "environment": environment(config.device),
    }


@torch.no_grad()
def _loss(model: nn.Module, images: Tensor) -> float:
    """Return the mean loss of all images; only here the host waits for the device."""
    total = torch.zeros((), dtype=torch.float64, device=images.device)
    for part in torch.split(images, ROWS):
        total += reconstruction_loss(model(part), part).double() * len(part)
    return total.item() / len(images)


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of one epoch, by a hash, so that seeds of different runs do not overlap."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:8]) >> 1
