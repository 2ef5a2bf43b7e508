"""The search for a method's settings.

    from torch_locoprop.study import methods, tuning
    from torch_locoprop.study.training.config import RunConfig
    from torch_locoprop.study.tuning import spaces

    base = RunConfig("adam", epochs=20)
    space = spaces.of(methods.get("adam"))
    best = tuning.tune(base, space, "tuning/adam", trials=64).best

A search is a folder (:mod:`~torch_locoprop.study.tuning.folder`). The same call goes on with it after
an interruption, and other processes that make it help. Methods that can be are trained as
populations; the others are runs one by one, which resume.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_locoprop.config.settings import unknown
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.machine import environment
from torch_locoprop.study.methods.search_space import Space
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.runner import check_data
from torch_locoprop.study.tuning.folder import TuningFolder
from torch_locoprop.study.tuning.results import Status, TuningResult

SAMPLERS = ("tpe", "gp")


def tune(
    base: RunConfig,
    space: Space,
    folder: Path | str,
    *,
    trials: int,
    population: int = 8,
    sampler: str = "tpe",
    pruning: bool = True,
    data: Dataset | None = None,
    watch: Callable[[Status], None] = lambda status: None,
) -> TuningResult:
    """Search until so many trials have finished, in this and all other processes together.

    `base` is the task and the settings that are not searched; its seed is that of the search too.
    `population` trials are asked for at a time, where the method allows. A trial's value is the train
    loss after its last epoch; `pruning` ends those early that are worse than the median of others.
    """
    for name, value in (("trials", trials), ("population", population)):
        if value < 1:
            raise ValueError(f"Invalid {name}={value}. Must be an integer >= 1.")
    if sampler not in SAMPLERS:
        raise ValueError(unknown("sampler", sampler, SAMPLERS))
    try:
        from torch_locoprop.study.tuning.journal import Journal, quiet
        from torch_locoprop.study.tuning.search import Search, first_pruned
    except ImportError as error:
        raise ImportError(
            f"A search takes the package {error.name}, which is not installed. Install it with: "
            'pip install "torch-locoprop[study]".'
        ) from error
    data = datasets.load(base.dataset) if data is None else data
    check_data(base, data)
    _check_space(base, space)
    files = TuningFolder(Path(folder))
    files.begin(description(base, space, sampler, data))
    with quiet(), files.worker() as worker:
        with files.locked():
            journal = Journal(
                files.journal,
                space,
                sampler=sampler,
                seed=base.seed,
                first_pruned=first_pruned(base) if pruning else None,
            )
        search = Search(base, files, journal, worker, data, trials, population, watch)
        search.run()
        return search.result()


def description(base: RunConfig, space: Space, sampler: str, data: Dataset) -> dict[str, Any]:
    """Return what tells one search from another, and the environment."""
    config = base.to_dict()
    fixed = {name: value for name, value in config["settings"].items() if name not in space}
    return {
        "config": {**config, "settings": fixed},
        "space": {name: domain.to_dict() for name, domain in space.items()},
        "sampler": sampler,
        "data": data.metadata,
        "environment": environment(base.device),
    }


def _check_space(base: RunConfig, space: Space) -> None:
    """Make an optimizer at every end of the space: what it refuses, it refuses before any trial."""
    for name, domain in space.items():
        for value in domain.ends:
            replace(base, settings={**base.settings, name: value}).check_settings()
