"""The tests on several versions of PyTorch: counts, reasons to skip, versions that are not there."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import matrix

TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip(reason="needs a GPU")
def test_skips(): pass
"""


def test_outcomes_and_reasons_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    found = matrix.outcome(Path(sys.executable), [str(file)], tmp_path / "report.xml")
    assert matrix.row("2.9.0", *found) == "| 2.9.0 | 1 | 1 | 1: needs a GPU |"


def test_a_version_that_cannot_be_installed_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fails(version: str, work: Path, index: str | None) -> Path:
        raise subprocess.CalledProcessError(1, ["pip", "install", f"torch=={version}"])

    monkeypatch.setattr(matrix, "environment", fails)
    out = tmp_path / "matrix.md"
    with pytest.raises(SystemExit, match="True"):
        matrix.main(["--versions", "9.9", "--work", str(tmp_path), "--out", str(out), "tests"])
    assert "| 9.9 | – | – | not installed: torch==9.9 |" in out.read_text()


def test_the_oldest_version_is_the_one_that_is_allowed() -> None:
    project = (matrix.ROOT / "pyproject.toml").read_text()
    oldest = matrix.VERSIONS[0].rpartition(".")[0]
    assert f'dependencies = ["torch>={oldest}"]' in project
    assert f'"torch=={matrix.VERSIONS[-1]}"' in project
