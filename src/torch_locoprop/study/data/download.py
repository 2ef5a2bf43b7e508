"""Download one file from the first mirror that delivers it.

Bytes are written to `<file>.part`. After a lost connection or an interrupted program, the next attempt
requests only the missing bytes. The file is renamed in one atomic step after its content was checked.
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
"""Called with the file's name, the bytes received so far, and the total if it is known."""

ATTEMPTS = 4
"""Connections to one mirror for one file, as long as each delivers some bytes."""

TIMEOUT = 30.0
"""Seconds without an answer after which a mirror is given up."""

CHUNK = 1 << 16


class DownloadError(RuntimeError):
    """No mirror delivered the file; the message has the reason for each mirror."""


def fetch(
    urls: Sequence[str],
    path: Path,
    check: Callable[[Path], object],
    progress: Progress | None = None,
) -> None:
    """Download a file from the first URL that delivers one which passes the check.

    Args:
        urls: The addresses, tried in order.
        path: Where the file is stored.
        check: Called with the path of the downloaded file; raises ValueError if it is wrong. The
            message continues a sentence that begins with the name of the file.
        progress: Called with the file's name, the bytes so far, and the total.

    Raises:
        DownloadError: If no address delivers the file.
        OSError: If the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    failures = []
    with _one_process_at_a_time(path.parent):
        if path.exists():  # another process downloaded it while this one waited for the lock
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
    """Download the rest of the part and check it; remove it if it is wrong."""
    failure = DownloadError("the connection was lost too often")
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
            # The first bytes may be from another mirror, so download everything once more.
        else:
            return
    raise failure


def _receive(url: str, part: Path, start: int, progress: Progress | None) -> None:
    """Append all bytes after the first `start`; start again if the mirror has no partial requests."""
    headers = {"Range": f"bytes={start}-"} if start else {}
    try:
        response = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if start and error.code == 416:  # no bytes are left: the part is complete, or wrong
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
        raise DownloadError(f"the connection was lost after {done:,} of {total:,} bytes")


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
    """Wait while another process downloads into the folder, if the system has file locks."""
    with (folder / ".lock").open("a") as file:
        # On a file system without locks, two downloads may spoil each other's part. The check of the
        # file detects it.
        with suppress(OSError):
            lock(file, wait=True)
        yield
