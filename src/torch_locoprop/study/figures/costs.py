"""The cost of a step beyond BackProp: the formulas of the paper's Table 1 for a model, and measured.

The formulas are in the records of the methods; ``torch_locoprop.study.methods.step_cost`` defines their
symbols.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

from torch_locoprop.study import methods
from torch_locoprop.study.figures.catalog import newer_methods
from torch_locoprop.study.figures.memory import peak_bytes
from torch_locoprop.study.machine import matmul_precision
from torch_locoprop.study.methods import StepCost
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.training_step import TrainingStep

Layers = Sequence[tuple[int, int]]

PAPER = (
    *("sgd", "rmsprop", "adam", "locoprop-s", "locoprop-m"),
    *("kfac@1", "kfac@10", "kfac@100", "shampoo@1", "shampoo@10", "shampoo@100"),
)
"""The methods of the paper's Table 1, with the intervals of its figures."""

BASELINE = "sgd"
"""The method whose step is BackProp's own; the table shows what others take beyond it."""

WARM_UP = 5
LEAST_STEPS = 10
LEAST_SECONDS = 0.5
STEPS_FOR_MEMORY = 2


@dataclass(frozen=True)
class Cost:
    """The cost of a step of one method.

    Args:
        method: The name of the method.
        numbers: Numbers kept beyond BackProp, by formula.
        operations: Multiply-adds beyond BackProp, by formula.
        step_ms: Measured milliseconds of a whole step.
        peak_mib: Measured peak memory of a whole step in MiB, without model and images.
    """

    method: str
    numbers: float
    operations: float
    step_ms: float
    peak_mib: float


def method_names() -> tuple[str, ...]:
    """Return the methods of the table: the paper's, and newer ones whose record has a row."""
    newer = (name for name in newer_methods() if methods.get(name).cost is not None)
    return (*PAPER, *newer)


def row_of(method: str) -> StepCost:
    """Return the method's row of the paper's Table 1.

    Raises:
        ValueError: If the method has none.
    """
    row = methods.get(method).cost
    if row is None:
        raise ValueError(f"{method} has no row in the table of costs: its record has no cost.")
    return row


def layers_of(model: str) -> list[tuple[int, int]]:
    """Return `(d_in, d_out)` of every linear layer of the autoencoder."""
    encoder = architectures.sizes_of(model)
    widths = (*encoder, *encoder[-2::-1])
    return list(pairwise(widths))


def memory_formula(method: str, layers: Layers, b: int) -> float:
    """Return how many numbers the method keeps beyond BackProp, by the paper's Table 1."""
    row = row_of(method)
    return sum(row.numbers(d1, d2, b) for d1, d2 in layers)


def computation_formula(method: str, layers: Layers, b: int, T: int) -> float:
    """Return how many multiply-adds a step takes beyond BackProp, by the paper's Table 1."""
    row, k = row_of(method), int(method.partition("@")[2] or 1)
    return sum(row.operations(d1, d2, b, T, k) for d1, d2 in layers)


def measured(config: RunConfig) -> Cost:
    """Return the cost of a step: formulas for the model, time and memory measured on the device."""
    layers, b = layers_of(config.model), config.batch_size
    T = int(config.settings.get("local_steps", 10))
    with matmul_precision(config.precision):
        step_ms = _step_ms(
            config
        )  # first, so that memory that libraries allocate once is not counted
        peak = _peak_mib(config)
    return Cost(
        config.method,
        memory_formula(config.method, layers, b),
        computation_formula(config.method, layers, b, T),
        step_ms,
        peak,
    )


def _prepare(config: RunConfig) -> tuple[nn.Sequential, Tensor]:
    """Return the model and a batch of random images on the device."""
    pixels = architectures.sizes_of(config.model)[0]
    numbers = torch.Generator().manual_seed(config.seed)
    images = torch.rand(config.batch_size, pixels, generator=numbers).to(config.device)
    return config.build_model().to(config.device), images


def _step_ms(config: RunConfig) -> float:
    """Return the median time of a step over periods of the preconditioner, after a warm-up."""
    every = int(config.settings.get("every", 1))
    model, images = _prepare(config)
    optimizer = config.build_optimizer(model)
    step = TrainingStep(model, reconstruction_loss, optimizer)
    warm_up = methods.get(config.method).first_steps or WARM_UP
    for _ in range(math.ceil(warm_up / every) * every):
        step(images, images)
    _wait(config.device)
    periods: list[float] = []
    while len(periods) * every < LEAST_STEPS or sum(periods) < LEAST_SECONDS:
        began = time.perf_counter()
        for _ in range(every):
            step(images, images)
        _wait(config.device)
        periods.append(time.perf_counter() - began)
    return 1000 * median(periods) / every


def _peak_mib(config: RunConfig) -> float:
    """Return the peak memory of optimizer, gradients and steps, without model and images.

    The steps do not use CUDA graphs, whose memory pools are not part of the method.
    """
    model, images = _prepare(config)

    def work() -> None:
        optimizer = config.build_optimizer(model)
        for _ in range(STEPS_FOR_MEMORY):
            reconstruction_loss(model(images), images).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    return peak_bytes(work, config.device) / 2**20


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
