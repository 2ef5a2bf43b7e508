"""The committed results: every run is whole, finished and documented."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import results_provenance
from torch_locoprop.study.training.run_folder import RunFolder
from torch_locoprop.study.training.run_result import result_of

RESULTS = Path(__file__).parents[2] / "results"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="a source distribution has no runs")


def test_every_run_is_finished_or_diverged() -> None:
    folders = results_provenance.run_folders(RESULTS)
    assert len(folders) > 100
    assert not [folder for folder in folders if not result_of(folder).finished]


def test_every_run_says_what_made_it() -> None:
    for folder in results_provenance.run_folders(RESULTS):
        description = RunFolder(folder).description()
        assert description["config"]["method"], folder
        assert description["data"]["fingerprint"], folder
        assert {"machine", "torch", "python", "torch_locoprop"} <= set(description["environment"])


def test_every_run_has_a_row_in_the_table_of_provenance() -> None:
    text = (RESULTS / "PROVENANCE.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|.*\| (\w[\w ]*) \|$", text, re.M)
    listed = {
        f"{folder}/{run}" for folder, runs, _ in rows for run in re.findall(r"`([^`]+)`", runs)
    }
    there = results_provenance.run_folders(RESULTS)
    assert listed == {str(folder.relative_to(RESULTS)) for folder in there}
    assert all(re.fullmatch(r"[0-9a-f]{7,}", revision) for *_, revision in rows)


def test_every_folder_is_in_the_readme() -> None:
    text = (RESULTS / "README.md").read_text()
    for folder in (path.name for path in RESULTS.iterdir() if path.is_dir()):
        short = f"-{folder.rpartition('-')[2]}"  # as in `mnist-tanh-standard-fp32`, `-bf16`
        assert f"`{folder}`" in text or f"`{short}`" in text, folder


def test_the_results_are_small() -> None:
    """No checkpoint is committed, and no file is large."""
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix == ".pt"]
    assert max(path.stat().st_size for path in files) < 1_000_000
    assert sum(path.stat().st_size for path in files) < 12_000_000


def test_commits_are_those_that_added_the_runs(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    top = tmp_path / "results"
    (top / "first").mkdir(parents=True)
    (top / "first" / "config.json").write_text("{}")
    git("add", ".")
    git("commit", "-qm", "one")
    first = git("log", "-1", "--format=%h")
    (top / "second").mkdir()
    (top / "second" / "config.json").write_text("[]")
    (top / "first" / "config.json").write_text("{ }")
    git("add", ".")
    git("commit", "-qm", "two")
    second = git("log", "-1", "--format=%h")
    assert results_provenance.revisions(top) == {
        "first/config.json": first,
        "second/config.json": second,
    }


def test_runs_of_a_population_have_rows_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_provenance, "revisions", lambda top: {})
    machine = {"machine": "m1", "torch": "2.11.0+cu130", "torch_locoprop": "0.1.0"}
    for name, more in (("a-s0", {}), ("a-s1", {"population": 2}), ("a-s2", {"population": 2})):
        (tmp_path / "task" / name).mkdir(parents=True)
        content = {"config": {"precision": "tf32"}, "environment": {**machine, **more}}
        (tmp_path / "task" / name / "config.json").write_text(json.dumps(content))
    rest = "tf32 | 2.11.0 | 0.1.0 | not committed |"
    assert results_provenance.table(tmp_path).splitlines()[2:] == [
        f"| `task` | `a-s0` | m1 | {rest}",
        f"| `task` | `a-s1`, `a-s2` | m1, 2 together | {rest}",
    ]


def test_the_figures_of_the_benchmarks_have_no_font_of_type_3() -> None:
    pictures = list((RESULTS.parent / "benchmarks" / "results").glob("*.pdf"))
    assert len(pictures) >= 6
    assert not [path.name for path in pictures if b"/Type3" in path.read_bytes()]
