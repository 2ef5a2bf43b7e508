"""Train K configurations of one method of factorised matrices together, such as Muon or K-FAC.

    from torch_locoprop.study.training.config import RunConfig
    from torch_locoprop.study.training.matrix_population import train_together

    metrics = train_together([RunConfig("muon", {"lr": lr}) for lr in (1e-3, 3e-3)])

The counterpart of `torch_locoprop.study.training.population_run` for methods whose optimizers are not
written for a population. Members may differ in their numbers and in their seeds. Every member has the
batches, the schedule and the rule of divergence of a run of its own. Its losses are those of such a run
up to rounding, except with SOAP, whose update is compared with its package for square weights only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.study import methods
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import matmul_precision, own_randomness
from torch_locoprop.study.models import architectures
from torch_locoprop.study.training import matrix_updates
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.matrix_updates import Passes, Update
from torch_locoprop.study.training.members import Members
from torch_locoprop.study.training.population_run import Stop, transfers_of
from torch_locoprop.study.training.run_folder import Metrics
from torch_locoprop.study.training.runner import check_data, epoch_seed

NUMBERS = ("lr", "momentum", "decay", "eps", "damping", "clip", "averaging", "fall")
"""The settings in which members may differ, besides the weight decay."""

ROWS = 10_000
"""Images evaluated at a time, divided among the members."""


def is_supported(config: RunConfig) -> bool:
    """Return True if the method has a population here, with these settings."""
    grows = config.settings.get("agreement", 0.0) != 0.0
    return bool(methods.get(config.method).matrix_update) and not grows


def without_numbers(config: RunConfig) -> RunConfig:
    """Return what must be equal for members of one population."""
    same = {name: 0.0 if name in NUMBERS else value for name, value in config.settings.items()}
    return replace(config, settings=same, weight_decay=0.0, seed=0)


def train_together(
    configs: Sequence[RunConfig],
    data: Dataset | None = None,
    on_epoch: Stop = lambda rows: (),
) -> list[tuple[Metrics, ...]]:
    """Train all configurations and return the metrics of each.

    `on_epoch` is called after every epoch with the metrics of the members that are still training, by
    their places in `configs`, and returns the members to stop.
    """
    if not configs or any(without_numbers(c) != without_numbers(configs[0]) for c in configs):
        raise ValueError(
            f"{len(configs)} configurations that cannot be trained together. Give one or more that "
            f"differ only in their seeds and in {', '.join(NUMBERS)}."
        )
    if not is_supported(configs[0]):
        known = [name for name in methods.names() if methods.get(name).matrix_update]
        raise ValueError(f"Unknown method {configs[0].method!r}. Known: {', '.join(known)}.")
    data = datasets.load(configs[0].dataset) if data is None else data
    check_data(configs[0], data)
    config = configs[0]
    with (
        torch.no_grad(),
        matmul_precision(config.precision),
        own_randomness(config.device),
    ):
        training = Training(configs, data)
        ended = on_epoch(training.evaluate(0.0))
        while training.continue_without(ended):
            ended = on_epoch(training.epoch())
    return [tuple(rows) for rows in training.metrics]


class Training(Members):
    """A population whose layers are stacked matrices."""

    def __init__(self, configs: Sequence[RunConfig], data: Dataset) -> None:
        super().__init__(configs, data)
        config = self.config
        self.transfers = transfers_of(config)
        models = [architectures.build(c.model, c.transfer, c.seed).to(self.device) for c in configs]
        self.layers = _stacked(models)
        self.update = _update_of(config)(
            _numbers(configs, self.layers[0]["weight"]),
            config.settings.get("every", 1),
            len(self.layers),
            config.settings.get("early", 0),
        )
        self.seeds = [c.seed for c in configs]

    def keep(self, places: list[int]) -> None:
        index = torch.tensor(places, device=self.device)
        self.layers = [{name: t[index] for name, t in layer.items()} for layer in self.layers]
        self.update.keep(index)

    def epoch(self) -> dict[int, Metrics]:
        """Train for one epoch and return each member's line of the metrics."""
        began = time.perf_counter()
        seeds = sorted({self.seeds[member] for member in self.members})
        orders = {seed: self._order(seed) for seed in seeds}
        of_members = [orders[self.seeds[member]] for member in self.members]
        for step in range(math.ceil(len(self.train) / self.config.batch_size)):
            images = self._batch(of_members, step, shared=len(seeds) == 1)
            self.update.step(self.layers, self.passes(images), self.rate(self.epochs, step))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.epochs += 1
        return self.evaluate((time.perf_counter() - began) / len(self.members))

    def evaluate(self, seconds: float) -> dict[int, Metrics]:
        """Return the next lines of the metrics; `seconds` is each member's share of the time."""
        found = torch.stack([self._losses(images) for images in (self.train, self.test)])
        train_losses, test_losses = found.tolist()
        return self.noted(train_losses, test_losses, seconds, [0.0] * len(self.members))

    def _order(self, seed: int) -> Tensor:
        generator = Generator().manual_seed(epoch_seed(seed, self.epochs))
        return torch.randperm(len(self.train), generator=generator).to(self.device)

    def _batch(self, orders: list[Tensor], step: int, shared: bool) -> Tensor:
        """Return the images of a step, ``[K, rows, pixels]``."""
        part = slice(step * self.config.batch_size, (step + 1) * self.config.batch_size)
        if shared:
            images = self.train[orders[0][part]]
            return images.expand(len(orders), *images.shape)
        return self.train[torch.stack([order[part] for order in orders])]

    def uniform(self, seed: int, y: Tensor) -> Tensor:
        """Return the numbers that decide sampled labels: for all members those of a run of its own."""
        generator = Generator(y.device).manual_seed(seed)
        return torch.rand(y.shape[1:], dtype=y.dtype, device=y.device, generator=generator)

    def passes(self, images: Tensor) -> Passes:
        """Run the forward and the backward pass of all members."""
        inputs, pre_activations = self._forward(images)
        y = self.transfers[-1].f(pre_activations[-1])
        gradients = [
            {"weight": g.mT @ x, "bias": g.sum(-2)}
            for g, x in zip(
                self._backward(pre_activations, (y - images) / images.shape[-2]),
                inputs,
                strict=True,
            )
        ]

        def sampled(seed: int) -> list[Tensor]:
            return self._backward(pre_activations, y - (self.uniform(seed, y) < y).to(y.dtype))

        return Passes(inputs, gradients, sampled)

    def _forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the input and the pre-activation of every layer."""
        inputs, pre_activations = [], []
        for layer, transfer in zip(self.layers, self.transfers, strict=True):
            inputs.append(x)
            a = torch.baddbmm(layer["bias"].unsqueeze(-2), x, layer["weight"].mT)
            pre_activations.append(a)
            x = transfer.f(a)
        return inputs, pre_activations

    def _backward(self, pre_activations: list[Tensor], g: Tensor) -> list[Tensor]:
        """Return the gradient of every layer's pre-activation, from that of the last one."""
        found = [g]
        for m in range(len(self.layers) - 1, 0, -1):
            below = found[-1] @ self.layers[m]["weight"]
            found.append(self.transfers[m - 1].vjp(pre_activations[m - 1], below))
        return found[::-1]

    def _losses(self, images: Tensor) -> Tensor:
        """Return each member's mean loss over all images, ``[K]`` in float64."""
        total = torch.zeros(len(self.members), dtype=torch.float64, device=self.device)
        for part in torch.split(images, max(ROWS // len(self.members), 1)):
            target = part.expand(len(self.members), *part.shape)
            logits = self._forward(target)[1][-1]
            per_pixel = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
            total += per_pixel.sum((-2, -1)).double()
        return total / len(images)


def _update_of(config: RunConfig) -> type[Update]:
    """Return the class that the record of the method names."""
    update: type[Update] = getattr(matrix_updates, methods.get(config.method).matrix_update)
    return update


def _stacked(models: Sequence[nn.Module]) -> list[Tensors]:
    """Return the weights and biases of all models, layer by layer."""
    linear = [[m for m in model.modules() if isinstance(m, nn.Linear)] for model in models]
    return [
        {
            "weight": torch.stack([layer.weight.detach() for layer in members]),
            "bias": torch.stack([layer.bias.detach() for layer in members]),
        }
        for members in zip(*linear, strict=True)
    ]


def _numbers(configs: Sequence[RunConfig], like: Tensor) -> Tensors:
    """Return the settings that are numbers, ``[K]`` each."""
    settings = [{**c.settings, "weight_decay": c.weight_decay} for c in configs]
    return {
        name: torch.tensor([own[name] for own in settings], dtype=like.dtype, device=like.device)
        for name in (*NUMBERS, "weight_decay")
        if name in settings[0]
    }
