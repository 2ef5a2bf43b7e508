"""``tune``: search the settings of a method.

    from torch_locoprop.study import methods, tuning
    from torch_locoprop.study.training.config import RunConfig
    from torch_locoprop.study.tuning import spaces

    base = RunConfig("adam", epochs=20)
    space = spaces.of(methods.get("adam"))
    best = tuning.tune(base, space, "tuning/adam", trials=64).best

A search is stored in a folder (:mod:`~torch_locoprop.study.tuning.folder`). The same call continues an
interrupted search, and several processes that make the same call share the work. Processes on several
machines share it through a storage (:mod:`~torch_locoprop.study.tuning.storage_address`). Trials are
trained as populations if the method allows it; other trials are single runs, which can be resumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_locoprop.paper.names import unknown
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import environment
from torch_locoprop.study.methods.search_space import Space
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.runner import check_data
from torch_locoprop.study.tuning.folder import TuningFolder
from torch_locoprop.study.tuning.locks import FileLocks
from torch_locoprop.study.tuning.results import Status, TuningResult
from torch_locoprop.study.tuning.storage_address import StorageAddress

SAMPLERS = ("tpe", "gp")

LOCAL = "tuning"
"""The name of the search in the journal of its own folder."""


def tune(
    base: RunConfig,
    space: Space,
    folder: Path | str,
    *,
    trials: int,
    population: int = 8,
    sampler: str = "tpe",
    pruning: bool = True,
    storage: str | None = None,
    data: Dataset | None = None,
    watch: Callable[[Status], None] = lambda status: None,
) -> TuningResult:
    """Search a method's settings for the lowest train loss after the last epoch.

    Args:
        base: The task and the settings that are not searched. Its seed is also that of the search.
        space: The ranges of the settings, such as ``spaces.of(methods.get("adam"))``.
        folder: The folder of the search.
        trials: The number of trials to finish, counting those of all processes and earlier calls.
        population: Trials trained together, if the method allows it.
        sampler: ``tpe``, a tree-structured Parzen estimator, or ``gp``, a Gaussian process.
        pruning: End trials early that are worse than the median of the others.
        storage: Where processes on several machines share the trials: the path of a journal file,
            ``sqlite:///FILE`` or ``postgresql://USER@HOST/DATABASE``. The folder then has the results
            and may be another one in each process. By default the trials are in the folder.
        data: The images, if they are loaded already.
        watch: Called with the status of the search whenever it changes.

    Raises:
        ValueError: If an argument is invalid, or a setting at an end of its range.
        RunError: If the folder has another search, or the storage cannot be reached.
        ImportError: If Optuna, or the driver of the database, is not installed.
    """
    for name, value in (("trials", trials), ("population", population)):
        if value < 1:
            raise ValueError(f"Invalid {name}={value}. Must be an integer >= 1.")
    if sampler not in SAMPLERS:
        raise ValueError(unknown("sampler", sampler, SAMPLERS))
    shared = None if storage is None else StorageAddress.of(storage)
    try:
        from torch_locoprop.study.tuning import storage as storages
        from torch_locoprop.study.tuning.journal import Journal, quiet
        from torch_locoprop.study.tuning.search import Search, first_pruned
    except ImportError as error:
        raise ImportError(
            f"A search needs the package {error.name}, which is not installed. Install it with: "
            'pip install "torch-locoprop[study]".'
        ) from error
    data = datasets.load(base.dataset) if data is None else data
    check_data(base, data)
    _check_space(base, space)
    if shared is not None:
        storages.check(shared)
    content = description(base, space, sampler, data, shared)
    files = TuningFolder(Path(folder))
    files.begin(content)
    name = LOCAL if shared is None else name_of(base, content)
    locks = FileLocks(files.path) if shared is None else storages.locks_of(shared, name)
    address = shared or StorageAddress("", files.journal, str(files.journal))
    with quiet(), storages.errors_of(address), locks.worker() as worker, ExitStack() as stack:
        with locks.locked():
            journal = Journal(
                stack.enter_context(storages.opened(address)),
                name,
                space,
                sampler=sampler,
                seed=base.seed,
                first_pruned=first_pruned(base) if pruning else None,
            )
        search = Search(base, files, locks, journal, worker, data, trials, population, watch)
        search.run()
        return search.result()


def description(
    base: RunConfig, space: Space, sampler: str, data: Dataset, storage: StorageAddress | None
) -> dict[str, Any]:
    """Return the content of ``tuning.json``: what identifies a search, and the environment."""
    config = base.to_dict()
    fixed = {name: value for name, value in config["settings"].items() if name not in space}
    return {
        "config": {**config, "settings": fixed},
        "space": {name: domain.to_dict() for name, domain in space.items()},
        "sampler": sampler,
        "data": data.metadata,
        **({} if storage is None else {"storage": storage.public}),
        "environment": environment(base.device),
    }


def name_of(base: RunConfig, description: Mapping[str, Any]) -> str:
    """Return a short name that is unique to the search, in every process and storage."""
    where = ("environment", "storage")
    own = {name: value for name, value in description.items() if name not in where}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:8]
    return f"{base.dataset}-{base.model}-{base.method}-{digest}"


def _check_space(base: RunConfig, space: Space) -> None:
    """Build the optimizer at every end of the space, so that bad ranges raise before any trial."""
    for name, domain in space.items():
        for value in domain.ends:
            replace(base, settings={**base.settings, name: value}).check_settings()
