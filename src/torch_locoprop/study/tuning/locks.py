"""Locks for the processes of a search, and a register of those that still run.

A lock and a registration end with their process, however it ends, so that no process waits for a dead
one. ``postgresql_locks`` has the locks of processes that share nothing but a database.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from torch_locoprop.study.atomic_files import lock
from torch_locoprop.study.training.description import RunError

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a disk that has no file locks."""


class Locks(Protocol):
    """The lock of a search, and its running processes."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from changing the search within this context."""

    def worker(self) -> AbstractContextManager[str]:
        """Register this process as running within this context; yields its name."""

    def is_alive(self, worker: str) -> bool:
        """Return True if the process of this name still runs; the caller holds the lock."""


@dataclass(frozen=True)
class FileLocks:
    """Locked files in a folder, for processes that share its disk.

    Args:
        path: The folder. It gets the file ``lock`` and a file in ``workers/`` for each process.
    """

    path: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from changing the search within this context.

        Raises:
            RunError: If the disk has no file locks.
        """
        self._workers.mkdir(parents=True, exist_ok=True)
        with open(self.path / "lock", "ab") as file:
            self._lock(file, wait=True)
            yield

    @contextmanager
    def worker(self) -> Iterator[str]:
        """Register this process as running within this context; yields its name."""
        name = uuid.uuid4().hex
        path = self._workers / name
        with ExitStack() as stack:
            # Another process would take a file that is not locked yet for that of a dead process.
            with self.locked():
                for other in self._workers.iterdir():
                    self.is_alive(other.name)  # removes files of processes that were killed
                file = stack.enter_context(open(path, "wb"))
                self._lock(file, wait=False)
            try:
                yield name
            finally:
                path.unlink(missing_ok=True)

    def is_alive(self, worker: str) -> bool:
        """Return True if the process of this name still runs; otherwise remove its file."""
        path = self._workers / worker
        with suppress(FileNotFoundError), open(path, "rb+") as file:
            if not self._lock(file, wait=False):
                return True
            path.unlink()
        return False

    @property
    def _workers(self) -> Path:
        return self.path / "workers"

    def _lock(self, file: IO[bytes], *, wait: bool) -> bool:
        try:
            return lock(file, wait=wait)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise RunError(
                f"The disk of {self.path} has no file locks ({error.strerror}), which processes "
                "need to share a search. Use another disk, or a database (--storage)."
            ) from error
