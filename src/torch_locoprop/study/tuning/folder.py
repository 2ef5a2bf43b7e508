"""The folder of a search, which several processes may share.

tuning.json      the task, the space, the sampler, the data and the storage; written once
journal.log      Optuna's journal of all trials, unless they are in a storage that machines share
trials.jsonl     one line per trial
best.json        the best configuration so far: `locoprop train --config best.json`
trials/          the folders of trials that are trained one by one
lock, workers/   one locked file per running process; the lock ends with the process
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_locoprop.study.atomic_files import write
from torch_locoprop.study.training.description import (
    RunError,
    differences,
    differing,
    read_description,
)
from torch_locoprop.study.tuning.locks import FileLocks


@dataclass(frozen=True)
class TuningFolder:
    """The files of one search, except the journal."""

    path: Path

    @property
    def exists(self) -> bool:
        """True if the folder has a search."""
        return (self.path / "tuning.json").is_file()

    @property
    def journal(self) -> Path:
        """The path of the journal."""
        return self.path / "journal.log"

    def run(self, number: int) -> Path:
        """Return the folder of a trial that is trained as a single run."""
        return self.path / "trials" / f"{number:04d}"

    def description(self) -> dict[str, Any]:
        """Return the content of `tuning.json`.

        Raises:
            RunError: If the file is not the description of a search.
        """
        needed = {"config": dict, "space": dict, "sampler": object, "data": dict}
        return read_description(self.path / "tuning.json", "search", needed)

    def begin(self, description: Mapping[str, Any]) -> None:
        """Create the folder with this description.

        Raises:
            RunError: If the folder has a run, or another search.
        """
        if (self.path / "config.json").exists():
            raise RunError(f"{self.path} is the folder of a run. Choose another folder (--out).")
        with FileLocks(self.path).locked():
            if self.exists:
                self._check_same(description)
            else:
                write(self.path / "tuning.json", json.dumps(description, indent=1) + "\n")

    def write_results(
        self, trials: Iterable[Mapping[str, Any]], best: Mapping[str, Any] | None
    ) -> None:
        """Replace the list of trials and the best configuration."""
        lines = (json.dumps(trial) + "\n" for trial in trials)
        write(self.path / "trials.jsonl", "".join(lines))
        if best is not None:
            write(self.path / "best.json", json.dumps(best, indent=1) + "\n")

    def _check_same(self, description: Mapping[str, Any]) -> None:
        there, here = _flat(self.description()), _flat(description)
        names = differing(there, here)
        if names:
            text = differences(there, here, names)
            raise RunError(
                f"{self.path} has another search: {text}. Choose another folder (--out)."
            )


def _flat(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal for a search to be continued, by name."""
    config = dict(description["config"])
    settings = config.pop("settings", {})
    space, data = description["space"], description["data"]
    return {
        **config,
        **settings,
        **{f"the range of {name}": domain for name, domain in space.items()},
        "sampler": description["sampler"],
        "storage": description.get("storage", "the folder"),
        **{f"data {name}": value for name, value in data.items()},
    }
