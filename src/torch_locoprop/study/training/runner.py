"""One training run, from its configuration to a folder of results.

    from torch_locoprop.study.training.config import RunConfig
    from torch_locoprop.study.training.runner import run

    result = run(RunConfig("locoprop-m", epochs=10), "runs/first")

A run that was stopped by Ctrl-C or a kill continues with `resume=True` from its last checkpoint. Its
result is bit-identical to that of an uninterrupted run. Ctrl-C and SIGTERM save a checkpoint after the
current step; a second Ctrl-C stops at once.

Several processes may train one model (:mod:`~torch_locoprop.study.training.processes`). All images are
kept on the device of each. Within an epoch the host does not wait for the device, except for
methods that factorise matrices: K-FAC, Shampoo, natural-s, PSGD and closed forms.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from torch_locoprop.study import methods
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
    revision,
)
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.training.processes import ALONE, Processes
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
    processes: Processes = ALONE,
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
        on_epoch: Called with the metrics of each epoch, in the first process.
        checkpoint_seconds: The shortest time between two checkpoints.
        processes: The processes that make this call together, each with its share of every batch.

    Raises:
        NoCheckpointError: If the run in the folder has no checkpoint to continue from.
        RunError: If the folder has another run, or a run and `resume` is False.
        ValueError: If the configuration does not fit the data or this machine.
    """
    data = datasets.load(config.dataset) if data is None else data
    processes.on_all(lambda: check_data(config, data, processes))
    files = RunFolder(Path(folder))
    description = _description(config, data, processes)
    finished = processes.on_first(lambda: _finished(files, description, resume))
    if finished is not None:
        return finished
    with (
        matmul_precision(config.precision),
        own_randomness(config.device),
        ExitStack() as stack,
    ):
        training = processes.on_all(lambda: _Training(config, data, processes))
        checkpoint = processes.on_first(lambda: _begun(files, description, restart, stack))
        if checkpoint is not None:
            training.restore(checkpoint)
            if processes.is_first:
                on_resume(checkpoint)
        with deferred_signals(again_at_once=not processes.are_several) as stop:
            _train(training, files, on_epoch, checkpoint_seconds, stop)
    return RunResult(files.path, config, tuple(training.metrics))


def _finished(files: RunFolder, description: Mapping[str, Any], resume: bool) -> RunResult | None:
    """Return the run in the folder if it is finished; None if it is to be trained."""
    files.check_described()
    if not files.exists:
        return None
    if not resume:
        raise RunError(
            f"{files.path} already has a run. Continue it with resume (--resume), or choose "
            "another folder (--out)."
        )
    files.check_same(description)
    result = result_of(files.path)
    return result if result.finished else None


def _begun(
    files: RunFolder, description: Mapping[str, Any], restart: bool, stack: ExitStack
) -> Checkpoint | None:
    """Begin the run, or return the checkpoint to continue from; the stack holds the folder's lock."""
    stack.enter_context(files.locked())
    if files.exists:  # another process may have started in the meantime
        files.check_same(description)
    else:
        files.begin(description)
    elsewhere = files.other_environment(description)
    if elsewhere:
        warnings.warn(
            f"{files.path} was started in another environment ({elsewhere}). Its numbers may "
            "differ in the last digits from those of a run in one environment.",
            stacklevel=3,
        )
    if restart:
        files.set_aside()
    files.check_can_resume()
    return files.checkpoint()


def _train(
    training: _Training,
    files: RunFolder,
    on_epoch: Callable[[Metrics], None],
    checkpoint_seconds: float,
    stop: StopRequest,
) -> None:
    """Train, evaluate and save, epoch by epoch, until a signal asks to stop."""
    processes = training.processes
    saved, unsaved = -math.inf, False
    if training.metrics:
        processes.on_first(lambda: files.write_metrics(training.metrics))
        saved = time.monotonic()
    while not training.finished and not processes.stop(stop):
        row = training.epoch(stop) if training.metrics else training.evaluate(0.0)
        if row is not None:
            training.metrics.append(row)
        unsaved = True
        due = time.monotonic() - saved >= checkpoint_seconds
        if training.finished or processes.largest(due):
            _save(training, files)
            saved, unsaved = time.monotonic(), False
        processes.on_first(lambda: files.write_metrics(training.metrics))
        if row is not None and processes.is_first:
            on_epoch(row)
    if unsaved:  # a signal came before the next checkpoint was due
        _save(training, files)


def _save(training: _Training, files: RunFolder) -> None:
    checkpoint = training.checkpoint()
    training.processes.on_first(lambda: files.write_checkpoint(checkpoint))


class _Training:
    """Model, optimizer and images on the device, and the metrics so far."""

    def __init__(self, config: RunConfig, data: Dataset, processes: Processes) -> None:
        self.config, self.processes = config, processes
        self.device = torch.device(config.device)
        self.train, self.test = (images.to(self.device) for images in (data.train, data.test))
        self.model = config.build_model().to(self.device)
        self.optimizer = config.build_optimizer(self.model)
        self.peak_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.rate = config.rate(len(self.train))
        trained = processes.wrap(self.model)
        self.step = TrainingStep(trained, reconstruction_loss, self.optimizer)
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
                if self.processes.stop(stop):
                    self._synchronize()
                    seconds, refused = time.perf_counter() - began, self._refusals() - before
                    random = random_states(self.device)
                    self.part = PartOfEpoch(step, seconds, refused, random)
                    return None
                self._step(batches[step], self.rate(index, step))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # a factor is not finite
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
        images = self.train[self.processes.share(rows)]
        self.step(images, images)

    def _refusals(self) -> int:
        """Return the number of steps that every layer skipped because its solution was not finite."""
        skipped = getattr(self.optimizer, "skipped_updates", {})
        return min(skipped.values(), default=0)

    def evaluate(self, seconds: float) -> Metrics:
        """Return the metrics of the current weights."""
        train_loss, test_loss = (
            _loss(self.model, images, self.processes) for images in (self.train, self.test)
        )
        first = self.metrics[0].train_loss if self.metrics else train_loss
        diverged = not train_loss <= DIVERGED * first or not math.isfinite(train_loss)
        memory = max(memory_mib(self.device), *(row.memory_mib for row in self.metrics[-1:]), 0.0)
        return Metrics(len(self.metrics), train_loss, test_loss, seconds, memory, diverged)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def check_data(config: RunConfig, data: Dataset, processes: Processes = ALONE) -> None:
    """Raise a ValueError unless the configuration fits these images, processes and this machine."""
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
    if processes.are_several:
        _check_shares(config, len(data.train), processes.size)


def _check_shares(config: RunConfig, images: int, processes: int) -> None:
    """Raise a ValueError unless the method and all batches can be divided among the processes."""
    if methods.get(config.method).whole_batch:
        raise ValueError(
            f"{config.method} needs the rows of the whole batch in one process. Train it without "
            "torchrun, or choose another method."
        )
    size = config.batch_size
    if size % processes:
        raise ValueError(
            f"Invalid batch_size={size} for {processes} processes. Must be divisible by their number, "
            f"such as {math.ceil(size / processes) * processes}."
        )
    if images % size % processes:
        raise ValueError(
            f"Invalid batch_size={size} for {processes} processes. The last batch of an epoch has "
            f"{images % size} of {images} images, which must be divisible by their number too."
        )


def _description(config: RunConfig, data: Dataset, processes: Processes) -> dict[str, Any]:
    several = {"processes": processes.size} if processes.are_several else {}
    return {
        "config": config.to_dict(),
        "data": data.metadata,
        "environment": {**environment(config.device), **several},
        "revision": revision(),
    }


@torch.no_grad()
def _loss(model: nn.Module, images: Tensor, processes: Processes) -> float:
    """Return the mean loss of all images; only here the host waits for the device."""
    total = torch.zeros((), dtype=torch.float64, device=images.device)
    for part in torch.split(images, ROWS)[processes.rank :: processes.size]:
        total += reconstruction_loss(model(part), part).double() * len(part)
    processes.add_up(total)
    return total.item() / len(images)


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of one epoch, by a hash, so that seeds of different runs do not overlap."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:8]) >> 1
