"""One training run of the autoencoder with one optimizer: the task, the loop and the record."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torch_locoprop import LocoProp
from torch_locoprop.baselines import Adam, RMSProp
from torch_locoprop.study.autoencoder import deep_autoencoder, reconstruction_loss
from torch_locoprop.study.schedule import warmup_then_decay

WARMUP = 0.05
"""Share of the steps spent on the warm-up: 5 of 100 epochs in the paper."""

WEIGHT_DECAY = 1e-5
"""Decoupled, the same for every method, as in the paper."""


@dataclass(frozen=True)
class Task:
    """What is the same for every method: images `[n, pixels]`, model, epochs, batches and seed."""

    train: Tensor
    test: Tensor
    sizes: tuple[int, ...]
    epochs: int
    batch_size: int
    seed: int

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps of a run."""
        return self.epochs * math.ceil(len(self.train) / self.batch_size)

    def model(self) -> nn.Sequential:
        """Return the untrained model, the same at every call."""
        return deep_autoencoder(self.sizes, generator=Generator().manual_seed(self.seed))

    def shuffled_epochs(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches of each epoch, in an order that is the same at every call."""
        order = Generator().manual_seed(self.seed)
        for _ in range(self.epochs):
            rows = torch.randperm(len(self.train), generator=order)
            yield torch.split(self.train[rows], self.batch_size)


@dataclass
class Run:
    """The record of a run: entry n is the state after n epochs. Evaluation is not on the clock."""

    train_loss: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.train_loss[-1])


def make_optimizer(model: nn.Module, optimizer: str, **settings: Any) -> Optimizer:
    """Return LocoProp or, as TensorFlow defines them and the paper compares with, RMSProp or Adam."""
    if optimizer == "locoprop":
        return LocoProp(model, output_transfer="sigmoid", weight_decay=WEIGHT_DECAY, **settings)
    kind = {"rmsprop": RMSProp, "adam": Adam}[optimizer]
    return kind(model.parameters(), weight_decay=WEIGHT_DECAY, **settings)


def train(
    task: Task, settings: Mapping[str, Any], on_epoch: Callable[[Run], None] = lambda run: None
) -> tuple[nn.Sequential, Run]:
    """Train until the end, or until the loss is not finite; `settings` as for `make_optimizer`."""
    model = task.model()
    optimizer = make_optimizer(model, **settings)
    warmup_steps = min(math.ceil(WARMUP * task.total_steps), task.total_steps - 1)
    schedule = LambdaLR(
        optimizer, warmup_then_decay(warmup_steps=warmup_steps, total_steps=task.total_steps)
    )
    run = Run()
    _record(run, model, task, seconds=0.0)
    for batches in task.shuffled_epochs():
        began = time.perf_counter()
        for images in batches:
            loss = reconstruction_loss(model(images), images)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        _record(run, model, task, seconds=time.perf_counter() - began)
        on_epoch(run)
        if run.diverged:
            break
    return model, run


@torch.no_grad()
def _record(run: Run, model: nn.Sequential, task: Task, seconds: float) -> None:
    """Append the losses of the model on all images, and `seconds` to the clock."""
    run.train_loss.append(reconstruction_loss(model(task.train), task.train).item())
    run.test_loss.append(reconstruction_loss(model(task.test), task.test).item())
    run.seconds.append((run.seconds[-1] if run.seconds else 0.0) + seconds)
