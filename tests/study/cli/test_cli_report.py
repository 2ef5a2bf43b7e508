"""`locoprop report`: its page, output and errors."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from study.report.made import data, made

from torch_locoprop.study import methods
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.report import page


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load", lambda name, data_dir=None, download=True: data())


@pytest.fixture
def run(run: Any) -> Any:
    return partial(run, "report")


def pictures(text: str) -> int:
    """How many the page has, without those of plotly itself."""
    return text.replace(page.plotly(), "").count("data:image/png;base64,")


def test_all_runs_of_the_folder_are_on_the_page(run: Any) -> None:
    made(Path("runs/a"), [9.0, 4.0], checkpoint=True)
    made(Path("runs/b"), [9.0, 5.0], "sgd", checkpoint=True)
    code, out, err = run()
    assert (code, err) == (0, "")
    summary, last = out.splitlines()
    assert summary.startswith(
        "curves (made for tests) · 16-6-2 · tanh: adam has the lowest train loss"
    )
    assert last == "2 runs in report.html"
    text = Path("report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert pictures(text) == 3 * 10


def test_options(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, data_dir: Path | None = None, download: bool = True) -> Dataset:
        asked.append((name, data_dir, download))
        return data()

    monkeypatch.setattr(datasets, "load", load)
    made(Path("one/a"), [9.0, 4.0], checkpoint=True)
    made(Path("two/b"), [9.0, 5.0], "sgd", checkpoint=True)
    words = ["one", "two", "--out", "there/page.html", "--title", "Mine", "--images", "3"]
    code, out, _ = run(*words, "--data-dir", "images", "--json")
    assert code == 0
    assert asked == [("curves", Path("images"), False)]
    text = Path("there/page.html").read_text()
    assert "<h1>Mine</h1>" in text
    assert pictures(text) == 3 * 3
    printed = json.loads(out)
    assert printed["report"] == "there/page.html"
    (task,) = printed["tasks"]
    assert task["task"]["model"] == "16-6-2"
    assert task["timed_on"] is None
    places = [(row["place"], row["method"], row["train"]["mean"]) for row in task["ranking"]]
    assert places == [(1, "adam", 4.0), (2, "sgd", 5.0)]
    assert task["ranking"][0]["hyper_parameters"]["lr"] == methods.get("adam").settings["lr"]


def test_timings_in_the_folder_give_the_seconds(run: Any) -> None:
    made(Path("runs/a"), [9.0, 4.0])
    made(Path("runs/timings/a"), [9.0, 8.0, 7.0], seconds=5.0)
    (task,) = json.loads(run("--json")[1])["tasks"]
    assert task["timed_on"] == "m1, 1 thread"
    assert task["ranking"][0]["seconds"]["mean"] == 5.0


def test_what_is_missing_on_the_page_is_said(run: Any) -> None:
    made(Path("runs/a"), [9.0, 4.0])
    made(Path("runs/b"), [9.0, 5.0])
    Path("runs/b/metrics.jsonl").write_text("")
    code, out, err = run()
    assert code == 0
    assert "1 run in report.html" in out
    assert "runs/b is not shown: metrics.jsonl is empty" in err
    assert (
        "No reconstructions for curves (made for tests) · 16-6-2 · tanh: None of these runs has its"
        in err
    )


@pytest.mark.parametrize("folder", ["runs", "elsewhere"])
def test_no_runs_is_one_sentence_that_says_what_to_do(run: Any, folder: str) -> None:
    code, out, err = run(*([] if folder == "runs" else [folder]))
    assert (code, out) == (1, "")
    assert err.startswith(f"No runs in {folder}. Make some with `locoprop compare")
    assert not Path("report.html").exists()


def test_only_broken_runs_is_one_sentence(run: Any) -> None:
    made(Path("runs/a"), [9.0, 4.0])
    Path("runs/a/config.json").write_text("{")
    code, _, err = run()
    assert code == 1
    assert "No run in runs can be read: runs/a: runs/a/config.json is not the description" in err


def test_without_plotly_the_extra_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made(Path("runs/a"), [9.0, 4.0])
    for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    code, _, err = run()
    assert code == 1
    assert 'pip install "torch-locoprop[report]"' in err
    assert len(err.splitlines()) == 1


def test_the_command_line_starts_without_plotly() -> None:
    script = "import sys, torch_locoprop.study.cli.app as c; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_help_teaches(run: Any) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "locoprop report --json" in out
    assert run("--images", "-1")[0] == 2
