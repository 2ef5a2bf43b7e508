"""Optuna's journal as a file, a line for every entry, that a kill and a full disk leave whole.

Optuna's own file has a lock for which everyone waits half a minute after a kill, and half a line at
its end makes it unreadable once another follows. Here the lock goes with the process, and what was
written in part is cut off. The lines are Optuna's, so its other tools can read the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from optuna.storages.journal import BaseJournalBackend

from torch_locoprop.study.atomic_files import lock
from torch_locoprop.study.training.description import RunError


class JournalFile(BaseJournalBackend):
    """Entries in the order in which they were appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read, self._offset = 0, 0  # entries read so far, and where the next one begins

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """Return the entries from this number on."""
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
                    f"Line {self._read + 1} of {self._path} is no entry of a journal. Put the file "
                    "back as it was, or start a new search in another folder (--out)."
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
                rest = memoryview(text.encode())
                while rest:  # a disk that is almost full takes a part, and refuses the next
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        """The file, whole and for this process alone."""
        with open(self._path, "ab"):  # make it
            pass
        with open(self._path, "rb+", buffering=0) as file:
            lock(file, wait=True)
            _cut_off_half_a_line(file)
            yield file


def _cut_off_half_a_line(file: IO[bytes]) -> None:
    """Remove what a kill or a full disk left of the last entry."""
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        file.seek(end - 1)
        if file.read(1) == b"\n":
            break
        end -= 1
    if end < size:
        file.truncate(end)
