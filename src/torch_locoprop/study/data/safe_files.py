"""Files that a kill leaves whole, and locks that a kill frees."""

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
    """Put a file in the place of another, whole or not at all; an error names the file."""
    part = path.with_name(path.name + ".part")  # one name: what a kill leaves, the next overwrites
    try:
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)  # on a full disk, what was written is room again
        reason = _behind(error)
        if isinstance(reason, OSError):
            raise OSError(reason.errno, reason.strerror, str(path)) from error
        raise reason from None


def _behind(error: BaseException) -> BaseException:
    """What went wrong: `torch.save` puts an error of its own in front of a full disk or a Ctrl-C."""
    while isinstance(error, RuntimeError) and error.__context__ is not None:
        error = error.__context__
    return error


def lock(file: IO[Any], *, wait: bool) -> bool:
    """Lock an open file until it is closed; say whether it worked. Windows has no such lock."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    return True
