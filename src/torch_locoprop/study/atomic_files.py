"""Files that are replaced as a whole, and locks that end with the process that holds them.

A process that is killed leaves either the old file or the new one, never a part. Every package of the
study writes its results with these functions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

if sys.platform != "win32":
    import fcntl


def replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Create or replace a file in one atomic step.

    Args:
        path: The file.
        write: Called with an open binary file; writes the new content.

    Raises:
        OSError: If the content cannot be written; the error names ``path``. The old file stays.
    """
    # A fixed name, so that the next call overwrites what a killed process left.
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)  # frees the space on a full disk
        cause = _cause(error)
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise cause from None


def write(path: Path, content: str | bytes) -> None:
    """Create or replace a file with this content, text in UTF-8, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    replace(path, lambda file: file.write(data))


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, which several processes may do at a time, and create the file.

    A half-written last line, which a kill or a full disk may have left, is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab"):  # create the file
        pass
    try:
        with open(path, "rb+", buffering=0) as file:
            lock(file, wait=True)
            cut_off_half_a_line(file)
            file.seek(0, os.SEEK_END)
            write_all(file, f"{line}\n".encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_all(file: IO[bytes], content: bytes) -> None:
    """Write all bytes to an unbuffered file, and to the disk.

    An almost full disk writes a part before it fails.
    """
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())


def cut_off_half_a_line(file: IO[bytes]) -> None:
    """Remove an incomplete last line from an open file."""
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        file.seek(end - 1)
        if file.read(1) == b"\n":
            break
        end -= 1
    if end < size:
        file.truncate(end)


def lock(file: IO[Any], *, wait: bool) -> bool:
    """Lock an open file until it is closed, or until the process ends.

    Args:
        file: The open file.
        wait: Wait until other processes have released the lock.

    Returns:
        False if another process holds the lock. Always True on Windows, which has no such locks.
    """
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    return True


def _cause(error: BaseException) -> BaseException:
    """Return the first error: ``torch.save`` hides a full disk or Ctrl-C behind one of its own."""
    while isinstance(error, RuntimeError) and error.__context__ is not None:
        error = error.__context__
    return error
