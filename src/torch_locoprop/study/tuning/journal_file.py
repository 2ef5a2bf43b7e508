"""A file for Optuna's journal that survives killed processes and a full disk.

After a kill, Optuna's own journal file makes all processes wait half a minute for its lock, and an
incomplete last line makes it unreadable once another line follows. Here the lock ends with its process,
and an incomplete last line is removed. The lines have Optuna's format, so Optuna's tools can read them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from optuna.storages.journal import BaseJournalBackend

from torch_locoprop.study.atomic_files import cut_off_half_a_line, lock, write_all
from torch_locoprop.study.training.description import RunError


class JournalFile(BaseJournalBackend):
    """A journal of Optuna: one JSON line per entry, in the order in which they were appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read, self._offset = 0, 0  # entries read so far, and where the next one begins

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """Return the entries from this number on.

        Raises:
            RunError: If a line is not an entry.
        """
        if log_number_from != self._read:
            self._read, self._offset = 0, 0
        with self._open() as file:
            file.seek(self._offset)
            lines = file.read().splitlines(keepends=True)
        entries = []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise RunError(
                    f"Line {self._read + 1} of {self._path} is not an entry of a journal. Restore the "
                    "file, or start a new search in another folder (--out)."
                ) from error
            if self._read >= log_number_from:
                entries.append(entry)
            self._read += 1
            self._offset += len(line)
        return entries

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append the entries."""
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        try:
            with self._open() as file:
                file.seek(0, os.SEEK_END)
                write_all(file, text.encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        """Yield the locked file, without an incomplete last line."""
        with open(self._path, "ab"):  # create the file
            pass
        with open(self._path, "rb+", buffering=0) as file:
            lock(file, wait=True)
            cut_off_half_a_line(file)
            yield file
