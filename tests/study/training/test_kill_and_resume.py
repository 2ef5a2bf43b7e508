"""A run killed twenty times at random moments is bit-identical to an uninterrupted one."""

import multiprocessing
import random
import signal
import sys
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import tiny
import torch

from torch_locoprop.study.training.run_folder import RunFolder
from torch_locoprop.study.training.run_result import result_of
from torch_locoprop.study.training.runner import run

KILLS = 20
LONGEST = 0.4
"""Seconds that a process has at most between its start and its kill."""


def train(folder: str, started: Event) -> None:
    """The work of one process: it resumes the run and saves after every epoch."""
    torch.set_num_threads(1)
    started.set()
    run(_config(), folder, resume=True, data=tiny.data(), checkpoint_seconds=0.0)


def _config() -> tiny.RunConfig:
    return tiny.config("locoprop-m", epochs=200, warmup_epochs=1)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    # A server that has imported torch once forks every process: a start takes milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch_locoprop.study.training.runner", "pytest", "torch._dynamo"]
    )
    moments = random.Random(0)
    folders = [tmp_path / "0"]
    kills = 0
    while kills < KILLS:
        started = context.Event()
        process = context.Process(target=train, args=(str(folders[-1]), started))
        process.start()
        assert started.wait(60)
        process.join(moments.uniform(0, LONGEST))
        process.kill()
        process.join()
        if process.exitcode == 0:
            folders.append(tmp_path / str(len(folders)))  # it was done: kill another run
        else:
            assert process.exitcode == -signal.SIGKILL, "a resumed run failed"
            kills += 1
        _check_whole(folders[-1])
    for folder in (folders[-1], tmp_path / "undisturbed"):
        process = context.Process(target=train, args=(str(folder), started))
        process.start()
        process.join()
        assert process.exitcode == 0
    for folder in folders:
        _check_same(folder, tmp_path / "undisturbed")


def _check_whole(folder: Path) -> None:
    """The metrics after a kill can be read and have the first epochs."""
    epochs = [row.epoch for row in RunFolder(folder).metrics()]
    assert epochs == list(range(len(epochs)))
    RunFolder(folder).checkpoint()


def _check_same(folder: Path, other: Path) -> None:
    def losses(path: Path) -> list[tuple[int, float, float]]:
        return [(row.epoch, row.train_loss, row.test_loss) for row in result_of(path).metrics]

    assert len(losses(folder)) == _config().epochs + 1
    assert losses(folder) == losses(other)
    one, two = (RunFolder(path).checkpoint() for path in (folder, other))
    assert one is not None
    assert two is not None
    for name, value in one.model.items():
        assert torch.equal(value, two.model[name])
    for mine, theirs in zip(
        one.optimizer["state"].values(), two.optimizer["state"].values(), strict=True
    ):
        for key, value in mine.items():
            assert torch.equal(value, theirs[key])
