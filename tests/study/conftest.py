"""What makes the study's tests quick: hundreds of tiny runs, each of which cleans up and saves."""

import gc
import os
from collections.abc import Iterator

import pytest

from torch_locoprop.study.methods import record


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """Set aside what the imports left: a run begins by collecting garbage, which walks through it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test pulls the plug; what a kill leaves does not depend on it."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget after the test which methods it registered."""
    monkeypatch.setattr(record, "_RECORDS", dict(record._RECORDS))
