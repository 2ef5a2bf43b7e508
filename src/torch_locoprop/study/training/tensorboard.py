"""Log runs for TensorBoard: scalars for every epoch, and the configuration as text.

Whenever a run starts, continues or is found finished, all its scalars are written again from epoch 0,
so that epochs after the last checkpoint of an interrupted run are not logged twice. Needs the package
`tensorboard`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import Metrics, RunFolder


def writer_class() -> Any:
    """Return the class `SummaryWriter` of torch.

    Raises:
        ImportError: If `tensorboard` is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "--tensorboard needs the package tensorboard, which is not installed. "
            'Install it with: pip install "torch-locoprop[tensorboard]".'
        ) from error
    return SummaryWriter


def checked(directory: Path | None) -> Path | None:
    """Return the given folder, or raise an ImportError if it is given and `tensorboard` is missing."""
    if directory is not None:
        writer_class()
    return directory


@contextmanager
def logging(
    directory: Path | None, config: RunConfig, files: RunFolder, data: Dataset
) -> Iterator[Callable[[Metrics], None]]:
    """Log a run within this context; yields the function to call with the metrics of each epoch.

    Without a directory nothing is logged.
    """
    if directory is None:
        yield lambda row: None
        return
    log = _Log(directory / config.name(data.fingerprint), config, files, len(data.train))
    with _silent_threads():
        try:
            yield log
            log.start()  # a run that was already finished had no epoch to log
        finally:
            log.close()


@contextmanager
def _silent_threads() -> Iterator[None]:
    """Hide errors of TensorBoard's threads on a full disk; its calls raise the same errors."""
    before = threading.excepthook

    def hook(thread: threading.ExceptHookArgs) -> None:
        if not isinstance(thread.exc_value, OSError):
            before(thread)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


class _Log:
    """The event file of one run."""

    def __init__(self, folder: Path, config: RunConfig, files: RunFolder, images: int) -> None:
        self.folder, self.config, self.files = folder, config, files
        self.rate = config.rate(images)
        self.began = time.time()
        self.writer: Any = None

    def __call__(self, row: Metrics) -> None:
        if self.writer is None:
            self.start()
        else:
            with self._named():
                self._write(row)

    def start(self) -> None:
        """Write a new event file with all epochs so far, unless this was done before."""
        if self.writer is None:
            for path in self.folder.glob("events.out.tfevents.*"):
                path.unlink()
            with self._named():
                self.writer = writer_class()(self.folder)
                self.writer.add_text("config", _as_text(self.config))
                for row in self.files.metrics():
                    self._write(row)

    def close(self) -> None:
        if self.writer is not None:
            with self._named():
                self.writer.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the path to errors of the file system, which TensorBoard does not do."""
        try:
            yield
        except OSError as error:
            where = error.filename or str(self.folder)
            raise OSError(error.errno, error.strerror, where) from error

    def _write(self, row: Metrics) -> None:
        values = {
            "loss/train": row.train_loss,
            "loss/test": row.test_loss,
            "cost/seconds": row.seconds,
            "cost/memory MiB": row.memory_mib,
        }
        if row.epoch > 0:
            values["schedule/rate factor"] = self.rate(row.epoch - 1, 0)
        for tag, value in values.items():
            # With this wall time, the "relative" axis of TensorBoard shows seconds of training.
            self.writer.add_scalar(tag, value, row.epoch, walltime=self.began + row.seconds)
        self.writer.flush()


def _as_text(config: RunConfig) -> str:
    """Return the configuration as Markdown."""
    return f"```json\n{json.dumps(config.to_dict(), indent=2)}\n```"
