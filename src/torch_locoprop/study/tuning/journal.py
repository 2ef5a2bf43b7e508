"""The trials of a search in Optuna: its samplers and pruner. Importing this imports Optuna.

A trial stores the name of its process. If that process has died, the trial goes back to the queue with
its number and parameters, and another process continues it, so no trial is lost or made twice. A
process that was taken for dead, as after the restart of a database, finds that its trial has another
owner, and drops it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from torch_locoprop.study.methods.search_space import Choices, Domain, Space

STARTUP = 10
"""Trials that have to finish before any is pruned."""


class Journal:
    """The trials of one search. Callers of all methods that change them hold the lock of the search.

    Args:
        storage: Optuna's storage.
        name: The name of the search in it.
        space: The ranges of the settings.
        sampler: A name of ``SAMPLERS``.
        seed: The seed of the sampler.
        first_pruned: The first epoch at which a trial may be pruned; None if no trial is.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        space: Space,
        *,
        sampler: str,
        seed: int,
        first_pruned: int | None,
    ) -> None:
        self._sampler, self._seed = sampler, seed
        self._distributions = {
            _name(name, each): _distribution(each) for name, each in space.items()
        }
        self._space = space
        self._first_pruned = first_pruned
        self._storage, self._name = storage, name
        self._study = optuna.create_study(
            study_name=name,
            storage=self._storage,
            load_if_exists=True,
            sampler=RandomSampler(),  # its trials come from the queue, with all parameters
            pruner=optuna.pruners.MedianPruner(STARTUP, n_min_trials=STARTUP // 2),
        )

    def trials(self) -> list[FrozenTrial]:
        """Return all trials in the order of their numbers."""
        return self._study.get_trials(deepcopy=False)

    def put_back(self, is_alive: Callable[[str], bool]) -> None:
        """Put the trials of dead processes back into the queue."""
        study = self._storage.get_study_id_from_name(self._name)
        for trial in self.trials():
            owner = trial.user_attrs.get("worker")
            if trial.state == TrialState.RUNNING and (owner is None or not is_alive(owner)):
                own = self._storage.get_trial_id_from_study_id_trial_number(study, trial.number)
                self._storage.set_trial_state_values(own, TrialState.WAITING)

    def ask(self, worker: str) -> Trial:
        """Return the first trial of the queue, or a new one, and store this process as its owner."""
        if all(trial.state != TrialState.WAITING for trial in self.trials()):
            # Stored by one write: a process that ends while it draws leaves no half-drawn trial.
            self._study.enqueue_trial(self._drawn(), user_attrs={"worker": worker})
        trial = self._study.ask(self._distributions)
        trial.set_user_attr("worker", worker)
        return trial

    def _drawn(self) -> dict[str, Any]:
        """Return the parameters of the next new trial."""
        # Each trial has a seed of its own, so two processes draw different settings, and an
        # interrupted search draws the same settings as an uninterrupted one.
        trials = self.trials()
        seed = hashlib.sha256(f"{self._seed}/{len(trials)}".encode()).digest()[:4]
        copy = optuna.create_study(sampler=SAMPLERS[self._sampler](int.from_bytes(seed)))
        copy.add_trials(trials)
        return copy.ask(self._distributions).params

    def belongs_to(self, worker: str, trial: Trial) -> bool:
        """Return True unless another process has taken the trial over."""
        stored = self.trials()[trial.number]
        return stored.state == TrialState.RUNNING and stored.user_attrs.get("worker") == worker

    def settings(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings for the parameters of a trial."""
        found = {}
        for name, domain in self._space.items():
            if _name(name, domain) in params:
                value = params[_name(name, domain)]
                found[name] = value if isinstance(domain, Choices) else domain.setting(value)
        return found

    def prunes(self, trial: Trial, epoch: int, value: float) -> bool:
        """Report the value of an epoch and return True if the trial is to be pruned."""
        if self._first_pruned is None or epoch < self._first_pruned:
            return False
        stored = self.trials()[trial.number]
        if epoch <= stored.user_attrs.get("passed", 0):
            return False  # a trial that was put back repeats epochs that did not end it
        if epoch not in stored.intermediate_values:
            trial.report(value, epoch)
        pruned = trial.should_prune()
        if not pruned:
            trial.set_user_attr("passed", epoch)
        return pruned

    def tell(self, trial: Trial, result: Mapping[str, Any], value: float | None) -> None:
        """Store the result of a trial; a value of None means that it was pruned."""
        trial.set_user_attr("result", dict(result))
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        self._study.tell(trial, value, state)


def _tpe(seed: int) -> BaseSampler:
    return TPESampler(seed=seed, multivariate=True, constant_liar=True)


def _gp(seed: int) -> BaseSampler:
    return GPSampler(seed=seed)


SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {"tpe": _tpe, "gp": _gp}


@contextmanager
def quiet() -> Iterator[None]:
    """Hide Optuna's log and its warnings about experimental features within this context."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def _name(setting: str, domain: Domain) -> str:
    """Return the name of the setting's parameter in Optuna."""
    rest = not isinstance(domain, Choices) and domain.of_rest
    return f"one_minus_{setting}" if rest else setting


def _distribution(domain: Domain) -> BaseDistribution:
    if isinstance(domain, Choices):
        return CategoricalDistribution(domain.values)
    if domain.whole:
        return IntDistribution(int(domain.low), int(domain.high), log=True)
    return FloatDistribution(domain.low, domain.high, log=True)
