"""The benchmark of populations of matrices, run on a tiny model."""

import json
from pathlib import Path

import emulated_graphs
import pytest

from benchmarks import matrix_populations

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
        assert ("library_ms" in row) == ("stacked_ms" in row) == (row["method"] != "muon")
        assert max(row.get("library_error", 0), row.get("stacked_error", 0)) < 1e-4
    table = capsys.readouterr().out
    matrix_populations.main(["--show", str(out)])
    assert capsys.readouterr().out in table
