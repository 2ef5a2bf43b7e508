"""Storages that several machines share: a journal file or a database. Importing this imports Optuna.

The processes of a search keep all trials in the storage, and each process writes its own folder of
results (:mod:`~torch_locoprop.study.tuning.folder`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.tuning.journal_file import JournalFile
from torch_locoprop.study.tuning.locks import FileLocks, Locks
from torch_locoprop.study.tuning.postgresql_locks import CONNECTION, PostgresqlLocks
from torch_locoprop.study.tuning.storage_address import StorageAddress

SQLITE_SECONDS = 60
"""Seconds that a process waits while others write to the file."""


@contextmanager
def errors_of(address: StorageAddress) -> Iterator[None]:
    """Raise errors of a database within this context as a RunError that says what to do."""
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) else error
        first = cause.orig if isinstance(cause, DBAPIError) else cause
        reason = str(first or error).strip().splitlines()[0].rstrip(".")
        advice = (
            "Check that the server runs and that the address, the user and the password are right"
            if address.path is None
            else "Check that the file is a database of Optuna that you can write to"
        )
        raise RunError(
            f"The storage {address.public} does not work ({reason}). {advice}, then give the same "
            "command again."
        ) from error


def check(address: StorageAddress) -> None:
    """Raise an error unless the storage can be reached.

    Raises:
        RunError: If the folder of a file, or the server of a database, cannot be reached.
        ImportError: If a package is missing.
    """
    path = address.path
    if path is None:
        with errors_of(address), _engine(address).connect():
            return
    if path.is_dir():
        raise RunError(f"The storage {address.public} is a folder. Give a file in it (--storage).")
    if not path.parent.is_dir():
        raise RunError(
            f"The folder of the storage {address.public} does not exist. Create it, or check that the "
            "shared disk is there."
        )


def locks_of(address: StorageAddress, study: str) -> Locks:
    """Return the locks of a search of this name."""
    if address.path is None:
        return PostgresqlLocks(_url(address), study)
    return FileLocks(address.path.with_name(f"{address.path.name}.locks"))


@contextmanager
def opened(address: StorageAddress) -> Iterator[BaseStorage]:
    """Yield Optuna's storage, and close its connections after this context.

    Raises:
        RunError: If a newer version of Optuna has made the database.
    """
    if not address.url:
        assert address.path is not None
        yield JournalStorage(JournalFile(address.path))
        return
    options = (
        {"pool_pre_ping": True, "connect_args": CONNECTION}
        if address.path is None
        else {"connect_args": {"timeout": SQLITE_SECONDS}}
    )
    try:
        storage = RDBStorage(_url(address), engine_kwargs=options)
    except RuntimeError as error:
        raise RunError(f"The storage {address.public} cannot be used: {error}") from error
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _engine(address: StorageAddress) -> sqlalchemy.Engine:
    try:
        return sqlalchemy.create_engine(
            _url(address), poolclass=sqlalchemy.NullPool, connect_args=CONNECTION
        )
    except ImportError as error:
        raise ImportError(
            f"The storage {address.public} needs the package psycopg, which is not installed. "
            'Install it with: pip install "torch-locoprop[postgresql]".'
        ) from error


def _url(address: StorageAddress) -> str:
    """Return the URL with the driver, whose default depends on the version of SQLAlchemy."""
    if address.path is None:
        return address.url.replace("postgresql://", "postgresql+psycopg://", 1)
    return address.url
