"""Train runs that differ only in numbers and seeds together, as one population.

    from torch_locoprop.study.training.config import RunConfig
    from torch_locoprop.study.training.population_run import train_together

    metrics = train_together([RunConfig("adam", {"lr": lr}) for lr in (1e-4, 1e-3, 1e-2)])

Every member has the batches, the schedule and the rule of divergence of a run of its own (``runner``),
and the same losses up to rounding. Nothing is written to disk. Images and weights stay on the device,
and the host waits for it once per epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Generator, Tensor

from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.transfers import Linear, Sigmoid, Transfer
from torch_locoprop.paper.variants import VARIANTS
from torch_locoprop.solvers import SOLVERS, FirstOrder
from torch_locoprop.study import methods
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import matmul_precision, own_randomness
from torch_locoprop.study.models import architectures
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.members import Members
from torch_locoprop.study.training.population import NUMBERS, GraphedPopulation, Method, Population
from torch_locoprop.study.training.run_folder import Metrics
from torch_locoprop.study.training.runner import check_data, epoch_seed

Stop = Callable[[Mapping[int, Metrics]], Collection[int]]
"""Takes the new metrics by member; returns the members that end here."""


def method_of(config: RunConfig) -> Method | None:
    """Return what the members of a population share, or None if the method has no population."""
    population = methods.get(config.method).population
    if population is None:
        return None
    problem = {**population, **config.settings}
    solver = SOLVERS.get(problem["solver"])
    regularizer = REGULARIZERS.get(problem["regularizer"] or "none")
    if not isinstance(solver, FirstOrder) or regularizer is None:
        return None
    return Method(
        VARIANTS[problem["variant"]],
        solver,
        problem["local_steps"],
        problem["local_decay"],
        regularizer,
        problem["local_reduction"],
        config.local_products,
    )


def without_numbers(config: RunConfig) -> RunConfig:
    """Return the configuration without the numbers and seeds in which members may differ."""
    same = {name: 0.0 if name in NUMBERS else value for name, value in config.settings.items()}
    return replace(config, settings=same, weight_decay=0.0, seed=0)


def train_together(
    configs: Sequence[RunConfig],
    data: Dataset | None = None,
    on_epoch: Stop = lambda rows: (),
) -> list[tuple[Metrics, ...]]:
    """Train all configurations together and return the metrics of each.

    Args:
        configs: The configurations; they may differ only in the numbers of the method and the seed.
        data: The images, if they are loaded already.
        on_epoch: Called with the new metrics of the members that still train, by their positions in
            ``configs``; returns the positions of members to end early. Members that diverge end too.

    Raises:
        ValueError: If the configurations cannot be trained together.
    """
    if not configs or any(without_numbers(c) != without_numbers(configs[0]) for c in configs):
        raise ValueError(
            f"{len(configs)} configurations that cannot be trained together. Give one or more that "
            f"differ only in their seeds and in {', '.join(NUMBERS)}."
        )
    method = method_of(configs[0])
    if method is None:
        raise ValueError(
            f"{configs[0].method} with these settings has no population. Train each configuration "
            "by itself with torch_locoprop.study.training.runner.run."
        )
    data = datasets.load(configs[0].dataset) if data is None else data
    check_data(configs[0], data)
    with matmul_precision(configs[0].precision), own_randomness(configs[0].device):
        training = _Training(configs, method, data)
        ended: Collection[int] = on_epoch(training.evaluate(0.0))
        while training.continue_without(ended):
            ended = on_epoch(training.epoch())
    return [tuple(rows) for rows in training.metrics]


class _Training(Members):
    """A population on its device, which is replayed as a CUDA graph on a GPU."""

    def __init__(self, configs: Sequence[RunConfig], method: Method, data: Dataset) -> None:
        super().__init__(configs, data)
        config = self.config
        models = [own.build_model().to(self.device) for own in configs]
        population = Population(
            models, transfers_of(config), method, [numbers_of(own) for own in configs]
        )
        self.steps = GraphedPopulation(population, self.train, config.batch_size)
        self.seeds = [own.seed for own in configs]

    def keep(self, places: list[int]) -> None:
        self.steps.keep(places)
        self.seeds = [self.seeds[place] for place in places]

    def _order(self) -> Tensor:
        """Return the order of the images, ``[n]``, or ``[K, n]`` for members of several seeds."""
        seeds = dict.fromkeys(self.seeds)
        orders = {
            seed: torch.randperm(
                len(self.train), generator=Generator().manual_seed(epoch_seed(seed, self.epochs))
            )
            for seed in seeds
        }
        found = [orders[seed] for seed in (self.seeds if len(seeds) > 1 else seeds)]
        return (torch.stack(found) if len(seeds) > 1 else found[0]).to(self.device)

    def epoch(self) -> dict[int, Metrics]:
        """Train for the next epoch and return the metrics of each member."""
        skipped = self.steps.population.skips.clone()
        began = time.perf_counter()
        parts = torch.split(self._order(), self.config.batch_size, dim=-1)
        for step, rows in enumerate(parts):
            self.steps.step(rows, self.rate(self.epochs, step))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.epochs += 1
        seconds = (time.perf_counter() - began) / len(self.members)
        # As in a run alone: a member whose layers all skipped every step has not moved.
        still = (self.steps.population.skips - skipped).amin(0) == len(parts)
        return self.evaluate(seconds, still)

    def evaluate(self, seconds: float, still: Tensor | None = None) -> dict[int, Metrics]:
        """Return the metrics of each member.

        Args:
            seconds: Each member's share of the time of the epoch.
            still: True for members that skipped all steps, ``[K]``.
        """
        broken = self._broken()
        ended = torch.zeros_like(broken) if still is None else still.to(broken.dtype)
        found = torch.stack([*self._losses(), broken, ended]).tolist()  # the one synchronisation
        train, test, no_number, stuck = found
        losses = [math.nan if none else loss for loss, none in zip(train, no_number, strict=True)]
        return self.noted(losses, test, seconds, stuck)

    def _losses(self) -> list[Tensor]:
        return [self.steps.population.losses(images) for images in (self.train, self.test)]

    def _broken(self) -> Tensor:
        """Return a positive number for members whose weights would not be finite in a run alone.

        LocoProp skips a step that is not finite; methods without local iterations take it.
        """
        skipped = self.steps.population.skipped.double()
        skips = "local_steps" in self.config.settings
        return torch.zeros_like(skipped) if skips else skipped


def transfers_of(config: RunConfig) -> tuple[Transfer, ...]:
    """Return the transfer after each linear layer of the model; the last one is the loss's sigmoid."""
    layers = len(architectures.sizes_of(config.model)) - 1
    between = [architectures.transfer_between(config.transfer)] * (layers - 1)
    return (*between, Linear(), *between, Sigmoid())


def numbers_of(config: RunConfig) -> dict[str, float]:
    """Return the numbers in which a configuration may differ from other members."""
    own = {name: config.settings[name] for name in NUMBERS if name in config.settings}
    return {"gamma": 1.0, **own, "weight_decay": config.weight_decay}
