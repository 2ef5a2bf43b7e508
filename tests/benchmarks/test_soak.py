"""The long checks in a small version: they pass, and notice what they are for."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from torch_locoprop import LocoProp

needs_sigkill = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")


@needs_sigkill
def test_the_small_version_passes(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "soak.json"
    counts = ["--kills", "3", "--steps", "160", "--optimizers", "20"]
    counts += ["--epochs", "10", "--trials", "4"]
    soak.main([*counts, "--out", str(file)])
    found = json.loads(file.read_text())
    assert found["command"].startswith("python -m benchmarks.soak --kills 3 --steps 160")
    assert found["training"]["kills"] == found["search"]["kills"] == 3
    assert found["steps of general"]["steps"] == 40
    assert found["optimizers"]["optimizers"] == 20


@needs_sigkill
def test_another_result_after_kills_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(soak.BrokenPromiseError, match="the result is another one"):
        soak.survive_kills(soak.train, 2, lambda folder: folder.name, kills=1, seed=0)


def test_growth_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(LocoProp, "zero_grad", lambda self: kept.append([[] for _ in range(9)]))
    with pytest.raises(soak.BrokenPromiseError, match="memory grew"):
        soak.steps_without_growth(100, soak.METHODS["locoprop-m"])


def test_an_optimizer_that_stays_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(LocoProp, "zero_grad", lambda self: kept.append(self))
    with pytest.raises(soak.BrokenPromiseError, match="optimizers left something behind"):
        soak.optimizers_dropped(20)
