"""Fixtures that make hundreds of tiny runs quick, and restore the registry of methods."""

import gc
import os
from collections.abc import Iterator

import pytest

from torch_locoprop.study.methods import record


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """Freeze imported objects, as every run begins with a garbage collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync, which matters only if the machine loses power."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove methods that the test registers."""
    monkeypatch.setattr(record, "_RECORDS", dict(record._RECORDS))
