"""TensorBoard logs have every epoch of every run once, with the numbers of the metrics."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torch_locoprop.study.cli import main, run_session
from torch_locoprop.study.data import datasets
from torch_locoprop.study.training import tensorboard
from torch_locoprop.study.training.run_folder import Metrics, RunFolder
from torch_locoprop.study.training.runner import run

TINY = ["--model", "12-8-3", "--epochs", "4", "--batch-size", "15", "--device", "cpu", "--quiet"]
TAGS = {
    "loss/train": lambda row: row.train_loss,
    "loss/test": lambda row: row.test_loss,
    "cost/seconds": lambda row: row.seconds,
    "cost/memory MiB": lambda row: row.memory_mib,
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load", lambda *_, **__: tiny.data())


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main.main(words)
    return int(stop.value.code or 0)


def events(folder: Path) -> EventAccumulator:
    read = EventAccumulator(str(folder), purge_orphaned_data=False)
    read.Reload()
    return read


def assert_same(folder: Path, files: RunFolder) -> None:
    """Each scalar has the epochs of the metrics, in order and once, to float32."""
    rows, read = files.metrics(), events(folder)
    for tag, number in TAGS.items():
        points = read.Scalars(tag)
        assert [point.step for point in points] == [row.epoch for row in rows]
        assert [point.value for point in points] == pytest.approx(list(map(number, rows)))


def test_a_run_is_logged_under_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    assert command("train", *TINY, "-m", "adam", "--out", "there", "--tensorboard", "logs") == 0
    files = RunFolder(Path("there"))
    (folder,) = Path("logs").iterdir()
    assert folder.name == files.config().name(tiny.data().fingerprint)
    assert_same(folder, files)
    read = events(folder)
    # Two epochs of warm-up, the first at zero, and two down to half a decrement.
    factors = [point.value for point in read.Scalars("schedule/rate factor")]
    assert factors == pytest.approx([0.0, 0.5, 0.5, 0.25])
    text = read.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    written = json.loads(text.removeprefix("```json").removesuffix("```"))
    assert written == files.config().to_dict()
    times = [point.wall_time for point in read.Scalars("loss/train")]
    seconds = [row.seconds for row in files.metrics()]
    assert [at - times[0] for at in times] == pytest.approx(seconds, abs=1e-5)


def test_an_interrupted_run_has_each_epoch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs beyond the last checkpoint are trained again; the log has the second version of them."""

    def interrupted(*arguments: Any, on_epoch: Any, **options: Any) -> Any:
        def stop(row: Metrics) -> None:
            on_epoch(row)
            if row.epoch == 2:
                raise KeyboardInterrupt

        return run(*arguments, on_epoch=stop, **options, checkpoint_seconds=1e9)

    words = ["train", *TINY, "--out", "there", "--tensorboard", "logs"]
    with monkeypatch.context() as patch:
        patch.setattr(run_session, "run", interrupted)
        assert command(*words) == 130
    (folder,) = Path("logs").iterdir()
    assert [point.step for point in events(folder).Scalars("loss/train")] == [0, 1, 2]
    assert command(*words, "--resume") == 0
    assert_same(folder, RunFolder(Path("there")))
    assert len(list(folder.iterdir())) == 1


def test_runs_that_were_finished_before_are_logged_too() -> None:
    words = ["compare", "adam", "sgd", *TINY]
    assert command(*words) == 0
    assert command(*words, "--tensorboard", "logs") == 0
    folders = sorted(Path("logs").iterdir())
    assert [folder.name for folder in folders] == sorted(p.name for p in Path("runs").iterdir())
    for folder in folders:
        assert_same(folder, RunFolder(Path("runs") / folder.name))


def test_a_full_disk_is_one_sentence_that_names_the_folder(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A limit on the size of files simulates a full disk; the log is the largest file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
    try:
        with (
            pytest.raises(OSError, match="logs/"),
            tensorboard.logging(
                Path("logs"), tiny.config(), RunFolder(Path("there")), tiny.data()
            ) as log,
        ):
            log(Metrics(0, 1.0, 1.0, 0.0, 0.0, False))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capfd.readouterr().err == ""


def test_without_the_option_nothing_is_logged() -> None:
    files = RunFolder(Path("there"))
    with tensorboard.logging(None, tiny.config(), files, tiny.data()) as log:
        log(Metrics(0, 1.0, 1.0, 0.0, 0.0, False))
    assert list(Path().iterdir()) == []


def test_a_missing_package_is_named_before_anything_starts(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr(datasets, "load", lambda *_, **__: pytest.fail("it started"))
    for words in (["train"], ["compare", "adam"]):
        assert command(*words, *TINY, "--tensorboard", "logs") == 1
        out, err = capfd.readouterr()
        assert out == ""
        assert 'pip install "torch-locoprop[tensorboard]"' in err
        assert len(err.splitlines()) == 1
    assert list(Path().iterdir()) == []
