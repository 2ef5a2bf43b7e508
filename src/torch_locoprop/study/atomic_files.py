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
