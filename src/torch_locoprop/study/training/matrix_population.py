"""Train K configurations of one method of factorised matrices together, such as Muon or K-FAC.

    from torch_locoprop.study.training.config import RunConfig
    from torch_locoprop.study.training.matrix_population import train_together

    metrics = train_together([RunConfig("muon", {"lr": lr}) for lr in (1e-3, 3e-3)])

The counterpart of `torch_locoprop.study.training.population_run` for methods whose optimizers are not
written for a population. Members may differ in their numbers and in their seeds. Every member has the
batches, the schedule and the rule of divergence of a run of its own. Its losses are those of such a run
up to rounding, except with SOAP, whose update is compared with its package for square weights only.
On a GPU steps are replayed as one CUDA graph, which factorisations divide in two.
"""

from __future__ import annotations

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
from torch_locoprop.study.training.members import Members
from torch_locoprop.study.training.population_run import Stop, transfers_of
from torch_locoprop.study.training.recorded_steps import RecordedSteps
from torch_locoprop.study.training.run_folder import Metrics
from torch_locoprop.study.training.runner import check_data, epoch_seed
from torch_locoprop.study.training.update import Passes, Update

NUMBERS = (
    *("lr", "momentum", "decay", "eps", "damping", "clip", "averaging", "fall", "bias_rate"),
)
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
        self.rows = min(config.batch_size, len(self.train))
        self._index = torch.zeros(0, dtype=torch.long, device=self.device)
        self._uniform = torch.zeros(0, device=self.device)
        self.recorded = RecordedSteps(self.device)

    def keep(self, places: list[int]) -> None:
        self.recorded = RecordedSteps(self.device)  # frees the memory of the last CUDA graph
        index = torch.tensor(places, device=self.device)
        self.layers = [{name: t[index] for name, t in layer.items()} for layer in self.layers]
        self.update.keep(index)

    def epoch(self) -> dict[int, Metrics]:
        """Train for one epoch and return each member's line of the metrics."""
        began = time.perf_counter()
        parts = torch.split(self._order(), self.config.batch_size, dim=-1)
        for step, index in enumerate(parts):
            self.take_step(index, self.rate(self.epochs, step))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.epochs += 1
        return self.evaluate((time.perf_counter() - began) / len(self.members))

    def evaluate(self, seconds: float) -> dict[int, Metrics]:
        """Return the next lines of the metrics; `seconds` is each member's share of the time."""
        found = torch.stack([self._losses(images) for images in (self.train, self.test)])
        train_losses, test_losses = found.tolist()
        return self.noted(train_losses, test_losses, seconds, [0.0] * len(self.members))

    def take_step(self, index: Tensor, rate: float) -> None:
        """Take one step at ``rate`` times each member's learning rate.

        Args:
            index: Positions of the images, ``[rows]``, or ``[K, rows]`` of each member.
            rate: The factor of the schedule.
        """
        self.update.begin(rate)
        if self.update.samples:
            self._draw(index.shape[-1])
        if index.shape[-1] < self.rows:  # the last batch of an epoch
            self._advance(index)
        else:
            if index.shape != self._index.shape:
                self._index = torch.empty_like(index)
            self._index.copy_(index)
            self.recorded(lambda: self._advance(self._index))
        self.update.end()

    def _order(self) -> Tensor:
        """Return the order of the images, ``[n]``, or ``[K, n]`` for members of several seeds."""
        of_members = [self.seeds[member] for member in self.members]
        orders = {seed: self._order_of(seed) for seed in sorted(set(of_members))}
        found = [orders[seed] for seed in (of_members if len(orders) > 1 else orders)]
        return (torch.stack(found) if len(orders) > 1 else found[0]).to(self.device)

    def _order_of(self, seed: int) -> Tensor:
        generator = Generator().manual_seed(epoch_seed(seed, self.epochs))
        return torch.randperm(len(self.train), generator=generator)

    def _draw(self, rows: int) -> None:
        """Draw the numbers that decide sampled labels: for all members those of a run of its own."""
        shape = self.rows, self.train.shape[-1]
        if self._uniform.shape != shape:
            self._uniform = torch.empty(shape, device=self.device)
        generator = Generator(self.device).manual_seed(1000 * self.update.steps)
        torch.rand(rows, shape[1], generator=generator, out=self._uniform[:rows])

    def _advance(self, index: Tensor) -> None:
        """Run both passes and the update by operations that a CUDA graph can repeat."""
        images = self.train[index]
        if images.dim() == 2:  # the same for all members
            images = images.expand(len(self.members), *images.shape)
        self.update.advance(self.layers, self.passes(images))

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

        def sampled() -> list[Tensor]:
            labels = (self._uniform[: y.shape[-2]] < y).to(y.dtype)
            return self._backward(pre_activations, y - labels)

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
