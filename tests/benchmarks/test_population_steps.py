"""The time of a population's step, measured on something tiny."""

import json
from pathlib import Path

import pytest

from benchmarks import population

TINY = ["--model", "12-8-3", "--batch", "20", "--members", "3", "--rounds", "2", "--steps", "1"]


def test_it_is_measured_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "population.json"
    methods = ["--methods", "locoprop-m", "rmsprop"]
    population.main([*TINY, "--device", "cpu", *methods, "--out", str(out)])
    content = json.loads(out.read_text())
    assert [row["method"] for row in content["rows"]] == ["locoprop-m", "rmsprop"]
    assert all(row["ms"] > 0 and row["members_that_diverged"] == 0 for row in content["rows"])
    assert "| locoprop-m |" in capsys.readouterr().out


def test_operations_per_second(tmp_path: Path) -> None:
    """Three members, of 12-8-3-8-12 with 20 rows, at T = 10: 21 units a layer but one."""
    out = tmp_path / "population.json"
    population.main([*TINY, "--device", "cpu", "--methods", "locoprop-m", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    weights = 12 * 8 + 8 * 3 + 3 * 8 + 8 * 12
    flop = 3 * 2 * 20 * (21 * weights - 12 * 8)
    assert row["tflop_per_s"] * 1e12 * row["ms"] / 1e3 == pytest.approx(flop)
    assert row["trials_per_hour"] == pytest.approx(3 * 3600 / (6000 * row["ms"] / 1e3))


def test_a_method_without_populations() -> None:
    with pytest.raises(SystemExit, match="kfac has no population"):
        population.main([*TINY, "--device", "cpu", "--methods", "kfac"])
