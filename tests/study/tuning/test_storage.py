"""A search in a storage that machines share: each process has a folder of its own."""

import errno
import fcntl
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import optuna
import postgresql_server
import pytest
import sqlalchemy
import tiny
import torch

from torch_locoprop.study import methods
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.tuning import campaign, spaces
from torch_locoprop.study.tuning.campaign import Status, TuningResult
from torch_locoprop.study.tuning.journal import Journal
from torch_locoprop.study.tuning.journal_file import JournalFile
from torch_locoprop.study.tuning.locks import FileLocks
from torch_locoprop.study.tuning.storage import locks_of
from torch_locoprop.study.tuning.storage_address import StorageAddress

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL and flock")

TRIALS = 7
PASSWORD = "secret"


@pytest.fixture(scope="module")
def _server() -> Iterator[str]:
    with postgresql_server.running() as url:
        yield url


@pytest.fixture(params=["journal", "sqlite", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty storage."""
    if request.param == "postgresql":
        url: str = request.getfixturevalue("_server")
        name = f"test{time.monotonic_ns()}"
        _execute(url, f"CREATE DATABASE {name}")
        return url.replace("/postgres", f"/{name}").replace("@", f":{PASSWORD}@")
    file = tmp_path / "trials"
    return f"sqlite:///{file}.db" if request.param == "sqlite" else f"{file}.journal"


def _execute(url: str, statement: str) -> None:
    engine = sqlalchemy.create_engine(
        url.replace("postgresql", "postgresql+psycopg", 1),
        isolation_level="AUTOCOMMIT",
        poolclass=sqlalchemy.NullPool,
    )
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(statement))


def search(folder: Path, storage: str, method: str = "adam", **options: Any) -> TuningResult:
    base = tiny.config(method, epochs=6)
    space = spaces.of(methods.get(method), ranges={"lr": "1e-4:1e-1"})
    options = {"trials": TRIALS, "population": 2, "data": tiny.data(), **options}
    return campaign.tune(base, space, folder, storage=storage, **options)


def worker(folder: Path, storage: str, epoch: int | None, reached: Event) -> None:
    """The work of one process, which notes each result; at the given epoch it stops and waits."""
    torch.set_num_threads(1)
    folder.mkdir()
    tell = Journal.tell

    def noted(self: Journal, trial: optuna.Trial, *result: Any) -> None:
        tell(self, trial, *result)
        with open(folder / "told", "a") as file:
            file.write(f"{trial.number}\n")

    Journal.tell = noted  # type: ignore[method-assign]

    def watch(status: Status) -> None:
        if status.running and status.epoch == epoch:
            reached.set()
            time.sleep(600)

    if epoch is None:
        reached.set()
    search(folder, storage, watch=watch)


@pytest.fixture
def context() -> ForkServerContext:
    """A server that has imported torch forks every process, which takes milliseconds."""
    context = multiprocessing.get_context("forkserver")
    needed = ("search", "storage")
    modules = [f"torch_locoprop.study.tuning.{name}" for name in needed]
    context.set_forkserver_preload([*modules, "pytest"])
    return context


def started(
    context: ForkServerContext, folder: Path, storage: str, epoch: int | None = None
) -> ForkServerProcess:
    reached = context.Event()
    process = context.Process(target=worker, args=(folder, storage, epoch, reached))
    process.start()
    assert reached.wait(60)
    return process


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def check_whole(storage: str, folders: list[Path]) -> None:
    """Every trial finished exactly once, no two have the same settings, and the files agree."""
    told = [n for path in folders[0].parent.glob("*/told") for n in path.read_text().split()]
    assert Counter(told) == Counter(map(str, range(TRIALS)))
    for folder in folders:
        assert rows(folder) == rows(folders[0])
    assert [row["number"] for row in rows(folders[0])] == list(range(TRIALS))
    assert {row["state"] for row in rows(folders[0])} <= {"complete", "pruned", "diverged"}
    assert len({row["settings"]["lr"] for row in rows(folders[0])}) == TRIALS
    assert _in_optuna(storage) == [row["settings"]["lr"] for row in rows(folders[0])]


def _in_optuna(storage: str) -> list[float]:
    """Return the learning rates of all trials as Optuna itself reads them from the storage."""
    backend: optuna.storages.BaseStorage
    if "://" in storage:
        url = storage.replace("postgresql://", "postgresql+psycopg://")
        backend = optuna.storages.RDBStorage(url)
    else:
        backend = optuna.storages.JournalStorage(JournalFile(Path(storage)))
    study = optuna.load_study(study_name=None, storage=backend)
    found = [trial.params["lr"] for trial in study.trials]
    if isinstance(backend, optuna.storages.RDBStorage):
        backend.remove_session()
        backend.engine.dispose()
    return found


def test_one_of_three_processes_is_killed(
    context: ForkServerContext, storage: str, tmp_path: Path
) -> None:
    victim = started(context, tmp_path / "0", storage, epoch=3)
    survivors = [started(context, tmp_path / str(n), storage) for n in (1, 2)]
    for _ in range(600):  # until nothing is left but what the victim has
        done = [path.read_text().count("\n") for path in tmp_path.glob("*/told")]
        if sum(done) == TRIALS - 2:
            break
        time.sleep(0.05)
    assert all(process.is_alive() for process in survivors), "they went without waiting"
    before = _in_optuna(storage)
    victim.kill()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    for process in survivors:
        process.join(60)
        assert process.exitcode == 0
    check_whole(storage, [tmp_path / "1", tmp_path / "2"])
    assert _in_optuna(storage) == before


@pytest.mark.parametrize("storage", ["sqlite", "postgresql"], indirect=True)
def test_kills_at_random_moments(context: ForkServerContext, storage: str, tmp_path: Path) -> None:
    """Journals have this test, with more kills, in test_tune_processes.py."""
    moments = random.Random(0)
    survivor = started(context, tmp_path / "survivor", storage)
    for number in range(4):
        victim = started(context, tmp_path / str(number), storage)
        victim.join(moments.uniform(0, 0.4))
        victim.kill()
        victim.join()
    survivor.join(60)
    assert survivor.exitcode == 0
    found = rows(tmp_path / "survivor")
    assert [row["number"] for row in found] == list(range(TRIALS))
    assert {row["state"] for row in found} <= {"complete", "pruned", "diverged"}
    assert len(set(_in_optuna(storage))) == TRIALS


@pytest.mark.parametrize("method", ["adam", "muon"])
def test_a_process_that_was_taken_for_dead_drops_its_trials(
    storage: str, method: str, tmp_path: Path
) -> None:
    """As after the restart of a database: the locks are gone, and the process goes on."""
    told: list[int] = []
    tell = Journal.tell

    def noted(self: Journal, trial: optuna.Trial, *result: Any) -> None:
        tell(self, trial, *result)
        told.append(trial.number)

    def watch(status: Status) -> None:
        if status.running and status.epoch == 3 and not told:
            _forget_everyone(storage)
            search(tmp_path / "other", storage, method, trials=4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "tell", noted)
        result = search(tmp_path / "first", storage, method, trials=4, watch=watch)
    assert sorted(told) == [0, 1, 2, 3]
    assert list(result.trials) == rows(tmp_path / "first") == rows(tmp_path / "other")


def _forget_everyone(storage: str) -> None:
    if storage.startswith("postgresql"):
        _execute(
            storage,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        return
    path = StorageAddress.of(storage).path
    assert path is not None
    for file in path.with_name(f"{path.name}.locks").glob("workers/*"):
        file.unlink()


def test_a_worker_is_alive_as_long_as_it_lives(storage: str) -> None:
    locks = locks_of(StorageAddress.of(storage), "one")
    with locks.worker() as first, locks.worker() as second, locks.locked():
        assert locks.is_alive(first)
        assert locks.is_alive(second)
        assert not locks.is_alive("nobody")
    with locks.locked():
        assert not locks.is_alive(first)


def test_a_storage_has_many_searches(storage: str, tmp_path: Path) -> None:
    adam = search(tmp_path / "adam", storage, trials=3)
    sgd = search(tmp_path / "sgd", storage, "sgd", trials=2)
    again = search(tmp_path / "again", storage, trials=4)
    assert (len(adam.trials), len(sgd.trials), len(again.trials)) == (3, 2, 4)
    assert again.trials[:3] == adam.trials
    description = (tmp_path / "adam" / "tuning.json").read_text()
    assert json.loads(description)["storage"] == storage.replace(f":{PASSWORD}", "")
    assert not (tmp_path / "adam" / "journal.log").exists()


def test_a_search_is_the_same_in_every_storage(storage: str, tmp_path: Path) -> None:
    """Settings are drawn by the number of the trial, and losses are stored without rounding."""
    base, space = tiny.config("adam", epochs=6), spaces.of(methods.get("adam"))
    options: dict[str, Any] = {"trials": 5, "data": tiny.data()}
    here = campaign.tune(base, space, tmp_path / "here", **options)
    there = campaign.tune(base, space, tmp_path / "there", storage=storage, **options)
    for one, other in zip(here.trials, there.trials, strict=True):
        for name in ("number", "state", "settings", "train_loss", "test_loss"):
            assert one[name] == other[name]


def test_a_folder_has_the_search_of_one_storage(tmp_path: Path) -> None:
    search(tmp_path / "out", f"{tmp_path}/a", trials=1)
    with pytest.raises(RunError, match=r"storage is '.*/a' there and '.*/b' here"):
        search(tmp_path / "out", f"{tmp_path}/b", trials=1)
    base, space = tiny.config("adam", epochs=6), spaces.of(methods.get("adam"))
    with pytest.raises(RunError, match=r"storage is '.*/a' there and 'the folder' here"):
        campaign.tune(base, space, tmp_path / "out", trials=1, data=tiny.data())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "Invalid storage ''"),
        ("sqlite:trials.db", "Invalid storage 'sqlite:trials.db'"),
        ("sqlite://", r"Must be sqlite:///FILE"),
        ("sqlite:///", r"Must be sqlite:///FILE"),
        ("sqlite:///:memory:", r"Must be sqlite:///FILE"),
        ("sqlite://trials.db", r"Must be sqlite:///FILE"),
        ("mysql://me:secret@host/trials", r"Unknown storage mysql://\.\.\. Must be the path"),
        ("postgres://me@host/trials", r"Unknown storage postgres://"),
        ("postgresql://me:secret@host", r"Invalid storage 'postgresql://me@host'. Must be"),
        (
            "postgresql://me:secret@host:x/trials",
            r"Invalid storage 'postgresql://me@host:x/trials'",
        ),
    ],
)
def test_what_is_not_an_address_is_told(address: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        search(tmp_path / "out", address)
    assert PASSWORD not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_password_is_kept_out_of_files_and_messages() -> None:
    address = StorageAddress.of("postgresql://me:secret@host:5/db?password=secret&sslmode=require")
    assert address.public == "postgresql://me@host:5/db?sslmode=require"
    assert (
        StorageAddress.of("postgresql:///db?host=/run/pg").public == "postgresql:///db?host=/run/pg"
    )


def test_storages_that_cannot_be_reached_are_told(tmp_path: Path) -> None:
    for form in ("{}", "sqlite:///{}"):
        with pytest.raises(RunError, match=r"does not exist. Create it, or check that the shared"):
            search(tmp_path / "out", form.format(tmp_path / "gone" / "trials"))
        with pytest.raises(RunError, match=r"is a folder. Give a file in it"):
            search(tmp_path / "out", form.format(tmp_path))
    assert not (tmp_path / "out").exists()


def test_files_of_other_kinds_are_told(tmp_path: Path) -> None:
    path = tmp_path / "trials"
    path.write_text("nonsense, long enough to be the header of some other file\n" * 20)
    with pytest.raises(RunError, match=r"Line 1 of .*trials is not an entry"):
        search(tmp_path / "out", str(path))
    with pytest.raises(RunError, match=r"does not work \(file is not a database\). Check that"):
        search(tmp_path / "other", f"sqlite:///{path}")


def test_a_database_of_another_version_of_optuna_is_told(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/trials.db"
    search(tmp_path / "out", url, trials=1)
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("UPDATE alembic_version SET version_num = 'v9'"))
    with pytest.raises(RunError, match=r"trials.db cannot be used: .*optuna"):
        search(tmp_path / "out", url, trials=1)


def test_a_missing_driver_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ImportError, match=r"needs the package psycopg.*\[postgresql\]") as error:
        search(tmp_path / "out", "postgresql://me:secret@host/trials")
    assert PASSWORD not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_server_that_does_not_answer_is_told(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(RunError, match=r"me@127.0.0.1:1/trials does not work \(.*refused") as error:
        search(tmp_path / "out", "postgresql://me:secret@127.0.0.1:1/trials")
    assert "Check that the server runs" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_disk_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with ExitStack() as stack, pytest.raises(RunError, match=r"has no file locks .* or a database"):
        stack.enter_context(FileLocks(tmp_path).locked())
