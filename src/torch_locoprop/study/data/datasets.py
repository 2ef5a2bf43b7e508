"""The study's data sets by name: images of 28 x 28 pixels as rows of 784 numbers in [0, 1].

    from torch_locoprop.study.data import datasets

    images = datasets.load("mnist").train    # [60000, 784], float32

`curves` needs no file: its images are generated unless the genuine `digs3pts_1.mat` is found. The files
of `mnist` and `fashion-mnist` are downloaded once unless they are found.

Files are searched in this order: in `data_dir` (`--data-dir`) and in the folder that
`TORCH_LOCOPROP_DATA` names, in each first in the subfolder with the name of the data set; then in
Debian's folder for data sets; then in the cache. A file that is not the published one is an error.
"""

import hashlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_locoprop.paper.names import unknown
from torch_locoprop.study.data.curves import curves
from torch_locoprop.study.data.curves_files import GENUINE, SEED, generated, is_in, read_mat
from torch_locoprop.study.data.download import DownloadError, Progress, fetch
from torch_locoprop.study.data.idx import IDX_SETS, IdxFile

NAMES = ("curves", *IDX_SETS)

VARIABLE = "TORCH_LOCOPROP_DATA"
"""The environment variable that names a folder with data."""

DEBIAN = Path("/usr/share/datasets")
"""Where Debian packages such as dataset-fashion-mnist install their files."""

IMAGES = {"train", "test"}
"""The files that a data set must have; labels are optional."""

ELSEWHERE = f"name a folder that has it with --data-dir or {VARIABLE}"


class DatasetError(RuntimeError):
    """A data set is missing, broken or not the published one; the message says what to do."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """The images of a data set.

    Args:
        name: The name of the data set.
        train: Training images `[N, 784]`, float32 in [0, 1].
        test: Test images `[N, 784]`, float32 in [0, 1].
        source: What the images are, such as `published IDX files`; never a path.
        train_labels: Labels `[N]`, int64, if the data set has them.
        test_labels: Labels `[N]`, int64, if the data set has them.
    """

    name: str
    train: Tensor
    test: Tensor
    source: str
    train_labels: Tensor | None = None
    test_labels: Tensor | None = None

    @cached_property
    def fingerprint(self) -> str:
        """The first sixteen hexadecimal digits of the SHA-256 of all images."""
        digest = hashlib.sha256()
        for images in (self.train, self.test):
            digest.update(repr(tuple(images.shape)).encode())
            digest.update(images.cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    @property
    def title(self) -> str:
        """The name, with the source where a name has several: `curves (generated)`."""
        return f"{self.name} ({self.source})" if self.name == "curves" else self.name

    @property
    def metadata(self) -> dict[str, str]:
        """The facts that a result records, so that only results on equal data are compared."""
        return {"name": self.name, "source": self.source, "fingerprint": self.fingerprint}


class Status(NamedTuple):
    """The availability of a data set.

    Args:
        name: The name of the data set.
        ready: True if it can be loaded without a download: its files are there and are the
            published ones.
        detail: Where it is, or which files are missing or wrong.
    """

    name: str
    ready: bool
    detail: str


def load(
    name: str,
    data_dir: Path | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """Return a data set.

    Args:
        name: One of `NAMES`.
        data_dir: A folder to search first.
        download: Download files that are not found.
        progress: Called during downloads with the file's name, the bytes so far, and the total.

    Raises:
        ValueError: If the name is unknown.
        DatasetError: If files are missing or broken.
    """
    if name not in NAMES:
        raise ValueError(unknown("data set", name, NAMES))
    folders = _folders(name, data_dir)
    if name == "curves":
        return _load_curves(folders)
    return _load_idx(name, folders, download, progress)


def some_curves(train: int, test: int, seed: int = SEED) -> Dataset:
    """Return a data set of this many generated curves; the default seed is that of `curves`."""
    images = curves(train + test, seed=seed)
    of = "" if seed == SEED else f" at seed {seed}"
    return Dataset(
        "curves", images[:train], images[train:], f"the first {len(images)} generated{of}"
    )


def status(data_dir: Path | None = None, names: Collection[str] = NAMES) -> list[Status]:
    """Return the availability of data sets.

    All files of these data sets are read and compared with the published ones, by size and SHA-256.

    Args:
        data_dir: A folder to search first.
        names: The data sets.
    """
    return [
        (_status_curves if name == "curves" else _status_idx)(name, _folders(name, data_dir))
        for name in NAMES
        if name in names
    ]


def cache_dir() -> Path:
    """Return the folder for downloaded and generated files; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torch-locoprop"


def _folders(name: str, data_dir: Path | None) -> list[Path]:
    """Return the folders that may hold the data set, in the order in which they are searched."""
    given = []
    if data_dir is not None:
        given.append(("--data-dir", Path(data_dir)))
    if os.environ.get(VARIABLE):
        given.append((VARIABLE, Path(os.environ[VARIABLE])))
    for origin, folder in given:
        if not folder.is_dir():
            raise DatasetError(
                f"{folder}, given by {origin}, is not a folder. Give an existing folder."
            )
    pairs = ((folder / name, folder) for _, folder in given)
    return [*(folder for pair in pairs for folder in pair), DEBIAN / name, cache_dir() / name]


def _load_curves(folders: list[Path]) -> Dataset:
    path = _genuine_curves(folders)
    if path is None:
        train, test = map(_unit, generated(_curves_cache()))
        return Dataset("curves", train, test, "generated")
    try:
        train, test = map(torch.from_numpy, read_mat(path))
    except ImportError as error:
        raise DatasetError(
            f"Reading {path} needs scipy. Install it with: pip install 'torch-locoprop[study]'; or "
            "move the file away to use generated images instead."
        ) from error
    except ValueError as error:
        raise DatasetError(
            f"{path} {error}. Replace it by the genuine file, or move it away to use generated "
            "images instead."
        ) from error
    return Dataset("curves", train, test, GENUINE)


def _genuine_curves(folders: list[Path]) -> Path | None:
    return next((folder / GENUINE for folder in folders if (folder / GENUINE).is_file()), None)


def _curves_cache() -> Path:
    return cache_dir() / "curves" / "generated.bin"


def _status_curves(name: str, folders: list[Path]) -> Status:
    path = _genuine_curves(folders)
    if path is None:
        cache = _curves_cache()
        return Status(name, True, f"generated: {cache if is_in(cache) else 'on first use'}")
    try:
        read_mat(path)
    except ImportError:
        return Status(name, False, f"{path} needs scipy")
    except ValueError as error:
        return Status(name, False, f"{path} {error}")
    return Status(name, True, f"genuine: {path}")


def _load_idx(name: str, folders: list[Path], download: bool, progress: Progress | None) -> Dataset:
    files = IDX_SETS[name].files
    paths = {role: path for role, file in files.items() if (path := file.find(folders))}
    missing = [role for role in files if role not in paths]
    # The study needs no labels, so missing labels alone are not downloaded.
    if not IMAGES.isdisjoint(missing):
        if not download:
            names = ", ".join(files[role].name for role in missing)
            raise DatasetError(
                f"{name}: {names} not found, plain or .gz, in {', '.join(map(str, folders))}. "
                f"Allow the download, or {ELSEWHERE}."
            )
        # Images last, so that an interrupted download does not look like a complete data set.
        for role in sorted(missing, key=IMAGES.__contains__):
            paths[role] = _download(name, files[role], progress)
    arrays = {role: _read(name, files[role], path) for role, path in paths.items()}
    labels = {
        role: torch.from_numpy(array.astype(np.int64))
        for role, array in arrays.items()
        if role not in IMAGES
    }
    return Dataset(
        name, _unit(arrays["train"]), _unit(arrays["test"]), "published IDX files", **labels
    )


def _download(name: str, file: IdxFile, progress: Progress | None) -> Path:
    """Download the file into the cache and return its path."""
    path = cache_dir() / name / f"{file.name}.gz"
    urls = [mirror + path.name for mirror in IDX_SETS[name].mirrors]
    try:
        fetch(urls, path, file.read, progress)
    except DownloadError as error:
        raise DatasetError(
            f"{name}: {path.name} could not be downloaded ({error}). "
            f"Try again with a network connection, or {ELSEWHERE}."
        ) from error
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be written ({error.strerror}). "
            f"Set XDG_CACHE_HOME to a folder with enough space, or {ELSEWHERE}."
        ) from error
    return path


def _read(name: str, file: IdxFile, path: Path) -> npt.NDArray[np.uint8]:
    try:
        return file.read(path)
    except ValueError as error:
        raise DatasetError(
            f"{path} {error}. It is not the published file of {name}: delete it or move it away to "
            f"download it again, or {ELSEWHERE}."
        ) from error


def _status_idx(name: str, folders: list[Path]) -> Status:
    files = IDX_SETS[name].files
    paths = {role: path for role, file in files.items() if (path := file.find(folders))}
    missing = [files[role].name for role in files if role in IMAGES and role not in paths]
    wrong = []
    for role, path in paths.items():
        try:
            files[role].read(path)
        except ValueError as error:
            wrong.append(f"{path} {error}")
    if wrong:
        return Status(name, False, "; ".join(wrong))
    if missing:
        return Status(name, False, f"missing, downloaded on first use: {', '.join(missing)}")
    return Status(name, True, ", ".join(dict.fromkeys(str(path.parent) for path in paths.values())))


def _unit(pixels: npt.NDArray[np.uint8]) -> Tensor:
    """Return bytes `[N, ...]` as float32 in [0, 1], `[N, 784]`."""
    images = pixels.reshape(len(pixels), -1).astype(np.float32)
    images /= 255
    return torch.from_numpy(images)
