"""The IDX files of MNIST and Fashion-MNIST, and a reader for their format.

An IDX file is two zero bytes, a code for the type of its numbers (8: unsigned bytes), the number of
dimensions, each dimension as a big-endian 32-bit integer, and then the numbers, last index fastest.
A file is read only if its uncompressed bytes are the published ones; mirrors compress them differently.
The first bytes tell whether a file is compressed. Where files are searched, and the advice for bad
files, is in `datasets.py`.
"""

import gzip
import hashlib
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class IdxFile:
    """One published file: its uncompressed name, the shape of its array, and its SHA-256."""

    name: str
    shape: tuple[int, ...]
    sha256: str

    def find(self, folders: Sequence[Path]) -> Path | None:
        """Return the first plain or gzip file of this name in the folders, or None."""
        paths = (folder / name for folder in folders for name in (self.name, self.name + ".gz"))
        return next((path for path in paths if path.is_file()), None)

    def read(self, path: Path) -> Bytes:
        """Return the array in the file.

        Raises:
            ValueError: If the file is not the published one; the message continues its name.
        """
        header = bytes([0, 0, 8, len(self.shape)])
        header += b"".join(size.to_bytes(4, "big") for size in self.shape)
        length = len(header) + math.prod(self.shape)
        content = _contents(path, length + 1)
        if not content:
            raise ValueError("is empty")
        if content[:4] != header[:4]:
            raise ValueError(f"begins with {content[:4].hex(' ')}, not with {header[:4].hex(' ')}")
        if content[: len(header)] != header:
            sizes = np.frombuffer(content[4 : len(header)].ljust(len(header) - 4, b"\0"), ">i4")
            raise ValueError(f"holds {_times(sizes.tolist())} numbers, not {_times(self.shape)}")
        if len(content) != length:
            extent = "more" if len(content) > length else f"only {len(content):,}"
            raise ValueError(f"has {extent} bytes where {length:,} are expected")
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise ValueError("has other contents than the published file (SHA-256 differs)")
        return np.frombuffer(content, np.uint8, offset=len(header)).reshape(self.shape)


@dataclass(frozen=True)
class IdxSet:
    """A published data set: its files by their roles, and the addresses that serve them."""

    files: dict[str, IdxFile]
    mirrors: tuple[str, ...]


def _contents(path: Path, limit: int) -> bytes:
    """Return the uncompressed bytes of the file, at most `limit`."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == GZIP_MAGIC
        with gzip.open(path) if zipped else path.open("rb") as file:
            return file.read(limit)
    except EOFError as error:
        raise ValueError("ends in the middle of its gzip data") from error
    except (zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"has broken gzip data ({error})") from error
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error


def _times(sizes: Sequence[int]) -> str:
    return " × ".join(map(str, sizes))


def _idx_set(sha256: tuple[str, str, str, str], mirrors: tuple[str, ...]) -> IdxSet:
    files = {
        "train": IdxFile("train-images-idx3-ubyte", (60000, 28, 28), sha256[0]),
        "test": IdxFile("t10k-images-idx3-ubyte", (10000, 28, 28), sha256[1]),
        "train_labels": IdxFile("train-labels-idx1-ubyte", (60000,), sha256[2]),
        "test_labels": IdxFile("t10k-labels-idx1-ubyte", (10000,), sha256[3]),
    }
    return IdxSet(files, mirrors)


IDX_SETS = {
    "mnist": _idx_set(
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
    ),
    "fashion-mnist": _idx_set(
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
    ),
}
