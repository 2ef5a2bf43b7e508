"""A search for settings as a folder, which several processes may share.

tuning.json      what is tuned: the task, the space, the sampler, the data; written once
journal.log      Optuna's journal of all trials
trials.jsonl     the trials as they stand, a line each
best.json        the best configuration so far: `locoprop train --config best.json`
trials/          the runs of methods that are trained one by one, a folder each
lock, workers/   who is at work: a process holds a lock on a file of its own, and a kill frees it
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_locoprop.study.atomic_files import lock, write
from torch_locoprop.study.training.description import (
    RunError,
    differences,
    differing,
    read_description,
)


@dataclass(frozen=True)
class TuningFolder:
    """The files of one search, but for the journal."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether a search has begun here."""
        return (self.path / "tuning.json").is_file()

    @property
    def journal(self) -> Path:
        """The journal of trials."""
        return self.path / "journal.log"

    def run(self, number: int) -> Path:
        """Return the folder of a trial that is a run of its own."""
        return self.path / "trials" / f"{number:04d}"

    def description(self) -> dict[str, Any]:
        """Return what `tuning.json` says."""
        needed = {"config": dict, "space": dict, "sampler": object, "data": dict}
        return read_description(self.path / "tuning.json", "search", needed)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process change anything meanwhile."""
        with open(self.path / "lock", "ab") as file:
            lock(file, wait=True)
            yield

    def begin(self, description: Mapping[str, Any]) -> None:
        """Make the folder what it says; if it is one already, raise unless it says the same."""
        if (self.path / "config.json").exists():
            raise RunError(f"{self.path} is the folder of a run. Choose another one (--out).")
        (self.path / "workers").mkdir(parents=True, exist_ok=True)
        with self.locked():
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

    @contextmanager
    def worker(self) -> Iterator[str]:
        """Be known as alive, under the name that this gives, until the end or a kill."""
        name = uuid.uuid4().hex
        path = self._worker(name)
        with ExitStack() as stack:
            with self.locked():  # or a file without its lock yet would look like a dead process's
                for other in path.parent.iterdir():
                    self.is_alive(other.name)  # a kill before the first trial leaves nothing else
                file = stack.enter_context(open(path, "wb"))
                lock(file, wait=False)
            try:
                yield name
            finally:
                path.unlink(missing_ok=True)

    def is_alive(self, worker: str) -> bool:
        """Whether the process of that name still runs; forget it if it does not."""
        path = self._worker(worker)
        with suppress(FileNotFoundError), open(path, "rb+") as file:
            if not lock(file, wait=False):
                return True
            path.unlink()
        return False

    def _worker(self, name: str) -> Path:
        return self.path / "workers" / name

    def _check_same(self, description: Mapping[str, Any]) -> None:
        there, here = _flat(self.description()), _flat(description)
        names = differing(there, here)
        if names:
            told = differences(there, here, names)
            raise RunError(
                f"{self.path} has another search: {told}. Choose another folder (--out)."
            )


def _flat(description: Mapping[str, Any]) -> dict[str, Any]:
    """What has to agree for a search to go on, by name."""
    config = dict(description["config"])
    settings = config.pop("settings", {})
    space, data = description["space"], description["data"]
    return {
        **config,
        **settings,
        **{f"the range of {name}": domain for name, domain in space.items()},
        "sampler": description["sampler"],
        **{f"data {name}": value for name, value in data.items()},
    }
