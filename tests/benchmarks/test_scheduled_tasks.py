"""The script that trains small tasks with a decaying rate and several steps of biases."""

from pathlib import Path

import pytest

from benchmarks import scheduled_tasks

PUBLISHED = Path("benchmarks/results/scheduled-tasks-cpu.json")


def test_a_task_is_trained_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scheduled.json"
    some = ["--tasks", "friedman-200", "--rates", "0.04", "--bias-rates", "0", "1", "--steps", "5"]
    scheduled_tasks.main([*some, "--seeds", "0", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "| friedman-200 | " in printed
    assert "| friedman-200 | 1.000 |" not in printed, "biases have moved otherwise"
    scheduled_tasks.main(["--show", str(out)])
    assert printed.endswith(capsys.readouterr().out)


def test_the_published_file_has_all_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    scheduled_tasks.main(["--show", str(PUBLISHED)])
    printed = capsys.readouterr().out
    for task in scheduled_tasks.selected(list(scheduled_tasks.NAMES)):
        assert f"| {task.name} |" in printed
    assert "| geometric mean |" in printed
