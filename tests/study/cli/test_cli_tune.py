"""`locoprop tune`: its output, folder and errors."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from torch_locoprop.study.cli import exit_codes
from torch_locoprop.study.cli.tune import watching
from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.training.run_result import result_of
from torch_locoprop.study.tuning.campaign import Status

TASK = ["--model", "12-8-3", "--epochs", "2", "--batch-size", "20", "--device", "cpu"]
TINY = [*TASK, "--trials", "5", "-k", "3", "-m", "adam"]


@pytest.fixture(autouse=True)
def _tiny_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every data set is a tiny one, and the current folder is empty."""
    images = torch.rand(60, 12, generator=torch.Generator().manual_seed(1))

    def load(name: str, data_dir: Path | None = None, **_: Any) -> Dataset:
        return Dataset(name, images[:40], images[40:], "test")

    monkeypatch.setattr(datasets, "load", load)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_the_best_configuration_trains(run: Any) -> None:
    code, out, err = run("tune", *TINY, "--out", "there")
    assert code == 0
    first, second = out.splitlines()
    assert first.startswith("adam: train loss ")
    assert "(5 complete): lr=" in first
    assert second == "Train with it: locoprop train --config there/best.json"
    assert [line.split()[1] for line in err.splitlines()] == ["0/5", "3/5", "5/5"]
    code, out, _ = run("train", "--config", "there/best.json", "--out", "run", "--json")
    assert code == 0
    trained = json.loads(out)
    code, out, _ = run("tune", "--out", "there", "--trials", "5", "--json", "--quiet")
    found = json.loads(out)
    assert trained["config"] == found["config"]
    assert trained["train_loss"] == pytest.approx(found["best"]["train_loss"], rel=1e-4)
    assert found["states"] == {"complete": 5}
    assert found["folder"] == "there"


def test_the_same_command_is_the_same_search(run: Any) -> None:
    """A search gets a new folder and continues up to the number of trials."""
    assert run("tune", *TINY, "--quiet")[0] == 0
    (folder,) = Path("tuning").iterdir()
    assert folder.name.startswith("curves-12-8-3-adam-")
    before = (folder / "trials.jsonl").read_text()
    code, _, err = run("tune", *TINY)
    assert (code, len(err.splitlines())) == (0, 1)
    assert (folder / "trials.jsonl").read_text() == before
    run("tune", *TINY, "--trials", "7", "--quiet")
    assert (folder / "trials.jsonl").read_text().startswith(before)
    assert len((folder / "trials.jsonl").read_text().splitlines()) == 7
    run("tune", *TINY, "--range", "lr=1e-4:1e-3", "--quiet")
    assert len(list(Path("tuning").iterdir())) == 2


def test_options_reach_the_search(run: Any) -> None:
    options = ["--range", "lr=1e-3:1e-2", "--range", "gamma=2,3", "--set", "solver=sgd"]
    task = ["-m", "locoprop-s", "--transfer", "relu", "--seed", "4", "--sampler", "gp"]
    code, out, err = run("tune", *TINY, *task, *options, "--out", "there", "--json", "--quiet")
    assert (code, err) == (0, "")
    config = json.loads(out)["config"]
    assert (config["method"], config["transfer"], config["seed"]) == ("locoprop-s", "relu", 4)
    assert config["settings"]["solver"] == "sgd"
    description = json.loads(Path("there/tuning.json").read_text())
    assert description["space"] == {"lr": {"log": [1e-3, 1e-2]}, "gamma": {"choices": [2.0, 3.0]}}
    assert description["sampler"] == "gp"
    for line in Path("there/trials.jsonl").read_text().splitlines():
        own = json.loads(line)["settings"]
        assert 1e-3 <= own["lr"] <= 1e-2
        assert own["gamma"] in (2, 3)


def test_a_folder_tells_what_is_searched_and_refuses_what_is_not(run: Any) -> None:
    run("tune", *TINY, "--range", "lr=1e-3:1e-2", "--out", "there")
    assert run("tune", "--out", "there", "--trials", "6")[0] == 0
    assert len(Path("there/trials.jsonl").read_text().splitlines()) == 6
    code, _, err = run("tune", "--out", "there", "--seed", "3")
    assert code == 1
    assert "seed is 0 there and 3 here" in err
    code, _, err = run("tune", *TINY, "--out", "there")
    assert code == 1
    assert "the range of lr is {'log': [0.001, 0.01]} there" in err
    code, _, err = run("tune", "--out", "there", "-m", "sgd")
    assert "method is 'adam' there and 'sgd' here" in err


@pytest.mark.parametrize("address", ["shared.journal", "sqlite:///shared.db"])
def test_folders_share_the_trials_of_a_storage(run: Any, address: str) -> None:
    storage = ["--storage", address]
    assert run("tune", *TINY, *storage, "--trials", "2", "--out", "one", "--quiet")[0] == 0
    code, out, _ = run("tune", *TINY, *storage, "--json", "--quiet")
    assert code == 0
    (folder,) = Path("tuning").iterdir()
    assert json.loads(out)["states"] == {"complete": 5}
    code, _, err = run("tune", "--out", "one", "--trials", "5")  # the folder knows its storage
    assert (code, len(err.splitlines())) == (0, 1)
    assert Path("one/trials.jsonl").read_text() == (folder / "trials.jsonl").read_text()
    code, _, err = run("tune", *TINY, "--out", "one", "--storage", "other.journal")
    assert code == 1
    assert "storage is" in err


def test_a_search_that_finds_nothing_says_so(run: Any) -> None:
    code, out, err = run(
        "tune", *TINY, "-m", "sgd", "--range", "lr=1e7:1e9", "--warmup-epochs", "0", "--quiet"
    )
    assert code == exit_codes.DIVERGED
    assert out.startswith("5 diverged: tuning/")
    assert err.startswith("None of 5 trials finished with a finite loss.")
    assert "--range lr=LOW:HIGH" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "adem"], "Did you mean 'adam'"),
        (["--range", "lr"], "Must be KEY=LOW:HIGH"),
        (["--range", "lr=3"], "Invalid --range lr=3"),
        (["--range", "rate=1:3"], "Unknown setting of adam 'rate'"),
        (["--range", "lr=1:2", "--set", "lr=1"], "Give either --range or --set"),
        (["--set", "lr"], "Must be KEY=VALUE"),
        (["--set", "lr=-1"], "Invalid lr=-1"),
        (["--sampler", "grid"], "Unknown sampler 'grid'"),
        (["--storage", "mysql://host/trials"], "Unknown storage mysql://"),
        (["--trials", "0"], "Invalid trials=0"),
        (["--population", "0"], "Invalid population=0"),
        (["--model", "13-2"], "first width must be 12"),
        (["--out", "file/there"], "Choose a folder that you can write to with --out."),
        (["-m", "soap"], "torch-locoprop[peers]"),
    ],
)
def test_errors_are_one_sentence(
    run: Any, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    Path("file").write_text("")
    code, out, err = run("tune", *TINY, *arguments)
    elsewhere = "write to" in message or "peers" in message
    assert (code, out) == (exit_codes.FAILED if elsewhere else exit_codes.USAGE, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not Path("tuning").exists()


@pytest.mark.parametrize("limit", [600, 3000])
def test_a_full_disk_is_one_sentence_and_the_search_goes_on_later(run: Any, limit: int) -> None:
    """A limit on the size of files simulates a full disk, for the description and the journal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        code, _, err = run("tune", *TINY, "--out", "there", "--quiet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    assert err.startswith("there/")
    assert err.endswith("Free some space, then give the same command again.\n")
    assert len(err.splitlines()) == 1
    code, out, _ = run("tune", *TINY, "--out", "there", "--json")
    assert code == 0
    assert json.loads(out)["states"] == {"complete": 5}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_one_sentence(run: Any) -> None:
    Path("closed").mkdir(mode=0o500)
    code, _, err = run("tune", *TINY, "--out", "closed/there", "--quiet")
    assert code == 1
    assert "Permission denied. Choose a folder" in err


def test_without_optuna_it_is_named_and_everything_else_works(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ("optuna", "torch_locoprop.study.tuning.journal", "torch_locoprop.study.tuning.search")
    for name in [name for name in sys.modules if name.startswith(gone)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = run("tune", *TINY)
    assert code == 1
    assert "optuna" in err
    assert 'pip install "torch-locoprop[study]"' in err
    assert run("train", *TASK, "--out", "run")[0] == 0
    assert result_of("run").finished


def test_optuna_is_imported_by_a_search_alone() -> None:
    """Other commands start without Optuna."""
    script = "import sys, torch_locoprop.study.cli.app as c; sys.exit('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_ctrl_c_in_a_process(tmp_path: Path) -> None:
    """A real process: a signal within a trial, the advice to continue, and the continuation."""
    script = (
        "import torch, sys; from torch_locoprop.study.data import datasets\n"
        "from torch_locoprop.study.cli import main as cli\n"
        "x = torch.rand(60, 12, generator=torch.Generator().manual_seed(0))\n"
        "data = datasets.Dataset('curves', x[:40], x[40:], 'test')\n"
        "datasets.load = lambda *a, **k: data\n"
        "cli.main(sys.argv[1:])\n"
    )
    folder = tmp_path / "over there"
    start = [sys.executable, "-c", script]
    arguments = ["tune", *TINY, "--trials", "100000", "--no-pruning", "--out", str(folder)]
    with subprocess.Popen(
        [*start, *arguments], stderr=subprocess.PIPE, text=True, preexec_fn=_default_sigint
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if " 6/" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in rest
    advice = rest.splitlines()[-1]
    assert f"Continue with: locoprop tune --out '{folder}' --trials 100000 --population 3" in advice
    assert advice.endswith("--no-pruning")
    there = len((folder / "trials.jsonl").read_text().splitlines())
    more = ["tune", "--out", str(folder), "--trials", str(there), "--json", "--quiet"]
    done = subprocess.run([*start, *more], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["states"] == {"complete": there}


def test_help_teaches(run: Any) -> None:
    code, out, _ = run("tune", "--help")
    assert code == 0
    for text in ("--config tuning/adam/best.json", "--no-pruning", "kfac@10", "postgresql://"):
        assert text in out


def test_a_terminal_gets_a_bar(capfd: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=True, width=120)
    with watching(console, "adam", quiet=False) as watch:
        watch(Status(0, 64, None, 0, 0, 100))
        watch(Status(12, 64, 51.5, 8, 34, 100))
    out = capfd.readouterr().out
    assert "━" in out
    assert "12/64" in out
    assert "best train 51.500  8 at epoch 34/100" in out


def _default_sigint() -> None:
    """Undo what a shell does to its background jobs, which ignore Ctrl-C, and so would the child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
