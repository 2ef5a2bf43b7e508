"""Several processes share a search, some are killed: no trial is lost or made twice."""

import json
import multiprocessing
import random
import signal
import sys
import time
from collections import Counter
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from torch_locoprop.study import methods
from torch_locoprop.study.training.run_folder import RunFolder
from torch_locoprop.study.training.runner import run
from torch_locoprop.study.tuning import campaign, spaces
from torch_locoprop.study.tuning.campaign import Status
from torch_locoprop.study.tuning.locks import FileLocks

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL and flock")

KILLS = 20
LONGEST = 0.4
"""Seconds that a victim has at most between its start and its kill."""

FINISHED = (1, 2)
"""Optuna's numbers for complete and pruned."""


def search(folder: str, method: str, trials: int, epoch: int | None, reached: Event) -> None:
    """The work of one process; if `epoch` is given, it stops there and waits."""
    torch.set_num_threads(1)

    def watch(status: Status) -> None:
        if status.running and status.epoch == epoch:
            reached.set()
            time.sleep(600)

    if epoch is None:
        reached.set()
    base = tiny.config(method, epochs=6)
    space = spaces.of(methods.get(method), ranges={"lr": "1e-4:1e-1"})
    campaign.tune(base, space, folder, trials=trials, population=3, data=tiny.data(), watch=watch)


@pytest.fixture
def context() -> ForkServerContext:
    """A server that has imported torch forks every process, which takes milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch_locoprop.study.tuning.search", "pytest", "torch._dynamo"]
    )
    return context


def started(
    context: ForkServerContext, folder: Path, method: str, trials: int, epoch: int | None = None
) -> ForkServerProcess:
    reached = context.Event()
    process = context.Process(target=search, args=(str(folder), method, trials, epoch, reached))
    process.start()
    assert reached.wait(60)
    return process


def kill(process: ForkServerProcess) -> None:
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.log").read_text().splitlines()]


def parameters(folder: Path) -> dict[int, dict[str, float]]:
    """Return the parameters of each trial in the journal; none may be drawn twice."""
    found: dict[int, dict[str, float]] = {}
    for entry in entries(folder):
        if "param_name" in entry:
            own = found.setdefault(entry["trial_id"], {})
            assert entry["param_name"] not in own
            own[entry["param_name"]] = entry["param_value_internal"]
    return found


def check_whole(folder: Path, trials: int) -> None:
    """Every trial finished exactly once, no two have the same parameters, and the files agree."""
    finished = Counter(
        entry["trial_id"] for entry in entries(folder) if entry.get("state") in FINISHED
    )
    assert finished == dict.fromkeys(range(trials), 1)
    drawn = parameters(folder)
    assert sorted(drawn) == list(range(trials))
    assert len({json.dumps(own) for own in drawn.values()}) == trials
    rows = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert [row["number"] for row in rows] == list(range(trials))
    assert {row["state"] for row in rows} <= {"complete", "pruned", "diverged"}
    assert [row["settings"]["lr"] for row in rows] == [drawn[n]["lr"] for n in range(trials)]
    with FileLocks(folder).worker() as name:  # whoever comes next forgets the dead
        assert [path.name for path in (folder / "workers").iterdir()] == [name]
    assert list((folder / "workers").iterdir()) == []


def test_one_of_two_is_killed(context: ForkServerContext, tmp_path: Path) -> None:
    victim = started(context, tmp_path, "adam", 11, epoch=3)
    survivor = started(context, tmp_path, "adam", 11)
    for _ in range(600):  # until nothing is left but what the victim has
        if sum(entry.get("state") in FINISHED for entry in entries(tmp_path)) == 8:
            break
        time.sleep(0.05)
    assert survivor.is_alive(), "it went without waiting for the other"
    before = parameters(tmp_path)
    assert sorted(before) == list(range(11))
    kill(victim)
    survivor.join(60)
    assert survivor.exitcode == 0
    check_whole(tmp_path, 11)
    assert parameters(tmp_path) == before
    owners = [
        e["user_attr"]["worker"] for e in entries(tmp_path) if "worker" in e.get("user_attr", {})
    ]
    assert Counter(Counter(owners).values()) == {3: 1, 11: 1}


def test_a_run_of_a_killed_process_goes_on_where_it_was(
    context: ForkServerContext, tmp_path: Path
) -> None:
    folder = tmp_path / "tuning"
    kill(started(context, folder, "muon", 2, epoch=3))
    files = RunFolder(folder / "trials" / "0000")
    checkpoint = files.checkpoint()
    assert checkpoint is not None
    begun = (files.path / "config.json").stat().st_mtime_ns
    process = started(context, folder, "muon", 2)
    process.join(60)
    assert process.exitcode == 0
    check_whole(folder, 2)
    assert (files.path / "config.json").stat().st_mtime_ns == begun
    alone = run(files.config(), tmp_path / "alone", data=tiny.data()).metrics
    assert [m.train_loss for m in files.metrics()] == [m.train_loss for m in alone]


def test_kills_at_random_moments(context: ForkServerContext, tmp_path: Path) -> None:
    """Two processes at a time; one of them is killed repeatedly at random moments."""
    moments, trials = random.Random(0), 30
    survivor = started(context, tmp_path, "adam", trials)
    for _ in range(KILLS):
        victim = started(context, tmp_path, "adam", trials)
        victim.join(moments.uniform(0, LONGEST))
        victim.kill()
        victim.join()
        assert victim.exitcode in (0, -signal.SIGKILL)
    survivor.join(60)
    assert survivor.exitcode == 0
    check_whole(tmp_path, trials)


def test_nobody_survives_and_the_next_one_finds_it_all(
    context: ForkServerContext, tmp_path: Path
) -> None:
    """One process at a time, killed at random moments, until one finishes."""
    moments, kills = random.Random(1), 0
    for attempt in range(50):
        process = started(context, tmp_path, "adam", 6)
        process.join(moments.uniform(0, LONGEST) + 0.4 * attempt)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        kills += 1
    assert process.exitcode == 0
    assert kills > 0
    check_whole(tmp_path, 6)
