"""The benchmark of populations of matrices, run on a tiny model."""

import json
from pathlib import Path

import emulated_graphs
import pytest

from benchmarks import matrix_populations

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TINY = ["--models", "24-20-4", "--batch", "20", "--steps", "11", "--device", "cpu"]


def test_it_is_measured_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated_graphs.emulate(monkeypatch)
    out = tmp_path / "populations.json"
    matrix_populations.main([*TINY, "--methods", "muon", "soap", "kfac@10", "--out", str(out)])
    assert emulated_graphs.Emulated.made == 3  # one for each method
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == ["muon", "soap", "kfac@10"]
    for row in rows:
        assert row["failure"] is None
        assert row["early_difference"] == row["difference"] == 0
        assert row["graph_ms"] > 0
        assert row["eager_ms"] > 0
        assert len(row["losses"]) == 2
        assert ("library_ms" in row) == (row["method"] != "muon")
    table = capsys.readouterr().out
    matrix_populations.main(["--show", str(out)])
    assert capsys.readouterr().out in table


def test_the_measurements_on_the_h200_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    matrix_populations.main(["--show", str(RESULTS / "matrix-populations-h200.json")])
    table = capsys.readouterr().out
    assert "| standard | muon | 5.77 | 2.26 |" in table
    assert "taken out" in table
