"""`locoprop train` under torchrun: two processes train one model as one process does."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import torch_locoprop
from torch_locoprop.study.cli import exit_codes
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.processes import Processes
from torch_locoprop.study.training.run_folder import RunFolder
from torch_locoprop.study.training.runner import check_data, run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="torchrun needs libuv there")

SCRIPT = Path(__file__).with_name("torchrun_script.py")
METHODS = ("locoprop-m", "locoprop-s", "locoprop-spectral", "exact-s", "adam", "muon", "shampoo")
TASK = ["train", "--model", "12-8-3", "--batch-size", "16", "--device", "cpu"]
LONG = [*TASK, "-m", "locoprop-m", "--epochs", "6", "--out"]

WRONG = {
    "batch": ([*TASK, "--batch-size", "15", "--out", "x"], "Invalid batch_size=15 for 2 processes"),
    "method": ([*TASK, "-m", "kfac@10", "--out", "x"], "kfac@10 needs the rows of the whole batch"),
    "unknown": ([*TASK, "-m", "adem", "--out", "x"], "Did you mean 'adam'"),
    "command": (["compare", "adam"], "locoprop compare does not run under torchrun"),
    "no folder": (
        [*TASK, "--epochs", "1", "--out", "file/x"],
        "Choose a folder that you can write",
    ),
    "taken": ([*TASK, "-m", "adam", "--epochs", "4", "--out", "adam"], "adam already has a run"),
}


def torchrun(folder: Path, commands: list[list[str]]) -> None:
    """Run the commands in two processes that torchrun starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*("-m", "torch.distributed.run"), "--nproc-per-node", "2", "--master-port", str(port)]
    paths = [Path(tiny.__file__).parent, Path(torch_locoprop.__file__).parents[1]]
    done = subprocess.run(
        [sys.executable, *words, str(SCRIPT), str(folder), json.dumps(commands)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def outcomes(folder: Path, number: int) -> list[dict[str, Any]]:
    """Return exit code, output and errors of one command in both processes."""
    return [json.loads((folder / f"{rank}-{number}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where torchrun has run all commands of this file."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "file").touch()
    commands = [[*LONG, "stopped"], ["train", "--resume", "--out", "stopped"], [*LONG, "whole"]]
    commands += [[*TASK, "-m", name, "--epochs", "4", "--out", name] for name in METHODS]
    commands += [command for command, _ in WRONG.values()]
    torchrun(folder, commands)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_equal_one(method: str, folder: Path, tmp_path: Path) -> None:
    files = RunFolder(folder / method)
    assert files.description()["environment"]["processes"] == 2
    torch.set_default_dtype(torch.float64)
    try:
        alone = run(files.config(), tmp_path, data=tiny.data(dtype=torch.float64)).metrics
    finally:
        torch.set_default_dtype(torch.float32)
    together = files.metrics()
    assert len(alone) == len(together) == 5
    assert alone[0].train_loss > alone[-1].train_loss
    for one, two in zip(alone, together, strict=True):
        assert two.train_loss == pytest.approx(one.train_loss, rel=1e-10)
        assert two.test_loss == pytest.approx(one.test_loss, rel=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_only_the_first_process_prints(method: str, folder: Path) -> None:
    first, second = outcomes(folder, 3 + METHODS.index(method))
    assert first["code"] == second["code"] == 0
    assert first["out"].startswith(f"{method}: train loss ")
    assert first["err"].count(f"{method}  epoch ") == 5
    assert (second["out"], second["err"]) == ("", "")


def test_a_signal_saves_once_and_the_run_continues(folder: Path) -> None:
    """The signals come to the second process alone."""
    first, second = outcomes(folder, 0)
    assert first["code"] == second["code"] == 130
    place = "epoch 2 and step 2 of the next epoch"
    message = first["err"].splitlines()[-1]
    assert message.startswith(
        f"Interrupted, with a checkpoint after {place}. Continue with: torchrun"
    )
    assert message.endswith("-m torch_locoprop_command train --resume --out stopped")
    assert (first["out"], second["out"], second["err"]) == ("", "", "")
    first, second = outcomes(folder, 1)
    assert first["err"].startswith(f"Continuing stopped from {place} of 6.")
    assert (first["code"], second["code"], second["err"]) == (0, 0, "")
    stopped, whole = (RunFolder(folder / name).metrics() for name in ("stopped", "whole"))
    losses = [[(m.train_loss, m.test_loss) for m in metrics] for metrics in (stopped, whole)]
    assert losses[0] == losses[1]
    assert len(whole) == 7


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_trained_is_told_once(name: str, folder: Path) -> None:
    first, second = outcomes(folder, 3 + len(METHODS) + list(WRONG).index(name))
    failed = exit_codes.FAILED if name in ("no folder", "taken") else exit_codes.USAGE
    assert first["code"] == second["code"] == failed
    assert WRONG[name][1] in first["err"]
    assert len(first["err"].splitlines()) == 1
    assert (first["out"], second["out"], second["err"]) == ("", "", "")
    assert not (folder / "x").exists()


def test_another_number_of_processes_is_told(folder: Path) -> None:
    """A run of two processes differs from one in its last digits."""
    files = RunFolder(folder / "adam")
    here = files.description()
    assert files.other_environment(here) == ""
    del here["environment"]["processes"]
    assert files.other_environment(here) == "processes 2 there and 1 here"


def test_the_last_batch_must_be_divisible_too() -> None:
    config = RunConfig("adam", model="12-8-3", batch_size=8)
    check_data(config, tiny.data(42), Processes(0, 2))
    with pytest.raises(ValueError, match=r"last batch of an epoch has 1 of 41 images"):
        check_data(config, tiny.data(41), Processes(0, 2))
    with pytest.raises(ValueError, match=r"Invalid batch_size=8 for 3 processes.* such as 9"):
        check_data(config, tiny.data(42), Processes(0, 3))
