"""The lock of a search and its running processes in a PostgreSQL database.

A process holds advisory locks of the server, which end with its connection: at once if it is killed,
and within a minute if its machine disappears.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy

KEEPALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""When either side takes a silent connection for dead: after seconds, probes every seconds, probes."""

CONNECTION = {
    "connect_timeout": 10,
    "client_encoding": "utf8",  # else text of a database without an encoding comes as bytes
    **KEEPALIVE,
    "options": " ".join(f"-c tcp_{name}={value}" for name, value in KEEPALIVE.items()),
}
"""Settings of every connection to the server."""


class PostgresqlLocks:
    """Advisory locks of a server, for processes that share nothing else.

    Args:
        url: The database, as SQLAlchemy names it.
        study: The name of the search; searches with other names have locks of their own.
    """

    def __init__(self, url: str, study: str) -> None:
        self._study = study
        # A connection is closed after each use and in no transaction: a lock is a connection.
        self._engine = sqlalchemy.create_engine(
            url,
            poolclass=sqlalchemy.NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args=CONNECTION,
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from changing the search within this context."""
        with self._holding("lock"):
            yield

    @contextmanager
    def worker(self) -> Iterator[str]:
        """Register this process as running within this context; yields its name."""
        name = uuid.uuid4().hex
        with self._holding(name):
            yield name

    def is_alive(self, worker: str) -> bool:
        """Return True if the process of this name still runs; the caller holds the lock."""
        with self._engine.connect() as connection:
            statement = sqlalchemy.text("SELECT pg_try_advisory_lock(:key)")
            return not connection.execute(statement, {"key": self._key(worker)}).scalar_one()

    @contextmanager
    def _holding(self, name: str) -> Iterator[None]:
        with self._engine.connect() as connection:
            statement = sqlalchemy.text("SELECT pg_advisory_lock(:key)")
            connection.execute(statement, {"key": self._key(name)})
            yield

    def _key(self, name: str) -> int:
        """Return the number of a lock, which has 64 bits with a sign."""
        digest = hashlib.sha256(f"torch-locoprop/{self._study}/{name}".encode()).digest()
        return int.from_bytes(digest[:8], signed=True)
