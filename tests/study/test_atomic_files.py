"""Atomic writes report errors that `torch.save` hides: a full disk, and Ctrl-C."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from torch_locoprop.study.atomic_files import replace

LARGE = {"weights": torch.zeros(100_000)}


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """A limit on the size of files simulates a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_in_the_middle_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match=r"checkpoint\.pt") as caught, small_files(50_000):
        replace(path, lambda file: torch.save(LARGE, file))
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_ctrl_c_in_the_middle_of_a_checkpoint(tmp_path: Path) -> None:
    class Pressed:
        """A file in whose second write Ctrl-C is pressed."""

        def __init__(self, file: IO[bytes]) -> None:
            self.file, self.writes = file, 0

        def write(self, content: Any) -> int:
            self.writes += 1
            if self.writes == 2:
                raise KeyboardInterrupt
            return self.file.write(content)

    with pytest.raises(KeyboardInterrupt):
        replace(tmp_path / "a", lambda file: torch.save(LARGE, Pressed(file)))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    def wrong(_: IO[bytes]) -> None:
        raise RuntimeError("wrong")

    with pytest.raises(RuntimeError, match="wrong"):
        replace(tmp_path / "a", wrong)
    assert list(tmp_path.iterdir()) == []
