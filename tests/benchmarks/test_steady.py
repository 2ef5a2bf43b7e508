"""The benchmark of long runs: times of the first and last steps, memory, denormal numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import steady


def test_denormal_numbers_are_told_from_small_ones_and_zeros() -> None:
    tiny = torch.finfo(torch.float32).tiny
    numbers = torch.tensor([0.0, -0.0, 1.0, tiny, -tiny, tiny / 2, -tiny / 4, 1e-45])
    assert steady.is_denormal(numbers).tolist() == [False] * 5 + [True] * 3


def test_black_pixels_leave_denormals_behind() -> None:
    images = torch.rand(8, 6)
    images[:, 0] = 0
    run = steady.Run("locoprop-m", images, "6-4-2")
    for _ in range(90):  # 0.9 to the 900th is below the smallest normal number
        run.step()
    assert run.denormals() == {"square": 4}


def test_a_run_is_watched_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(steady, "LOOK_AT", (2, 4))
    found = steady.watched("locoprop-s", torch.rand(8, 6), steps=8, model="6-4-2", ends=3)
    assert found["steps"] == 8
    assert min(found["first_ms"], found["last_ms"]) > 0
    assert set(found["resident_mib"]) == {"2", "4"}
    path = tmp_path / "steady.json"
    path.write_text(json.dumps({"runs": [found]}))
    steady.main(["--show", str(path)])
    assert "| locoprop-s | " in capsys.readouterr().out
