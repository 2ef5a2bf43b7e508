"""The study of one task: which trials are next, and which of them have won.

Every method has the same budget. Half of its trials are spread over its space. The other half are in a
box around the best of the first half, which is not cut off at the ends of the space. These trials
train on nine tenths of the training images and never see the test images. The trial with the lowest
train loss and that with the lowest loss on the held-out tenth win; each is trained on all training
images, at several seeds.

What is next follows from `trials.json` and `results.jsonl` alone (``trials``), so a study continues
after any kill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.equal_budgets.trials import (
    Line,
    Trial,
    add_trials,
    around,
    at_seeds,
    best_of,
    empty,
    identity,
    is_pending,
    is_search,
    read_results,
    read_trials,
    space_to_dict,
    spread,
)
from torch_locoprop.study.equal_budgets.workers import ImageSource
from torch_locoprop.study.training.description import RunError, differences, differing

SEARCH, FINAL = "search", "final"
"""The stages of trials: on nine tenths of the training images, and of winners on all of them."""

WINNERS = {"train": "train_loss", "held-out": "held_out_loss"}
"""The losses by which a trial wins, by the names of the two winners."""


@dataclass(frozen=True)
class Budget:
    """The budget of every method on a task.

    Args:
        trials: Trials of the search.
        seeds: Seeds at which winners are trained.
        held_out: The part of the training images that is held out in the search.
    """

    trials: int
    seeds: tuple[int, ...] = (0, 1, 2)
    held_out: float = 0.1

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"Invalid budget={self.trials}. Must be an integer >= 1.")
        if not self.seeds:
            raise ValueError("Invalid seeds=(). Must be one or more seeds.")

    @property
    def spread(self) -> int:
        """Trials that are spread over the space; the others are around the best of them."""
        return (self.trials + 1) // 2

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can store."""
        return {**asdict(self), "seeds": list(self.seeds)}


@dataclass(frozen=True)
class SearchImages:
    """The images of the search: the test images are replaced by the held-out training images."""

    images: ImageSource
    held_out: float

    def load(self, name: str) -> Dataset:
        """Return the images of a data set."""
        return _split(self, name)


@lru_cache(maxsize=2)
def _split(source: SearchImages, name: str) -> Dataset:
    data = source.images.load(name)
    order = torch.randperm(len(data.train), generator=Generator().manual_seed(0))
    count = max(round(source.held_out * len(order)), 1)
    return Dataset(
        data.name,
        data.train[order[count:]],
        data.train[order[:count]],
        f"{data.source}, {count} training images held out",
    )


class TaskStudy:
    """The trials of all methods on one task, in a folder.

    Args:
        name: The name of the task.
        folder: The folder.
        task: The fields of a `RunConfig`, without those of a method.
        methods: The methods; those of an earlier call stay.
        budget: What every method gets.

    Raises:
        RunError: If the folder has another task or budget.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        task: Mapping[str, Any],
        methods: Sequence[str],
        budget: Budget,
    ) -> None:
        self.name, self.folder, self.task, self.budget = name, folder, dict(task), budget
        self.methods = tuple(methods)
        self.results_file = folder / "results.jsonl"
        new = {**empty(task, []), "budget": budget.to_dict()}
        if (folder / "trials.json").is_file():
            self._content = read_trials(folder)
            self._check_same(new)
        else:
            self._content = new
        for method in methods:
            if method not in self._content["spaces"]:
                self._content["spaces"][method] = space_to_dict(method)

    def _check_same(self, new: Mapping[str, Any]) -> None:
        there, here = ({**each["task"], **each.get("budget", {})} for each in (self._content, new))
        names = differing(there, here)
        if names:
            text = differences(there, here, names)
            raise RunError(
                f"{self.folder} has another study: {text}. Choose another folder (--out)."
            )

    @property
    def content(self) -> dict[str, Any]:
        """The content of `trials.json`."""
        return self._content

    def results(self) -> list[dict[str, Any]]:
        """Return the results of the methods of this study so far."""
        return [r for r in read_results(self.results_file) if r["method"] in self.methods]

    def next_trials(self) -> list[Trial]:
        """Return the trials that can be trained now, after new ones are drawn; empty at the end."""
        results = self.results()
        found = [trial for method in self.methods for trial in self._next_of(method, results)]
        add_trials(self.folder, self._content, found)
        return found

    def _next_of(self, method: str, results: Sequence[Line]) -> list[Trial]:
        drawn = [t for t in self._content["trials"] if t["method"] == method and is_search(t)]
        pending = [trial for trial in drawn if is_pending(trial, results)]
        if pending:
            return pending
        if len(drawn) < self.budget.trials:
            return [{**trial, "stage": SEARCH} for trial in self._draw(method, drawn, results)]
        finals = (
            {**trial, "stage": FINAL}
            for line in _distinct(self.winners(method, results))
            for trial in at_seeds(line, self.budget.seeds)
        )
        return [trial for trial in finals if is_pending(trial, results)]

    def _draw(self, method: str, drawn: Sequence[Trial], results: Sequence[Line]) -> list[Trial]:
        """Return the first half of a method's trials, or the rest around the best of them."""
        if len(drawn) < self.budget.spread:
            return spread(self._content, method, len(drawn), self.budget.spread - len(drawn))
        count = self.budget.trials - len(drawn)
        if not self.winners(method, results):  # all have diverged
            return spread(self._content, method, len(drawn), count)
        return around(self._content, results, method, count)

    def winners(self, method: str, results: Sequence[Line]) -> dict[str, Line]:
        """Return the results that have won so far, by the names of `WINNERS`; empty without any."""
        try:
            return {name: best_of(results, method, by) for name, by in WINNERS.items()}
        except ValueError:
            return {}

    def left(self, method: str, results: Sequence[Line]) -> int:
        """Return the number of trials of a method without a result.

        Until the search has ended, two different winners are assumed.
        """
        own = [line for line in results if line["method"] == method]
        searched = sum(map(is_search, own))
        if searched < self.budget.trials:
            return self.budget.trials - searched + len(WINNERS) * len(self.budget.seeds)
        winners = len(_distinct(self.winners(method, results)))
        finals = [line for line in own if line["stage"] == FINAL]
        return winners * len(self.budget.seeds) - len(finals)

    def finals(self, winner: Line, results: Sequence[Line]) -> list[Line]:
        """Return the results of a winner at all seeds so far."""
        wanted = {
            identity({**trial, "stage": FINAL}) for trial in at_seeds(winner, self.budget.seeds)
        }
        return [line for line in results if identity(line) in wanted]


def _distinct(winners: Mapping[str, Line]) -> list[Line]:
    """Return the winners, once if one trial has won by both losses."""
    return list({line["trial"]: line for line in winners.values()}.values())
