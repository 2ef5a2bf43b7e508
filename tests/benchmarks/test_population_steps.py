"""The benchmark of populations, run on a tiny model."""

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
    """At T = 10 every layer has 21 units, the first one 20; there are three members and 20 rows."""
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
