"""A PostgreSQL server for tests, where the programs and the driver are installed."""

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

USER = "locoprop"


def _program(name: str) -> str:
    """Return the path of a program; Debian keeps them out of PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(found[-1]) if found else "")


@contextmanager
def running() -> Iterator[str]:
    """Yield the URL of an empty database of a new server; skip the test where there is none."""
    if not _program("initdb"):
        pytest.skip("PostgreSQL is not installed")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("the driver psycopg is not installed")
    own: dict[str, Any] = {"check": True, "capture_output": True, "cwd": "/"}
    if os.geteuid() == 0:  # the server refuses to run as root
        try:
            own["user"] = pwd.getpwnam("postgres").pw_uid
        except KeyError:
            pytest.skip("root needs the user postgres to start PostgreSQL")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp()
    try:
        if "user" in own:
            os.chown(folder, own["user"], -1)
        data = f"{folder}/data"
        subprocess.run(
            [
                _program("initdb"),
                "-D",
                data,
                "-U",
                USER,
                "-A",
                "trust",
                "-N",
                "-E",
                "UTF8",
                "--no-locale",
            ],
            **own,
        )
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -F"
        control = [_program("pg_ctl"), "-D", data, "-w", "-l", f"{folder}/log"]
        subprocess.run([*control, "-o", options, "start"], **own)
        try:
            yield f"postgresql://{USER}@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **own)
    finally:
        shutil.rmtree(folder)
