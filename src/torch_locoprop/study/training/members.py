"""The members of a population that train together: which of them still train, and their metrics.

How the members take a step is in ``population_run.py`` and ``matrix_population.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch

from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import forget_peak, memory_mib
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import Metrics
from torch_locoprop.study.training.runner import DIVERGED


class Members:
    """Base class of populations in training: the members on their device, and their metrics so far.

    Args:
        configs: The configurations of the members, which have their task and schedule in common.
        data: The images.

    Attributes:
        members: Positions in ``configs`` of the members that still train, in the population's order.
        metrics: The metrics of each member so far.
    """

    def __init__(self, configs: Sequence[RunConfig], data: Dataset) -> None:
        self.config = config = configs[0]
        self.device = torch.device(config.device)
        self.train, self.test = (images.to(self.device) for images in (data.train, data.test))
        self.members = list(range(len(configs)))
        self.rate = config.rate(len(self.train))
        self.metrics: list[list[Metrics]] = [[] for _ in configs]
        self.epochs = 0
        forget_peak(self.device)

    def keep(self, places: list[int]) -> None:
        """Keep the members at these places of :attr:`members` only, in the population itself."""
        raise NotImplementedError

    def continue_without(self, ended: Collection[int]) -> bool:
        """Drop these members and diverged ones; return True if an epoch is left to train."""
        stay = [
            place
            for place, member in enumerate(self.members)
            if member not in ended and not self.metrics[member][-1].diverged
        ]
        if not stay or self.epochs == self.config.epochs:
            return False
        if len(stay) < len(self.members):
            self.keep(stay)
            self.members = [self.members[place] for place in stay]
        return True

    def noted(
        self,
        train_losses: Iterable[float],
        test_losses: Iterable[float],
        seconds: float,
        stuck: Iterable[float],
    ) -> dict[int, Metrics]:
        """Add the losses after an epoch to the metrics, and return the new metrics of each member.

        Args:
            train_losses: The train loss of each member that still trains.
            test_losses: The test loss of each member that still trains.
            seconds: Each member's share of the time of the epoch.
            stuck: Not zero for members that count as diverged, whatever their losses are.
        """
        memory, lines = memory_mib(self.device), {}
        found = zip(self.members, train_losses, test_losses, stuck, strict=True)
        for member, train_loss, test_loss, ends in found:
            rows = self.metrics[member]
            first = rows[0].train_loss if rows else train_loss
            within = math.isfinite(train_loss) and train_loss <= DIVERGED * first
            before = rows[-1].seconds if rows else 0.0
            diverged = bool(ends) or not within
            line = Metrics(len(rows), train_loss, test_loss, before + seconds, memory, diverged)
            rows.append(line)
            lines[member] = line
        return lines
