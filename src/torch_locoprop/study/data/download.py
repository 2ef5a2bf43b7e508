"""Fetch one file from the first mirror that has it: resumed where it was cut, kept only if right.

The bytes gather in `<file>.part`. A cut connection or an interrupted program leaves them there, and
the next attempt asks only for the rest. The file gets its name in one atomic step, after its check.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from torch_locoprop.study.atomic_files import lock

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes that are here, and the bytes in all where known."""

ATTEMPTS = 4
"""Connections to one mirror for one file, as long as each brings some more of it."""

TIMEOUT = 30.0
"""Seconds without an answer after which a mirror counts as down."""

CHUNK = 1 << 16


class DownloadError(RuntimeError):
    """No mirror delivered the file; the message has each mirror's reason."""


def fetch(
    urls: Sequence[str],
    path: Path,
    check: Callable[[Path], object],
    progress: Progress | None = None,
) -> None:
    """Download `path` from the first of the `urls` that delivers a file that passes the check.

    `check` raises ValueError, with a sentence that the file's name begins, for a wrong file. What
    fails on this machine, such as a full disk, is an OSError; what fails elsewhere, a DownloadError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    failures = []
    with _one_process_at_a_time(path.parent):
        if path.exists():  # fetched by another process while this one waited
            return
        for url in urls:
            try:
                _fetch_part(url, part, check, progress)
            except DownloadError as error:
                failures.append(f"{urlsplit(url).netloc}: {error}")
            else:
                os.replace(part, path)
                return
    raise DownloadError("; ".join(failures))


def _fetch_part(
    url: str, part: Path, check: Callable[[Path], object], progress: Progress | None
) -> None:
    """Complete and check the part, on as many connections as it takes; a wrong one is removed."""
    failure = DownloadError("the connection was cut too often")
    for _ in range(ATTEMPTS):
        start = part.stat().st_size if part.exists() else 0
        try:
            _receive(url, part, start, progress)
        except DownloadError as error:
            if not part.exists() or part.stat().st_size <= start:
                raise
            failure = error
            continue
        try:
            check(part)
        except ValueError as error:
            part.unlink()
            failure = DownloadError(f"the file {error}")
            if start == 0:
                raise failure from error
            # The first bytes may have been those of another mirror: once more, from the beginning.
        else:
            return
    raise failure


def _receive(url: str, part: Path, start: int, progress: Progress | None) -> None:
    """Append what follows the first `start` bytes to the part; all of it, if one cannot ask so."""
    headers = {"Range": f"bytes={start}-"} if start else {}
    try:
        response = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if start and error.code == 416:  # nothing follows: the part is complete, or wrong
            return
        raise DownloadError(f"HTTP status {error.code}") from error
    except (OSError, HTTPException) as error:
        raise DownloadError(_reason(error)) from error
    with response:
        done = start if response.status == 206 else 0
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with part.open("ab") as file:
            file.truncate(done)
            while chunk := _read(response):
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(part.stem, done, total)
    if total is not None and done < total:
        raise DownloadError(f"the connection was cut after {done:,} of {total:,} bytes")


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, HTTPException) as error:
        raise DownloadError(_reason(error)) from error


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, URLError) else error
    return str(getattr(cause, "strerror", None) or cause or type(cause).__name__)


@contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    """Wait while another process downloads into the folder, where the system has such locks."""
    with (folder / ".lock").open("a") as file:
        # On a file system without locks, two downloads may spoil each other's part. The check of the
        # file detects it.
        with suppress(OSError):
            lock(file, wait=True)
        yield
