"""What a step costs beyond BackProp: the paper's formulas (Table 1) for a model, and measured.

`d₁` and `d₂` are the inputs and outputs of a layer, the paper's {d_i}; `b` is the batch size and `T`
the number of local iterations. The formulas are orders of growth; here they are evaluated with every
constant one, in numbers kept and in multiply-adds. A preconditioner that is renewed every k steps has
its cubic term divided by k.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_locoprop.baselines import kfac
from torch_locoprop.study.figures.memory import peak_bytes
from torch_locoprop.study.methods import registry
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.machine import matmul_precision
from torch_locoprop.study.training.step import TrainingStep

Layers = Sequence[tuple[int, int]]

MEMORY = {
    "backprop": "–",
    "adaptive": "Σ d₁·d₂",
    "locoprop": "Σ d₁·d₂ + b·(d₁ + d₂)",
    "kfac": "Σ d₁² + d₂²",
    "shampoo": "Σ d₁² + d₂²",
}
COMPUTATION = {
    "backprop": "–",
    "adaptive": "Σ d₁·d₂",
    "locoprop": "Σ b·T·d₁·d₂",
    "kfac": "Σ b·(d₁² + d₂²) + (d₁³ + d₂³)/k + b·d₁·d₂",
    "shampoo": "Σ (d₁³ + d₂³)/k",
}
KINDS = {
    "sgd": "backprop",
    "rmsprop": "adaptive",
    "adam": "adaptive",
    "locoprop-s": "locoprop",
    "locoprop-m": "locoprop",
    "kfac": "kfac",
    "shampoo": "shampoo",
}
"""The row of the paper's table that a method belongs to."""

METHODS = (
    *("sgd", "rmsprop", "adam", "locoprop-s", "locoprop-m"),
    *("kfac@1", "kfac@10", "kfac@100", "shampoo@1", "shampoo@10", "shampoo@100"),
)
BASELINE = "sgd"

WARM_UP = 5
LEAST_STEPS = 10
LEAST_SECONDS = 0.5
STEPS_FOR_MEMORY = 2


@dataclass(frozen=True)
class Cost:
    """A method's line of the table; what is measured is of a whole step, not beyond BackProp's."""

    method: str
    numbers: float
    operations: float
    step_ms: float
    peak_mib: float


def kind_of(method: str) -> str:
    """Return the row of the paper's table."""
    return KINDS[method.partition("@")[0]]


def layers_of(model: str) -> list[tuple[int, int]]:
    """Return `(d_in, d_out)` of every linear layer of the autoencoder."""
    encoder = architectures.sizes_of(model)
    widths = (*encoder, *encoder[-2::-1])
    return list(pairwise(widths))


def memory_formula(method: str, layers: Layers, b: int) -> float:
    """Return how many numbers the method keeps beyond BackProp, by the paper's table."""
    terms: dict[str, Callable[[int, int], float]] = {
        "backprop": lambda d_in, d_out: 0,
        "adaptive": lambda d_in, d_out: d_in * d_out,
        "locoprop": lambda d_in, d_out: d_in * d_out + b * (d_in + d_out),
        "kfac": lambda d_in, d_out: d_in**2 + d_out**2,
        "shampoo": lambda d_in, d_out: d_in**2 + d_out**2,
    }
    return sum(terms[kind_of(method)](*layer) for layer in layers)


def computation_formula(method: str, layers: Layers, b: int, T: int = 10) -> float:
    """Return how many multiply-adds a step takes beyond BackProp, by the paper's table."""
    k = int(method.partition("@")[2] or 1)
    terms: dict[str, Callable[[int, int], float]] = {
        "backprop": lambda d_in, d_out: 0,
        "adaptive": lambda d_in, d_out: d_in * d_out,
        "locoprop": lambda d_in, d_out: b * T * d_in * d_out,
        "kfac": lambda d_in, d_out: (
            b * (d_in**2 + d_out**2) + (d_in**3 + d_out**3) / k + b * d_in * d_out
        ),
        "shampoo": lambda d_in, d_out: (d_in**3 + d_out**3) / k,
    }
    return sum(terms[kind_of(method)](*layer) for layer in layers)


def measured(config: RunConfig) -> Cost:
    """Return the formulas' values for the model, and time and memory of a step on the device."""
    layers, b = layers_of(config.model), config.batch_size
    T = int(config.settings.get("local_steps", 10))
    with matmul_precision(config.precision):
        step_ms = _step_ms(config)  # first: what libraries set aside once is not counted below
        peak = _peak_mib(config)
    return Cost(
        config.method,
        memory_formula(config.method, layers, b),
        computation_formula(config.method, layers, b, T),
        step_ms,
        peak,
    )


def _prepare(config: RunConfig) -> tuple[nn.Sequential, Tensor]:
    """The model and a batch on the device. Random images do: no cost depends on what they show."""
    pixels = architectures.sizes_of(config.model)[0]
    numbers = torch.Generator().manual_seed(config.seed)
    images = torch.rand(config.batch_size, pixels, generator=numbers).to(config.device)
    return architectures.build(config.model, config.transfer, config.seed).to(config.device), images


def _optimizer(config: RunConfig, model: nn.Module) -> Optimizer:
    settings = {**config.settings, "weight_decay": config.weight_decay}
    return registry.get(config.method).build(model, settings)


def _step_ms(config: RunConfig) -> float:
    """The median over periods of the preconditioner, after a warm-up that builds all state."""
    every = int(config.settings.get("every", 1))
    model, images = _prepare(config)
    optimizer = _optimizer(config, model)
    step = TrainingStep(model, optimizer, images)
    step.set_rates([float(group["lr"]) for group in optimizer.param_groups])
    rows = torch.arange(len(images), device=config.device)
    # K-FAC renews its inverses in each of its first steps, whatever k is.
    warm_up = kfac.EARLY if kind_of(config.method) == "kfac" else WARM_UP
    for _ in range(math.ceil(warm_up / every) * every):
        step(rows)
    _wait(config.device)
    periods: list[float] = []
    while len(periods) * every < LEAST_STEPS or sum(periods) < LEAST_SECONDS:
        began = time.perf_counter()
        for _ in range(every):
            step(rows)
        _wait(config.device)
        periods.append(time.perf_counter() - began)
    return 1000 * median(periods) / every


def _peak_mib(config: RunConfig) -> float:
    """The most memory that optimizer, gradients and steps hold at a time beside model and images.

    The steps are plain ones, not replayed as a graph: what a graph sets aside is the library's.
    """
    model, images = _prepare(config)

    def work() -> None:
        optimizer = _optimizer(config, model)
        for _ in range(STEPS_FOR_MEMORY):
            reconstruction_loss(model(images), images).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    return peak_bytes(work, config.device) / 2**20


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
