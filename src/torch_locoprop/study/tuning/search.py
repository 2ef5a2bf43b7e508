"""The part of one process in a search: it takes trials, trains them and stores their results.

If the process ends early, its unfinished trials go back to the queue when another process, or the same
command again, asks for trials.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from optuna.trial import FrozenTrial, Trial, TrialState

from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.training.population_run import method_of, train_together, without_numbers
from torch_locoprop.study.training.run_folder import Metrics, RunFolder
from torch_locoprop.study.training.runner import run
from torch_locoprop.study.tuning.folder import TuningFolder
from torch_locoprop.study.tuning.journal import Journal
from torch_locoprop.study.tuning.locks import Locks
from torch_locoprop.study.tuning.results import Status, TuningResult, best_of

POLL_SECONDS = 1.0
"""Seconds between checks whether other processes have finished or died."""


def first_pruned(base: RunConfig) -> int:
    """Return the first epoch at which a trial may be pruned, after the warm-up and some epochs."""
    return min(base.warmup_epochs, base.epochs // 2) + max(base.epochs // 10, 1)


def _next(states: Sequence[TrialState], population: int) -> int:
    """Return how many trials to take: those of a begun population, or a new one.

    Trials are drawn by populations, 0 to K − 1, K to 2K − 1, and so on. Waiting trials of a begun
    population come first: a new one that was drawn together with them would be drawn with other
    results known than in a search that was not interrupted.

    Args:
        states: the states of all trials.
        population: K.
    """
    waiting = [number for number, state in enumerate(states) if state == TrialState.WAITING]
    first = waiting[0] if waiting else len(states)
    end = (first // population + 1) * population
    return sum(number < end for number in waiting) + max(end - len(states), 0)


class _PrunedError(Exception):
    """Raised in ``on_epoch`` to end a run that is pruned."""


@dataclass
class Search:
    """The part of one process in a search."""

    base: RunConfig
    files: TuningFolder
    locks: Locks
    journal: Journal
    worker: str
    data: Dataset
    trials: int
    population: int
    watch: Callable[[Status], None]
    _status: Status = field(init=False)

    def run(self) -> None:
        """Train trials until all trials of the search have finished."""
        while True:
            with self.locks.locked():
                asked, others = self._ask()
            if asked:
                self._train(asked)
            elif others:
                time.sleep(POLL_SECONDS)  # if another process dies, this one takes its trials
            else:
                return

    def result(self) -> TuningResult:
        """Return the result of all processes so far."""
        trials = tuple(self._row(trial) for trial in self.journal.trials())
        best = best_of(trials)
        found = None if best is None else {**self.base.settings, **best["settings"]}
        config = None if found is None else replace(self.base, settings=found)
        return TuningResult(self.files.path, trials, config)

    def _ask(self) -> tuple[list[Trial], int]:
        """Return new trials for this process, and the number of running trials to wait for."""
        self.journal.put_back(self.locks.is_alive)
        states = [trial.state for trial in self.journal.trials()]
        finished = sum(state.is_finished() for state in states)
        running = states.count(TrialState.RUNNING)
        room = self.trials - finished - running
        at_once = 1 if method_of(self.base) is None else self.population
        asked = [self.journal.ask(self.worker) for _ in range(min(room, _next(states, at_once)))]
        self._save()
        return asked, running if finished < self.trials else 0

    def _save(self) -> None:
        """Write the results so far and report the status."""
        result = self.result()
        best_config = None if result.best is None else result.best.to_dict()
        self.files.write_results(result.trials, best_config)
        best = best_of(result.trials)
        finished = sum(trial["epoch"] is not None for trial in result.trials)
        loss = None if best is None else best["train_loss"]
        self._status = Status(finished, self.trials, loss, 0, 0, self.base.epochs)
        self.watch(self._status)

    def _train(self, asked: list[Trial]) -> None:
        """Train the trials, as populations where possible."""
        members: list[Trial | FrozenTrial] = [*self._ended_beside(asked), *asked]
        groups: dict[str, list[Trial | FrozenTrial]] = defaultdict(list)
        for trial in sorted(members, key=lambda trial: trial.number):
            config = self._config(trial)
            together = method_of(config) is not None
            groups[str(without_numbers(config)) if together else str(trial.number)].append(trial)
        for group in groups.values():
            first = next((trial for trial in group if isinstance(trial, Trial)), None)
            if first is None:
                continue
            if method_of(self._config(first)) is None:
                self._train_alone(first)
            else:
                self._train_together(group)

    def _ended_beside(self, asked: list[Trial]) -> list[FrozenTrial]:
        """Return the ended trials of the populations of these trials.

        The losses of a member are rounded differently in a smaller population. Trials that were put
        back are therefore trained beside the same members as in a search that was not interrupted.
        """
        begun = {trial.number // self.population for trial in asked}
        return [
            trial
            for trial in self.journal.trials()
            if trial.number // self.population in begun
            and trial.state.is_finished()
            and "result" in trial.user_attrs
        ]

    def _train_together(self, members: list[Trial | FrozenTrial]) -> None:
        untrained: dict[int, float] = {}

        def on_epoch(rows: Mapping[int, Metrics]) -> list[int]:
            ended = []
            for place, row in rows.items():
                trial = members[place]
                if isinstance(trial, FrozenTrial):
                    if row.epoch == trial.user_attrs["result"]["epoch"]:
                        ended.append(place)
                    continue
                first = untrained.setdefault(place, row.train_loss)
                pruned = self._prunes(trial, row, first)
                if pruned or row.diverged or row.epoch == self.base.epochs:
                    self._tell(trial, row, first, pruned)
                    ended.append(place)
            training = sum(isinstance(members[place], Trial) for place in rows)
            self._show(training, next(iter(rows.values())).epoch)
            return ended

        try:
            train_together([self._config(trial) for trial in members], self.data, on_epoch)
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"{len(members)} trials at a time do not fit into the memory of the device. Use a "
                "smaller --population."
            ) from error

    def _train_alone(self, trial: Trial) -> None:
        files = RunFolder(self.files.run(trial.number))

        def on_epoch(row: Metrics) -> None:
            self._show(1, row.epoch)
            if self._prunes(trial, row, files.metrics()[0].train_loss):
                raise _PrunedError

        pruned = False
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # about steps that are not finite: expected in a search
            try:
                run(self._config(trial), files.path, resume=True, data=self.data, on_epoch=on_epoch)
            except _PrunedError:
                pruned = True
        metrics = files.metrics()
        if self._tell(trial, metrics[-1], metrics[0].train_loss, pruned):
            # Checkpoints of thousands of trials would fill a disk.
            (files.path / "checkpoint.pt").unlink(missing_ok=True)

    def _prunes(self, trial: Trial, row: Metrics, untrained: float) -> bool:
        """Return True if the trial ends at this epoch: it is pruned, or another process has it.

        Only about twenty epochs are reported, as each report is written to the storage.
        """
        if row.diverged or row.epoch == self.base.epochs:
            return False
        if row.epoch % max(self.base.epochs // 20, 1):
            return False
        with self.locks.locked():
            if not self.journal.belongs_to(self.worker, trial):
                return True
            return self.journal.prunes(trial, row.epoch, min(row.train_loss, untrained))

    def _tell(self, trial: Trial, row: Metrics, untrained: float, pruned: bool) -> bool:
        """Store the result of a trial; return False if another process has taken it over.

        The value is capped at the loss of the untrained model: how bad a bad trial was would only
        distort the model of the sampler.
        """
        value = untrained if row.diverged else min(row.train_loss, untrained)
        with self.locks.locked():
            own = self.journal.belongs_to(self.worker, trial)
            if own:
                self.journal.tell(trial, row.to_dict(), None if pruned else value)
        return own

    def _config(self, trial: Trial | FrozenTrial) -> RunConfig:
        own = self.journal.settings(trial.params)
        return replace(self.base, settings={**self.base.settings, **own})

    def _row(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the line of a trial in ``trials.jsonl``."""
        result = trial.user_attrs.get("result", {}) if trial.state.is_finished() else {}
        names = ("epoch", "train_loss", "test_loss", "seconds")
        return {
            "number": trial.number,
            "state": "diverged" if result.get("diverged") else trial.state.name.lower(),
            "settings": self.journal.settings(trial.params),
            **{name: result.get(name) for name in names},
        }

    def _show(self, running: int, epoch: int) -> None:
        self.watch(replace(self._status, running=running, epoch=epoch))
